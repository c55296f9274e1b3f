"""Axis sizes read from a model configuration by small expressions.

An expression is a product or quotient of names and numbers, for example ``head_dim``,
``hidden_size / num_attention_heads`` or ``qk * rope_parameters.partial_rotary_factor``; ``a // b``
rounds the quotient down, and ``a ^ b`` rounds a up to a multiple of b. A name is
an axis that is known already or a dotted path into the configuration. The first expression of a
list whose names all exist and are not null gives the size.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TERM = re.compile(r"\s*(//|[*/^]?)\s*([A-Za-z_][A-Za-z0-9_.]*|\d+)\s*")


_OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "": operator.mul,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "^": lambda size, step: -(-size // step) * step,
}


class LayoutError(ValueError):
    """A configuration from which the layout of a layer cannot be read."""


def lookup(config: object, path: str, layer: int = 0) -> Any:
    """Follow a dotted path through attributes and mappings; None where it ends early.

    A path that ends in ``[layer]`` leads to a list with an entry per layer.
    """
    value: Any = config
    for part in path.removesuffix("[layer]").split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is None:
            return None
    if path.endswith("[layer]"):
        return value[layer] if isinstance(value, Sequence) and layer < len(value) else None
    return value


def evaluate(expression: str, config: object, known: Mapping[str, int]) -> int | None:
    """Evaluate one expression; None if a name in it is missing or null.

    Raises
    ------
    LayoutError
        If a division leaves a remainder, or a value or the result is not a positive number. With
        a fraction among the values the result is rounded down, as transformers does.
    """
    if "".join(m.group(0) for m in _TERM.finditer(expression)) != expression:
        raise LayoutError(f"cannot read size expression {expression!r}")
    result: float = 1
    for sign, name in _TERM.findall(expression):
        value = int(name) if name.isdigit() else known.get(name, lookup(config, name))
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < math.inf):
            raise LayoutError(f"{name} = {value!r} in the configuration is not a positive number")
        if sign == "/" and isinstance(result, int) and isinstance(value, int):
            if result % value:
                raise LayoutError(f"{expression}: {result} is not a multiple of {value}")
            result //= value
        else:
            result = _OPERATORS[sign](result, value)
    if not 1 <= result < math.inf:
        raise LayoutError(f"{expression} is {result} in the configuration, which is no size")
    return int(result)


def first(expressions: Sequence[str], config: object, known: Mapping[str, int], axis: str) -> int:
    """Evaluate the first expression whose names all exist.

    Raises
    ------
    LayoutError
        If there is none.
    """
    for expression in expressions:
        value = evaluate(expression, config, known)
        if value is not None:
            return value
    raise LayoutError(f"size of axis {axis!r}: the configuration has none of {list(expressions)}")
