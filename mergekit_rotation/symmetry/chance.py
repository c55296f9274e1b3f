"""How much of a difference without any structure a group can explain by chance."""

import math


def chance_share(freedom: int, entries: int) -> float:
    """Share of unstructured differences that fitting a group's p numbers explains at most.

    The energy that p of N numbers explain is chi-squared with p degrees of freedom: above
    p + 2 sqrt(p t) + 2 t with probability exp(-t) at most (Laurent and Massart, Annals of
    Statistics 28, 2000, doi:10.1214/aos/1015957395, lemma 1). Here t = 20, at least twice the
    mean is asked for, and never more than half of the distance.

    Parameters
    ----------
    freedom : int
        p, the dimension of the group as a manifold.
    entries : int
        N, the number of weights that it moves.
    """
    p, t = float(freedom), 20.0
    if p == 0 or entries == 0:
        return 0.0
    explained = max(2 * p, p + 2 * math.sqrt(p * t) + 2 * t)
    return min(explained / entries, 0.5)
