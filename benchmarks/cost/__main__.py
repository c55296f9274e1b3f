"""What alignment costs, beside plain merging: one command prints and stores the table.

    python benchmarks/cost                      # random weights of published shapes
    python benchmarks/cost --model "SmolLM2-135M=./SmolLM2-135M"     # real ones in their place
    python benchmarks/cost --against old.json   # and the ratio to a stored result
    python benchmarks/cost --large              # all layers, more runs
    python benchmarks/cost --device cuda        # on a GPU, in at most ten minutes, see on_device.py

Methods are run in turn, each merge in a process of its own; figures are the best of several runs.
Ratios are to plain `linear` on the same models, of wall time of the whole process and from the
start of the merge (imports take seconds and hide everything). Writes results.json and results.md
to the folder given by --out, by default this one.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
import yaml  # noqa: E402
from real import apart  # noqa: E402
from report import device_markdown, markdown  # noqa: E402

#: pairs that are merged: shape, companion, runs (of the last one several minutes), and with --large
MERGES = (
    ("SmolLM2-135M", "near", 5, 7),
    ("SmolLM2-135M", "twin", 5, 7),
    ("Gemma 3 270M", "near", 3, 7),
    ("Gemma 3 270M", "twin", 3, 7),
    ("Llama-8B layers", "near", 2, 5),
    ("Llama-8B layers", "other", 0, 1),
)
METHODS = ("linear", "rotation_linear")
PARTS = ("starts", "matching", "neurons", "merges", "growth")


def merge(
    method: str, models: list[Path], out: Path, *options: str, limit: float | None = None
) -> dict:
    """Merge in a process of its own; seconds, peak memory in MiB, and what the worker tells.

    Raises
    ------
    RuntimeError
        If it fails, or takes longer than ``limit`` seconds.
    """
    shutil.rmtree(out, ignore_errors=True)
    config = {
        "merge_method": method,
        "models": [{"model": str(m), "parameters": {"weight": 1 / len(models)}} for m in models],
        "dtype": "bfloat16",
    }
    file = out.with_suffix(".yml")
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, str(HERE / "worker.py"), *options, str(file), str(out)]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        timer = threading.Timer(limit or threading.TIMEOUT_MAX, process.kill)
        timer.start()
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        if status != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["killed"])[-1]
            raise RuntimeError(f"{method} of {models[-1].name}: {last}")
    whole = time.perf_counter() - start
    return {
        "whole": whole,
        "whole cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss / 1024,
        **json.loads(told.splitlines()[-1]),
    }


def in_turn(models: list[Path], folder: Path, runs: int) -> dict[str, dict[str, float]]:
    """Smallest figures of each method over several runs."""
    found: dict[str, list[dict]] = {method: [] for method in METHODS}
    for _ in range(runs):
        for method, results in found.items():
            results.append(merge(method, models, folder / "out"))
    return {
        method: {key: min(one[key] for one in results) for key in results[0]}
        for method, results in found.items()
    }


def merges(large: bool, checkpoints: dict[str, Path], shapes: list[str]) -> dict[str, dict]:
    from models import build, companions

    result: dict[str, dict] = {}
    for shape in dict.fromkeys(row[0] for row in MERGES):
        if shape not in shapes:
            continue
        rows = [row for row in MERGES if row[0] == shape and row[3 if large else 2]]
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            kinds = [kind for _, kind, *_ in rows]
            if shape in checkpoints:
                apart(companions, folder, checkpoints[shape], kinds)
            else:
                apart(build, folder, shape, kinds)
            for _, kind, few, many in rows:
                models = [folder / "model", folder / kind]
                figures = in_turn(models, folder, many if large else few)
                staged = merge("rotation_linear", models, folder / "out", "--stages")
                figures["stages"] = staged["stages"]
                result[f"{shape}, {kind}"] = figures
                print(f"{shape}, {kind}: {figures}", flush=True)
    return result


def growth(large: bool) -> dict[str, dict]:
    """Merges over the number of layers and of models, SmolLM2's shapes, same lineage."""
    from models import build

    depths, counts = ((8, 16, 32) if large else (6, 12, 24)), (2, 3, 4)
    result: dict[str, dict] = {}
    for depth, count in [(d, 2) for d in depths] + [(depths[0], c) for c in counts[1:]]:
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            kinds = [f"near{k}" for k in range(count - 1)]
            apart(build, folder, "SmolLM2-135M", kinds, depth)
            models = [folder / kind for kind in ("model", *kinds)]
            result[f"{depth} layers, {count} models"] = in_turn(models, folder, 5 if large else 2)
        print(f"{depth} layers, {count} models: {result[f'{depth} layers, {count} models']}")
    return result


def matching(large: bool) -> dict[str, dict]:
    from matcher import measure

    return apart(measure, 5 if large else 3)


def neurons(large: bool, checkpoints: dict[str, Path]) -> dict[str, dict]:
    from neurons import measure

    return apart(measure, large, checkpoints)


STARTS = {
    "a start of Python": """
import time
start = time.perf_counter()
import mergekit_rotation.startup
mergekit_rotation.startup.install()
print(time.perf_counter() - start)
""",
    "import mergekit": """
import time
what = "mergekit"
import mergekit_rotation.startup as startup
spent, inside = 0.0, False
def watched(function):
    def timed(*args, **kwargs):
        global spent, inside
        if inside:
            return function(*args, **kwargs)
        inside, start = True, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inside = False
            spent += time.perf_counter() - start
    return timed
startup._Finder.complete = watched(startup._Finder.complete)
startup.install()
__import__(what)
print(spent)
""",
}
STARTS["all imports of mergekit-yaml"] = STARTS["import mergekit"].replace(
    '"mergekit"', '"mergekit.scripts.run_yaml"'
)


def starts(large: bool) -> dict[str, float]:
    """Seconds that the plugin takes inside of fresh interpreters: the least of several."""
    result = {}
    for name, code in STARTS.items():
        flags = ["-S", "-c"] if name == "a start of Python" else ["-c"]
        paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
        values = [
            float(
                subprocess.run(
                    [sys.executable, *flags, code],
                    env={**os.environ, "PYTHONPATH": paths},
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(20 if large else 10)
        ]
        result[name] = min(values)
    return result


def machine() -> dict[str, object]:
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "busy": round(os.getloadavg()[0], 1),
    }


def on_device(device: str, small: bool, out: Path) -> None:
    """Measure on an accelerator, and write what was found to files named after it."""
    from devices import described
    from on_device import measure

    results = {"machine": {**machine(), **described(device)}, **measure(device, small, merge)}
    write(results, device_markdown(results), out, f"results-{torch.device(device).type}")
    if any(why.startswith("failed") for why in results["left out"].values()):
        sys.exit(1)


def write(results: dict, text: str, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="more runs, deeper models")
    parser.add_argument("--model", action="append", default=[], metavar="SHAPE=FOLDER")
    parser.add_argument("--shape", action="append", help="only merges of this shape")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--against", type=Path, help="results.json of an earlier run")
    parser.add_argument("--device", help="measure on this device, as cuda")
    parser.add_argument("--small", action="store_true", help="with --device: a rehearsal")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    if given.device:
        on_device(given.device, given.small, given.out)
        return
    from neurons import SHAPES

    checkpoints = {k: Path(v) for k, _, v in (one.partition("=") for one in given.model)}
    merged = list(dict.fromkeys(row[0] for row in MERGES))
    shapes = given.shape or merged
    for named, known in ((shapes, merged), (checkpoints, {*merged, *SHAPES})):
        for name in named:
            if name not in known:
                parser.error(f"there is no shape {name}; choose one of {', '.join(sorted(known))}")
    wanted = given.only or PARTS

    results: dict[str, dict] = {
        "machine": machine(),
        "weights": {k: v.name for k, v in checkpoints.items()},
    }
    start = time.perf_counter()
    if "starts" in wanted:
        results["starts"] = starts(given.large)
    if "matching" in wanted:
        results["matching"] = matching(given.large)
    if "neurons" in wanted:
        results["neurons"] = neurons(given.large, checkpoints)
    if "merges" in wanted:
        results["merges"] = merges(given.large, checkpoints, shapes)
    if "growth" in wanted:
        results["growth"] = growth(given.large)
    results["machine"]["minutes"] = round((time.perf_counter() - start) / 60, 1)
    old = json.loads(given.against.read_text(encoding="utf-8")) if given.against else None
    write(results, markdown(results, old), given.out, "results")


if __name__ == "__main__":
    main()
