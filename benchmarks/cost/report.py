"""The table of figures, with its targets."""

#: most that a ratio to plain `linear` may be: whole process, from the start of the merge
TARGETS = {
    "SmolLM2-135M, near": (1.25, 2.0),
    "SmolLM2-135M, twin": (1.5, 4.0),
    "Gemma 3 270M, near": (1.25, 2.0),
    "Gemma 3 270M, twin": (1.5, 4.0),
    "Llama-8B layers, near": (1.5, 1.5),
    "Llama-8B layers, other": (None, 6.0),
}
MEMORY, FASTER, START, IMPORT = 1.1, 5.0, 0.001, 0.005

WORDS = {"near": "same lineage", "twin": "scrambled twin", "other": "independent weights"}
WORDS["independent"] = WORDS["other"]

Figures = dict[str, dict]


def markdown(results: Figures, old: Figures | None = None) -> str:
    """Return the whole report; with ratios to an earlier one where it is given."""
    machine = results["machine"]
    lines = [
        "# Cost of alignment",
        "",
        f"Made by `python benchmarks/cost` on {machine['processor']}, {machine['threads']} "
        f"thread(s), torch {machine['torch']}, load {machine['busy']} at the start, "
        f"in {machine['minutes']} minutes. The best of several runs, methods in turn.",
    ]
    real = [f"{name} ({folder})" for name, folder in results.get("weights", {}).items()]
    if real:
        lines += ["", "Weights are random but for " + ", ".join(real) + "."]
    for key, section in (
        ("merges", _merges),
        ("growth", _growth),
        ("matching", _matching),
        ("neurons", _neurons),
        ("starts", _starts),
    ):
        if key in results:
            lines += ["", *section(results[key], (old or {}).get(key))]
    return "\n".join(lines) + "\n"


def device_markdown(results: Figures) -> str:
    """Return the report of a run with ``--device``."""
    machine = results["machine"]
    lines = [
        f"# Cost of alignment on {machine['device']}",
        "",
        f"Made by `python benchmarks/cost --device`; {machine['processor']}, {machine['threads']} "
        f"thread(s), torch {machine['torch']}. Seconds; MiB on the device.",
        "",
        "## One layer",
        "",
    ]
    parts = ["heads", "neurons", "distance"]
    columns = ["layer", *parts, *(f"{part} on the CPU" for part in parts), "memory"]
    rows = [
        [name, *(f"{one[key]:.4g}" if key in one else "" for key in columns[1:])]
        for name, one in results["layers"].items()
    ]
    lines += [*table(columns, rows), "", "## Merges of two models", ""]
    rows = []
    for name, figures in results["merges"].items():
        for how, one in figures.items():
            if how != "agreement":
                cells = (f"{one[k]:.2f}" for k in ("whole", "wall", "memory"))
                rows.append([name, how, *cells, f"{one.get('device memory', 0):.0f}"])
    columns = ["models", "method", "whole process", "merge", "memory of the process", "device"]
    lines += [*table(columns, rows), "", "## Agreement with the CPU", ""]
    rows = [
        [name, *(f"{figures['agreement'][k]:.3g}" for k in ("difference", "equal", "distance"))]
        for name, figures in results["merges"].items()
        if "agreement" in figures
    ]
    columns = ["models", "largest difference / rounding", "equal tensors", "change of distance"]
    lines += table(columns, rows)
    lines += ["", *(f"Left out: {name}: {why}." for name, why in results["left out"].items())]
    return "\n".join(lines).rstrip() + "\n"


def ratios(figures: Figures) -> dict[str, float]:
    """Ratios of `rotation_linear` to `linear`, by figure."""
    plain, aligned = figures["linear"], figures["rotation_linear"]
    return {key: aligned[key] / plain[key] for key in plain}


def _merges(found: Figures, old: Figures | None) -> list[str]:
    head = [
        "## Merges of two models",
        "",
        "`rotation_linear` against plain `linear`: ratios, with targets and seconds of both in",
        "brackets. CPU: processor time from the start of the merge.",
        "",
    ]
    columns = ["models", "whole process", "from the start of the merge", "CPU", "peak memory"]
    if old:
        columns.append("merge, before")
    lines = []
    for name, figures in found.items():
        ratio, (whole, inner) = ratios(figures), TARGETS.get(name, (None, None))
        plain, aligned = figures["linear"], figures["rotation_linear"]
        shape, kind = name.rsplit(", ", 1)
        cells = [
            f"{shape}, {WORDS[kind]}",
            _cell(ratio["whole"], whole, plain["whole"], aligned["whole"]),
            _cell(ratio["wall"], inner, plain["wall"], aligned["wall"]),
            _cell(ratio["cpu"], None, plain["cpu"], aligned["cpu"]),
            f"{ratio['memory']:.2f} (at most {MEMORY}; {aligned['memory']:.0f} MiB)",
        ]
        if old:
            cells.append(f"{ratios(old[name])['wall']:.2f}" if name in old else "")
        lines.append(cells)
    stages = list(dict.fromkeys(s for figures in found.values() for s in figures["stages"]))
    profile = [
        [name, *(f"{figures['stages'].get(s, 0.0):.2f}" for s in stages)]
        for name, figures in found.items()
    ]
    return [
        *head,
        *table(columns, lines),
        "",
        "Where the time of `rotation_linear` goes, in seconds of one run:",
        "",
        *table(["models", *stages], profile),
    ]


def _cell(ratio: float, target: float | None, plain: float, aligned: float) -> str:
    goal = f"at most {target}; " if target else ""
    return f"{ratio:.2f} ({goal}{aligned:.2f} to {plain:.2f} s)"


def _growth(found: Figures, old: Figures | None) -> list[str]:
    lines = []
    for name, figures in found.items():
        ratio, aligned = ratios(figures), figures["rotation_linear"]
        cells = [name, f"{aligned['wall']:.2f}", f"{aligned['cpu']:.2f}", f"{ratio['wall']:.2f}"]
        lines.append([*cells, f"{aligned['memory']:.0f}", f"{ratio['memory']:.2f}"])
    columns = ["same lineage", "s", "CPU s", "to `linear`", "MiB", "to `linear`"]
    return ["## Growth (SmolLM2's shapes)", "", *table(columns, lines)]


def _matching(found: Figures, old: Figures | None) -> list[str]:
    lines = []
    for name, one in found.items():
        for part in ("attention", "neurons", ""):
            ours, paper = (one[f"{who} {part}".strip()] for who in ("ours", "paper"))
            goal = f" (at least {FASTER:g})" if not part else ""
            cells = [f"{name}, {part or 'both'}", f"{ours:.3f}", f"{paper:.3f}"]
            lines.append([*cells, f"{paper / ours:.1f}{goal}"])
            if old:
                before = old[name][f"ours {part}".strip()]
                lines[-1].append(f"{before:.3f}")
    columns = ["BERT-base layer", "ours, s", "the paper's, s", "times faster"]
    distances = "; ".join(
        f"{name}: {one['ours distance']:.3f} and {one['paper distance']:.3f}"
        for name, one in found.items()
    )
    return [
        "## Matching one layer",
        "",
        *table([*columns, "ours before, s"] if old else columns, lines),
        "",
        f"Distances that are left, ours and the paper's: {distances}.",
    ]


def _neurons(found: Figures, old: Figures | None) -> list[str]:
    columns = ["gated layer", "neurons, width", "s", "all products, dense solver, s"]
    columns += ["same partner", "as drawn", "below the optimum", "certified gap"]
    lines = []
    for name, one in found.items():
        shape, _, kind = name.partition(", ")
        kind, _, noise = kind.partition(", ")
        cells = [", ".join([shape, WORDS[kind], *([noise] if noise else [])])]
        cells += [f"{one['n']}, {one['width']}", f"{one['ours']:.3f}"]
        cells.append(f"{one['dense']:.3f}" if "dense" in one else "")
        cells += [f"{100 * one[k]:.2f} %" if k in one else "" for k in ("same", "as drawn")]
        cells += [f"{one[k]:.1e}" if k in one else "" for k in ("below", "gap")]
        if old:
            cells.append(f"{old[name]['ours']:.3f}" if name in old else "")
        lines.append(cells)
    return [
        "## Matching the neurons of one layer",
        "",
        "bfloat16, one thread. Noise in standard deviations of the weights. The dense solver is",
        "the reference: neurons with the same partner as there, and by how much the sum of scores",
        "is below the optimum, relatively. As drawn: partners that are those of the twin as made.",
        "",
        *table([*columns, "s before"] if old else columns, lines),
    ]


def _starts(found: Figures, old: Figures | None) -> list[str]:
    goals = {"a start of Python": START, "import mergekit": IMPORT}
    lines = [
        [name, f"{1000 * seconds:.2f}", f"{1000 * goals[name]:g}" if name in goals else ""]
        for name, seconds in found.items()
    ]
    return ["## What the plugin adds", "", *table(["to", "ms", "at most"], lines)]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
