"""Errors raised by the pure part of the package."""


class SymmetryError(ValueError):
    """Tensors or layouts that no element of the declared group can act on."""


class PatternError(SymmetryError):
    """An axis pattern that cannot be read, or a tensor that does not have its shape."""
