"""The table of supported families, for the README."""

from collections.abc import Sequence

from mergekit_rotation.architecture.family import Family, HeadGroup, all_families

_GROUPS = {
    "orthogonal": "O(d) per KV head",
    "rotary": "a phase per frequency pair",
    "rotary_sign": "a sign per frequency pair",
}


def support_table() -> str:
    """Return the Markdown table of all families, one row per data file."""
    head = (
        "family",
        "model classes",
        "queries and keys",
        "values and output",
        "heads",
        "neurons",
        "residual stream",
        "left alone",
    )
    rows = [_line(head), "|---" * len(head) + "|"]
    return "\n".join([*rows, *(_row(family) for family in all_families())])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(family: Family) -> str:
    classes = ", ".join(f"`{name}`" for names in family.models.values() for name in names)
    grouped = "KV groups, query heads inside" if "g" in family.sizes else "all heads"
    signed = any("~f" in pattern for pattern in family.neurons.tensors.values())
    neurons = "permutation and signs" if signed else "permutation"
    cells = [
        family.family,
        classes,
        _group(family.attention.query_key),
        _group(family.attention.value_output),
        grouped,
        neurons,
        _stream(family),
        family.notes or "-",
    ]
    return _line(cells)


def _stream(family: Family) -> str:
    signs = "one sign" if family.stream.norm == "layer" else "signs"
    maps = [f"permutation with {signs}"]
    if "orthogonal" in family.stream.maps:
        maps.append("O(D) that fixes the mean" if family.stream.norm == "layer" else "O(D)")
    return "; ".join(maps)


def _group(group: HeadGroup) -> str:
    text = _GROUPS[group.group]
    if group.group == "rotary" and len(group.rotary_dims) > 1:
        text += ", O on the rest"
    return text
