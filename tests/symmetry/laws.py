"""Vocabulary of the symmetry tests: tolerances, matrix classes, groups, layouts, distances."""

import math
from collections.abc import Mapping

import torch
from hypothesis import settings
from hypothesis import strategies as st

from mergekit_rotation.symmetry import (
    AttentionLayout,
    DirectSum,
    Group,
    Orthogonal,
    Pattern,
    Permute,
    PlaneRotations,
    PlaneSigns,
    Rotate,
    Signs,
    Transformation,
    Trivial,
    act,
    rotary_pairs,
)

Tensors = dict[str, torch.Tensor]

LAW = settings(deadline=None, derandomize=True, max_examples=12)
SEEDS = st.integers(0, 2**32 - 1)
DOUBLE = torch.float64
PAIRINGS = ("half", "interleaved")


def tolerance(n: int, dtype: torch.dtype = DOUBLE, c: float = 16) -> float:
    """Bound of the rounding error of ``n`` operations on numbers of size one."""
    return c * n * torch.finfo(dtype).eps


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=generator)


# -- matrix classes -------------------------------------------------------------------------


def _low_rank(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1] @ x[..., :1, :]


def _repeated(x: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def _permutation(x: torch.Tensor) -> torch.Tensor:
    """Rows of the identity in the order of the first column; zeros where there are too many."""
    eye = torch.eye(x.shape[-2], x.shape[-1], dtype=x.dtype)
    return eye[x[..., 0].argsort(-1)]


def _ill_conditioned(x: torch.Tensor) -> torch.Tensor:
    """Singular values that fall evenly to 1e-12 of the largest."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * torch.logspace(0, -12, s.shape[-1], dtype=x.dtype)) @ vh


#: what becomes of a generic matrix or batch of matrices
KINDS = {
    "generic": lambda x: x,
    "low rank": _low_rank,
    "zero": torch.zeros_like,
    "repeated singular values": _repeated,
    "permutation": _permutation,
    "ill-conditioned": _ill_conditioned,
    "signs": torch.sign,
    "huge": lambda x: 1e30 * x,
    "small": lambda x: 1e-30 * x,
}
ANY_KIND = st.sampled_from(sorted(KINDS))
#: with a dtype in which the squares of the numbers neither overflow nor vanish
ANY_KIND_AND_DTYPE = st.sampled_from(
    [(kind, DOUBLE) for kind in sorted(KINDS)]
    + [
        (kind, dtype)
        for kind in sorted(KINDS.keys() - {"huge", "small"})
        for dtype in (torch.bfloat16, torch.float32)
    ]
)


def matrices(kind: str, seed: int, *shape: int) -> torch.Tensor:
    return KINDS[kind](normal(rng(seed), *shape))


def norm(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm over the last two dimensions."""
    return torch.linalg.matrix_norm(x)


def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...xy,...xy->...", a, b)


# -- groups ---------------------------------------------------------------------------------


def _planes(kind: type, pairing: str):
    return lambda s: kind(2 * s, rotary_pairs(2 * s, pairing))


#: every kind of group, by a size of at least 1
GROUPS = {
    "trivial": Trivial,
    "orthogonal": Orthogonal,
    "rotations, half": _planes(PlaneRotations, "half"),
    "rotations, interleaved": _planes(PlaneRotations, "interleaved"),
    "signs, half": _planes(PlaneSigns, "half"),
    "signs, interleaved": _planes(PlaneSigns, "interleaved"),
    "partial rotations": lambda s: DirectSum((_planes(PlaneRotations, "half")(s), Orthogonal(s))),
    "partial signs": lambda s: DirectSum((_planes(PlaneSigns, "half")(s), Signs(s))),
    "signs": Signs,
}
SIZES = st.integers(1, 4)
ANY_GROUP = st.builds(lambda name, s: GROUPS[name](s), st.sampled_from(sorted(GROUPS)), SIZES)


# -- layouts of attention -------------------------------------------------------------------

FORMS = {
    "separate": {
        "q": "(kv g qk) e",
        "q.bias": "(kv g qk)",
        "k": "(kv qk) e",
        "k.bias": "(kv qk)",
        "v": "(kv vo) e",
        "v.bias": "(kv vo)",
        "o": "e (kv g vo)",
    },
    "blocks": {
        "qkv": "[(kv g qk) | (kv qk) | (kv vo)] e",
        "qkv.bias": "[(kv g qk) | (kv qk) | (kv vo)]",
        "o": "e (kv g vo)",
    },
    "interleaved": {
        "qkv": "(kv [qk | qk | vo]) e",
        "qkv.bias": "(kv [qk | qk | vo])",
        "o": "e (kv vo)",
    },
    "transposed": {
        "qkv": "e [(kv qk) | (kv qk) | (kv vo)]",
        "qkv.bias": "[(kv qk) | (kv qk) | (kv vo)]",
        "o": "(kv vo) e",
    },
}


def attention(
    query_key: Group,
    value_output: Group,
    *,
    form: str = "separate",
    kv: int = 2,
    g: int = 1,
    e: int = 8,
    biases: bool = True,
) -> AttentionLayout:
    texts = {n: t for n, t in FORMS[form].items() if biases or not n.endswith(".bias")}
    sizes = {"kv": kv, "qk": query_key.n, "vo": value_output.n, "e": e}
    if any("g" in Pattern.parse(text).axes for text in texts.values()):
        sizes["g"] = g
    patterns = {name: Pattern.parse(text) for name, text in texts.items()}
    return AttentionLayout(patterns, sizes, query_key, value_output)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionLayout:
    """Draw a layout whose stream is wide enough that generic heads have full rank."""
    query_key, value_output = draw(ANY_GROUP), draw(ANY_GROUP)
    return attention(
        query_key,
        value_output,
        form=draw(st.sampled_from(sorted(FORMS))),
        kv=draw(st.integers(1, 4)),
        g=draw(st.integers(1, 3)),
        e=draw(st.integers(2, 4)) * max(query_key.n, value_output.n),
        biases=draw(st.booleans()),
    )


def draw_tensors(
    patterns: Mapping[str, Pattern], sizes: Mapping[str, int], seed: int, kind: str = "generic"
) -> Tensors:
    generator = rng(seed)
    tensors = {}
    for name, pattern in patterns.items():
        shape = pattern.shape(sizes)
        flat = normal(generator, shape[0], math.prod(shape[1:]))
        tensors[name] = KINDS[kind](flat).reshape(shape)
    return tensors


def draw_motion(layout: AttentionLayout, seed: int) -> Transformation:
    """Draw a transformation with every freedom of the layout."""
    generator = rng(seed)
    kv, m = layout.sizes["kv"], layout.sizes.get("g", 1)
    orders = [torch.randperm(m, generator=generator) for _ in range(kv)]
    return (
        Permute("kv", torch.randperm(kv, generator=generator)),
        Permute("g", torch.stack(orders), per="kv"),
        Rotate("qk", layout.query_key.sample(kv, generator), per="kv"),
        Rotate("vo", layout.value_output.sample(kv, generator), per="kv"),
    )


def move(
    transformation: Transformation,
    tensors: Tensors,
    patterns: Mapping[str, Pattern],
    sizes: Mapping[str, int],
) -> Tensors:
    return {n: act(transformation, t, patterns[n], sizes) for n, t in tensors.items()}


def length(tensors: Tensors) -> float:
    """Euclidean norm of all numbers together."""
    return math.hypot(*(float(torch.linalg.vector_norm(t.double())) for t in tensors.values()))


def distance(a: Tensors, b: Tensors) -> float:
    return length({name: a[name].double() - b[name].double() for name in a})


def count(tensors: Tensors) -> int:
    """How many numbers there are: the ``n`` of tolerances on lengths and distances."""
    return sum(t.numel() for t in tensors.values())
