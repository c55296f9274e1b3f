"""How two models are related, judged by what their alignment found.

Distances are a poor sign: two far forks of one model are as far apart as strangers. Whether the
neurons of the two stand in the same places is a good one, and so is how similar heads and neurons
are once they have been matched. The thresholds lie half-way between the kinds of pairs of
``python benchmarks/verdict``, which prints how often they err, and how often those err that are
derived without an architecture on the pairs of this architecture.
"""

from dataclasses import asdict, dataclass
from typing import Any

VERDICTS = ("same-coordinates", "same-function", "related", "unrelated")


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on.

    Attributes
    ----------
    in_place : float, optional
        Share of neurons (and experts) that alignment leaves where they are; None if a model has
        nothing that can be reordered.
    gain : float
        Share of the squared distance that alignment takes away, in the kind of block (heads,
        neurons) that gains most.
    kinship : float
        Cosine between heads and neurons of the two models, once they are aligned.
    stream_moved : bool
        Whether a map of the residual stream was applied, other than a permutation that leaves most
        of it in place.
    """

    in_place: float | None
    gain: float
    kinship: float
    stream_moved: bool

    def data(self) -> dict[str, Any]:
        """Return the numbers with the thresholds that they are held against."""
        return {**asdict(self), "thresholds": asdict(THRESHOLDS)}


@dataclass(frozen=True)
class Thresholds:
    """Where one verdict ends and the next begins.

    Attributes
    ----------
    in_place : float
        From here on the neurons stand in the same places.
    gain : float
        Up to here alignment changes nothing that matters.
    same, related : float
        From here on models are (nearly) the same function; share parts or an ancestor.
    """

    in_place: float
    gain: float
    same: float
    related: float


THRESHOLDS = Thresholds(in_place=0.48, gain=0.5, same=0.86, related=0.47)


def judge(evidence: Evidence, thresholds: Thresholds = THRESHOLDS) -> str:
    """Return one of `VERDICTS`.

    ``same-coordinates``: plain merging is fine, as for fine-tunes. ``same-function``: the same or
    nearly the same function in other coordinates; align, then merge. ``related``: parts are
    shared, or an ancestor far back. ``unrelated``: only a map of the whole stream has a chance.
    """
    stays = evidence.in_place is None or evidence.in_place >= thresholds.in_place
    if stays and not evidence.stream_moved and evidence.gain <= thresholds.gain:
        if evidence.in_place is not None or evidence.kinship >= thresholds.related:
            return "same-coordinates"
    if evidence.kinship >= thresholds.same:
        return "same-function"
    return "related" if evidence.kinship >= thresholds.related else "unrelated"
