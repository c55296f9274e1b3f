"""Whether what a data file declares is so: random elements of the symmetries act on a random model.

In exact arithmetic they leave its outputs unchanged, and every tensor that is left out has to
show. The tests prove our own data files with it, ``mergekit-rotation check-architecture`` those of
a user. This package imports torch and transformers, never mergekit.
"""

from mergekit_rotation.proof.check import Report, Row, check_family
from mergekit_rotation.proof.elements import PARTS, element
from mergekit_rotation.proof.errors import ProofError
from mergekit_rotation.proof.exact import exact_outputs, float64_exact, outputs, randomise
from mergekit_rotation.proof.subject import Subject, scrambled, tolerance

__all__ = [
    "PARTS",
    "ProofError",
    "Report",
    "Row",
    "Subject",
    "check_family",
    "element",
    "exact_outputs",
    "float64_exact",
    "outputs",
    "randomise",
    "scrambled",
    "tolerance",
]
