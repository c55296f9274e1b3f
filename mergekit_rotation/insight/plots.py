"""Pictures of what the commands found, from the same mappings that are written as JSON.

Colours are those of Okabe and Ito, which people of every colour vision tell apart; what matters is
told by shapes and words as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.cluster.hierarchy import dendrogram, leaves_list, linkage
from scipy.spatial.distance import squareform

from mergekit_rotation.insight.tables import number, short_names

#: rings around squares, so that both are seen where they are equal
BEFORE: dict[str, Any] = {
    "color": "#d55e00",
    "marker": "o",
    "markerfacecolor": "none",
    "zorder": 3,
    "clip_on": False,
}
AFTER: dict[str, Any] = {"color": "#0072b2", "marker": "s", "zorder": 2, "clip_on": False}
_SERIES = (("before", BEFORE, 7.0), ("after", AFTER, 4.0))
#: from here on marks are smaller
_MANY = 40
_GREY = "#666666"
_LETTERS = {
    "same-coordinates": "C",
    "same-function": "F",
    "related": "R",
    "unrelated": "U",
}
#: up to here a matrix has room for words
_WORDS = 8
_CELL = {True: 1.25, False: 0.55}


@contextmanager
def _saved(file: Path, width: float, height: float) -> Iterator[Figure]:
    """Give a figure that is written at the end; letters of an SVG stay letters."""
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
        yield figure
        figure.savefig(file)


def plot_comparison(data: Mapping[str, Any], file: Path) -> None:
    """Draw a comparison: two models by layer and part, more of them as a clustered matrix.

    Parameters
    ----------
    data : mapping
        What ``compare`` writes as JSON.
    file : Path
        Ends in ``.png`` or ``.svg``.
    """
    if "models" in data:
        _plot_matrix(data, file)
    else:
        _plot_pair(data, file)


# -- two models -----------------------------------------------------------------------------------


def _plot_pair(data: Mapping[str, Any], file: Path) -> None:
    """Draw distances before and after, over the layers, one panel for each kind of part."""
    layers = data["layers"]
    kinds = list(dict.fromkeys(block["block"] for entry in layers for block in entry["blocks"]))
    kinds.sort(key=lambda kind: kind == "other")
    outside = data["outside"]
    heights = [1.5] * len(kinds) + ([0.45 + 0.28 * len(outside)] if outside else [])
    with _saved(file, 9, 1.1 + sum(heights or [0.5])) as figure:
        figure.suptitle(_pair_title(data), fontsize=10, ha="left", x=0.02)
        if not heights:
            figure.text(0.02, 0.3, data["reason"] or "nothing to compare")
            return
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, kind in zip(axes, kinds, strict=False):
            _plot_layers(ax, layers, kind)
        for ax in axes[1 : len(kinds)]:
            ax.sharex(axes[0])
        if kinds:
            axes[len(kinds) - 1].set_xlabel("layer of the reference")
        if outside:
            _plot_outside(axes[-1], outside)
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)


def _pair_title(data: Mapping[str, Any]) -> str:
    reference, model = short_names([data["reference"], data["model"]])
    title = f"{_short(model, 40)} aligned to {_short(reference, 40)}: {data['verdict']}"
    before, after = number(data["distance_before"]), number(data["distance_after"])
    return f"{title}\nrelative distance of all tensors {before} → {after}"


def _plot_layers(ax: Axes, layers: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Draw one kind of part: what lacks it, or is zero in the reference, has no mark."""
    index, before, after = [], [], []
    for entry in layers:
        for block in entry["blocks"]:
            if block["block"] == kind and block["distance_before"] is not None:
                index.append(entry["reference_layer"])
                before.append(block["distance_before"])
                after.append(block["distance_after"])
    scale = 1.0 if len(layers) <= _MANY else 0.6
    for values, (name, style, size) in zip((before, after), _SERIES, strict=True):
        label = f"{name} alignment"
        (line,) = ax.plot(index, values, ms=scale * size, lw=0.8, label=label, **style)
        line.set_gid(f"{kind}-{name}")
    named = "norms and other tensors" if kind == "other" else kind.replace("_", " ")
    ax.set_title(named, loc="left")
    ax.set_ylabel("relative distance")
    ax.set_ylim(0, 1.1 * max([*before, *after, 1e-3]))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    _calm(ax, "y")


def _plot_outside(ax: Axes, outside: Sequence[Mapping[str, Any]]) -> None:
    """Draw embeddings and heads, one line for each."""
    names = [_short(entry["tensor"].removesuffix(".weight"), 40) for entry in outside]
    places = [k for k, entry in enumerate(outside) if entry["distance_before"] is not None]
    for name, style, size in _SERIES:
        values = [outside[k][f"distance_{name}"] for k in places]
        (line,) = ax.plot(values, places, ms=size, ls="none", label=f"{name} alignment", **style)
        line.set_gid(f"outside-{name}")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_title("outside of the layers", loc="left")
    ax.set_xlabel("relative distance")
    _calm(ax, "x")


def _calm(ax: Axes, axis: Literal["x", "y"]) -> None:
    """Leave the frame out, and draw lines to read values from."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=axis, color="#dddddd", lw=0.6)
    ax.set_axisbelow(True)


def _short(text: str, length: int) -> str:
    """Return a name that fits, by its end, which tells models apart."""
    return text if len(text) <= length else "…" + text[1 - length :]


# -- a line between two models --------------------------------------------------------------------


def plot_barrier(data: Mapping[str, Any], file: Path) -> None:
    """Draw the loss along both lines, and the straight lines that barriers are measured from.

    Parameters
    ----------
    data : mapping
        What ``barrier`` writes as JSON.
    file : Path
        Ends in ``.png`` or ``.svg``.
    """
    reference, other = (_short(n, 32) for n in short_names([data["reference"], data["model"]]))
    removed = data["removed"]
    share = "no barrier" if removed is None else f"{removed:.0%} of the barrier removed"
    points = data["t"]
    size = 1.0 if len(points) <= _MANY else 0.6
    with _saved(file, 7, 4.2) as figure:
        title = f"From {reference} to {other}\n{share}"
        figure.suptitle(title, fontsize=10, ha="left", x=0.02)
        ax = figure.subplots()
        for name, style, marks in zip(
            ("plain", "aligned"), (BEFORE, AFTER), (7.0, 4.0), strict=True
        ):
            found = data[name]
            label = f"{name}, barrier {number(found['barrier'])}"
            (line,) = ax.plot(points, found["loss"], ms=size * marks, lw=1.2, label=label, **style)
            line.set_gid(name)
        ends = [data["plain"]["loss"][k] for k in (0, -1)]
        ax.plot([0, 1], ends, color=_GREY, lw=1, ls="--", label="without a barrier", zorder=1)
        ax.set_xlabel(f"t: 0 is {reference}, 1 is {other}")
        ax.set_ylabel(f"loss in nats per token, {data['tokens']} tokens")
        ax.set_xlim(0, 1)
        _calm(ax, "y")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)


# -- more models ----------------------------------------------------------------------------------


def _plot_matrix(data: Mapping[str, Any], file: Path) -> None:
    """Draw the kinship and the verdict of every pair, relatives beside one another.

    Models are ordered, and the tree is drawn, by average linkage of 1 - kinship. Distances are no
    guide to lineage: far forks are as far apart as strangers.
    """
    models: list[str] = data["models"]
    kinship, verdicts = _kinships(data)
    tree = linkage(squareform(1 - kinship, checks=False), "average", optimal_ordering=True)
    order: list[int] = leaves_list(tree).tolist()
    words = len(models) <= _WORDS
    side = _CELL[words] * len(models)
    names = [_short(name, 28) for name in short_names(models)]
    with _saved(file, side + 3.6, side + 2.9) as figure:
        figure.suptitle("Which models are related", fontsize=10, ha="left", x=0.02)
        top, ax = figure.subplots(2, 1, height_ratios=[1.0, side])
        _plot_tree(top, tree, len(models))
        shown = kinship[np.ix_(order, order)]
        image = ax.imshow(shown, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for i, row in enumerate(order):
            for j, column in enumerate(order):
                if row != column:
                    text = _cell(verdicts[row, column], kinship[row, column], words)
                    colour = "black" if shown[i, j] > 0.5 else "white"
                    ax.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
        ax.set_xticks(range(len(models)), [names[k] for k in order], rotation=45, ha="right")
        ax.set_yticks(range(len(models)), [names[k] for k in order])
        label = "kinship: cosine of heads and neurons, once aligned"
        figure.colorbar(image, ax=ax, label=label, shrink=min(1.0, 3.0 / side))
        if not words:
            key = ", ".join(f"{letter}: {verdict}" for verdict, letter in _LETTERS.items())
            ax.set_title(key, loc="left", fontsize=8)


def _kinships(data: Mapping[str, Any]) -> tuple[np.ndarray, dict[tuple[int, int], str]]:
    """Return the symmetric matrix of kinships, at least 0, and the verdict of every pair."""
    place = {model: k for k, model in enumerate(data["models"])}
    kinship, verdicts = np.eye(len(place)), {}
    for pair in data["pairs"]:
        i, j = place[pair["reference"]], place[pair["model"]]
        found = pair["evidence"]["kinship"] if pair["evidence"] is not None else 0.0
        kinship[i, j] = kinship[j, i] = min(max(found, 0.0), 1.0)
        verdicts[i, j] = verdicts[j, i] = pair["verdict"]
    return kinship, verdicts


def _cell(verdict: str, kinship: float, words: bool) -> str:
    return f"{verdict}\n{kinship:.2f}" if words else f"{_LETTERS[verdict]}\n{kinship:.2f}"


def _plot_tree(ax: Axes, tree: np.ndarray, count: int) -> None:
    """Draw the tree above the columns; scipy's leaves lie 10 apart."""
    drawn = dendrogram(tree, no_plot=True)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        ax.plot([(value - 5) / 10 for value in x], y, color=_GREY, lw=1, clip_on=False)
    ax.set_xlim(-0.5, count - 0.5)
    ax.set_ylim(0, 1.05)
    ax.set_yticks([0, 1])
    ax.set_ylabel("1 - kinship")
    ax.set_xticks([])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
