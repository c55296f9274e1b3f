"""The table of supported families, for the README."""

import re
from collections.abc import Sequence

from mergekit_rotation.architecture.family import Family, HeadGroup, all_families

_GROUPS = {
    "orthogonal": "O(d) per KV head",
    "rotary": "a phase per frequency pair",
    "rotary_sign": "a sign per frequency pair",
    "sign": "a sign per dimension",
    "none": "-",
}
_CHECKED = {"run": "running its code", "read": "reading its code"}


def support_table() -> str:
    """Return the Markdown table of all families, one row per data file."""
    head = (
        "family",
        "model classes",
        "queries and keys",
        "values and output",
        "heads",
        "neurons",
        "experts",
        "residual stream",
        "checked by",
        "left alone",
    )
    rows = [_line(head), "|---" * len(head) + "|"]
    return "\n".join([*rows, *(_row(family) for family in all_families())])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(family: Family) -> str:
    classes = ", ".join(f"`{name}`" for names in family.models.values() for name in names)
    cells = [
        family.family,
        classes,
        *_attention(family),
        _neurons(family),
        _experts(family),
        _stream(family),
        _CHECKED[family.checked],
        family.notes or "-",
    ]
    return _line(cells)


def _attention(family: Family) -> tuple[str, str, str]:
    blocks = family.attention
    if not blocks:
        return "-", "-", "-"
    some = "KV groups, query heads inside" if "g" in family.sizes else "all heads"
    queries = [" or ".join(_group(group) for group in data.query_key) or "-" for data in blocks]
    values = [_group(data.value_output) for data in blocks]
    heads = [some if data.heads else "-" for data in blocks]
    return _named(family, queries), _named(family, values), _named(family, heads)


def _named(family: Family, cells: Sequence[str]) -> str:
    """Return what all blocks of heads have in common, or else what each has."""
    if len(set(cells)) == 1:
        return cells[0]
    return "; ".join(
        f"{data.name}: {cell}" for data, cell in zip(family.attention, cells, strict=True)
    )


def _neurons(family: Family) -> str:
    patterns = family.block_tensors().values()
    neurons = [text for text in patterns if re.search(r"\bx?f\b", text)]
    if not neurons:
        return "-"
    signed = any("~f" in text or "~xf" in text for text in neurons)
    return "permutation and signs" if signed else "permutation"


def _experts(family: Family) -> str:
    if family.experts is None:
        return "-"
    return "permutation within and of groups" if family.experts.groups else "permutation"


def _stream(family: Family) -> str:
    if not family.stream.maps:
        return "-"
    signs = "one sign" if family.stream.norm == "layer" else "signs"
    maps = [f"permutation with {signs}"]
    if "orthogonal" in family.stream.maps:
        maps.append("O(D) that fixes the mean" if family.stream.norm == "layer" else "O(D)")
    return "; ".join(maps)


def _group(group: HeadGroup) -> str:
    text = _GROUPS[group.group]
    if group.group.startswith("rotary") and group.rotary_dims != ("qk",):
        text += ", O on the rest" if group.group == "rotary" else ", a sign per dimension besides"
    return text
