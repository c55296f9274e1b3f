"""The error of a check that cannot be carried out."""


class ProofError(ValueError):
    """A model on which a declaration cannot be checked; the message says why."""
