"""Groups of orthogonal matrices that act on the dimensions of one attention head.

Every group projects a cross-Gram matrix M onto the element that maximises <g, M> = tr(g^T M), and
knows the value of that maximum (its support function), which scores a match of two heads without
regard to how they are rotated. Everything is batched over leading dimensions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.factorisation import eigh, singular_values, svd
from mergekit_rotation.symmetry.precision import single_thread

Pairing = Literal["half", "interleaved"]


def rotary_pairs(dims: int, pairing: Pairing) -> tuple[tuple[int, int], ...]:
    """Return the dimensions that rotary embedding turns together.

    Parameters
    ----------
    dims : int
        Number of rotary dimensions, even.
    pairing : {"half", "interleaved"}
        ``half`` pairs (i, i + dims/2), ``interleaved`` pairs (2i, 2i + 1).

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """
    half = dims // 2
    if pairing == "half":
        return tuple((i, i + half) for i in range(half))
    return tuple((2 * i, 2 * i + 1) for i in range(half))


#: Largest condition number of a map that is not orthogonal, and of what it balances: float32
#: numbers (2^-24) that pass through it keep half of their digits.
MAX_CONDITION = 2.0**12


class Group(ABC):
    """A compact group of orthogonal matrices on R^n, and the larger one of invertible matrices.

    Where a leg and its dual may be multiplied by A and A^-T, A may be any invertible matrix with
    the same commutation properties: for O(n) all of GL(n), for phases complex numbers, for signs
    (which norms of queries and keys leave) nothing more.
    """

    n: int
    #: dimensions that a common positive factor may multiply, for each factor
    cells: tuple[tuple[int, ...], ...] = ()
    #: by how many dimensions the group of invertible matrices is larger
    stretches: int = 0
    #: whether its elements move numbers without rounding them (signs)
    exact: bool = False

    @property
    @abstractmethod
    def freedom(self) -> int:
        """Dimension of the group as a manifold: how many numbers a projection fits."""

    @abstractmethod
    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the element g that maximises <g, M>.

        Parameters
        ----------
        gram : Tensor, shape (..., n, n)
            M = sum over legs of reference times other transposed.
        noise : Tensor, shape (...), optional
            Size of the rounding errors of M. Directions in which M is not larger are undetermined
            and resolve to what is nearest to the identity.

        Returns
        -------
        Tensor, shape (..., n, n)
            Orthogonal, in the dtype of ``gram``.
        """

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        """Return max over g of <g, M>, shape (...)."""
        return inner(self.project(gram), gram)

    def bound(self, gram: torch.Tensor) -> torch.Tensor:
        """Return a subadditive upper bound of `value` that is cheap to compute."""
        return self.value(gram)

    def most_gain(self, gram: torch.Tensor) -> torch.Tensor:
        """Return a cheap upper bound of 2 (value - tr M), shape (...); infinity if there is none.

        That is by how much moving can lower a squared distance.
        """
        return torch.full_like(gram[..., 0, 0], torch.inf)

    def factors(self) -> list[tuple[torch.Tensor, "Group"]]:
        """Return what the group is a product of: equal groups on cells of dimensions.

        Returns
        -------
        list of (index, group)
            The group acts on each of c cells of k dimensions by itself; index has the shape
            (c, k). Of a cross-Gram matrix only the blocks on these cells matter.
        """
        return [(torch.arange(self.n)[None], self)]

    def balance(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return the map that makes two factors equally large.

        Parameters
        ----------
        s, t : Tensor, shape (..., n, n)
            Gram matrices of the legs that A multiplies, and of those that A^-T multiplies.

        Returns
        -------
        Tensor, shape (..., n, n)
            The positive A with A S A^T = A^-T T A^-1 (of its traces, where A is a scale); the
            identity where the group allows for none, and where S, T or A is so ill-conditioned
            that A is not determined (`MAX_CONDITION`).
        """
        eye = torch.eye(self.n, dtype=s.dtype, device=s.device)
        return eye.expand(s.shape)

    def invariants(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return what no map (A, A^-T) changes of factors with Gram matrices S and T, (..., k).

        These are sizes of the product: its singular values where A may be any matrix.
        """
        return s.new_zeros(*s.shape[:-2], 0)

    @abstractmethod
    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Draw random elements, shape (batch, n, n), float64."""

    @abstractmethod
    def contains(self, g: torch.Tensor, atol: float) -> bool:
        """Tell whether all matrices g of shape (..., n, n) belong to the group."""


def _conditioned(values: torch.Tensor) -> torch.Tensor:
    """Tell whether positive matrices with these eigenvalues have well-conditioned square roots."""
    result: torch.Tensor = values[..., 0] * MAX_CONDITION**2 >= values[..., -1]
    return result & (values[..., -1] > 0)


def _power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """Power of symmetric positive definite matrices."""
    values, vectors = eigh(x)
    result: torch.Tensor = (vectors * values[..., None, :] ** exponent) @ vectors.mT
    return result


def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Frobenius inner product over the last two dimensions."""
    result: torch.Tensor = (a * b).sum(dim=(-2, -1))
    return result


@dataclass(frozen=True)
class Trivial(Group):
    """The identity alone: a symmetry that is switched off or not there."""

    n: int
    exact = True
    freedom = 0

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        eye = torch.eye(self.n, dtype=gram.dtype, device=gram.device)
        return eye.expand(gram.shape)

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        return gram.diagonal(dim1=-2, dim2=-1).sum(-1)

    def most_gain(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gram[..., 0, 0])

    def factors(self) -> list[tuple[torch.Tensor, Group]]:
        return [(torch.arange(self.n)[:, None], Trivial(1))]

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        return torch.eye(self.n, dtype=torch.float64).repeat(batch, 1, 1)

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        return bool(((g - self.project(g)).abs() <= atol).all())


@dataclass(frozen=True)
class Orthogonal(Group):
    """O(n): all rotations and reflections.

    The projection is the orthogonal polar factor U V^T of M = U S V^T (orthogonal Procrustes),
    with value sum(S), the nuclear norm. It is unique iff M is nonsingular. Reflections are
    included: attention is invariant under all of O(n), and forcing det = 1 only worsens the match.

    References
    ----------
    Schoenemann, "A generalized solution of the orthogonal Procrustes problem", Psychometrika 31,
    1966, doi:10.1007/BF02289451. "Beyond the Permutation Symmetry of Transformers", arXiv
    2502.00264.
    """

    n: int

    @property
    def freedom(self) -> int:
        return self.n * (self.n - 1) // 2

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return (tuple(range(self.n)),)

    @property
    def stretches(self) -> int:  # type: ignore[override]
        return self.n * (self.n + 1) // 2

    def invariants(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with single_thread(s.device, if_size=self.n):
            values, vectors = eigh(s)
            root = vectors * values.clamp(min=0)[..., None, :] ** 0.5
            values = eigh(root.mT @ t @ root)[0]
        result: torch.Tensor = values.clamp(min=0).sqrt()
        return result

    def balance(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return A = M^(1/2), M = S^-1 # T = S^(-1/2) (S^(1/2) T S^(1/2))^(1/2) S^(-1/2).

        References
        ----------
        Bhatia, "Positive Definite Matrices", 2007, chapter 4 (the geometric mean solves
        M S M = T).
        """
        eye = torch.eye(self.n, dtype=s.dtype, device=s.device).expand(s.shape)
        with single_thread(s.device, if_size=self.n):
            sound = _conditioned(eigh(s)[0]) & _conditioned(eigh(t)[0])
            s, t = (torch.where(sound[..., None, None], x, eye) for x in (s, t))
            root, inverse = _power(s, 0.5), _power(s, -0.5)
            mean = inverse @ _power(root @ t @ root, 0.5) @ inverse
            mean = (mean + mean.mT) / 2
            sound = sound & _conditioned(eigh(mean)[0])
            mean = torch.where(sound[..., None, None], mean, eye)
            return _power(mean, 0.5)

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        with single_thread(gram.device, if_size=self.n):
            u, s, vh = svd(gram)
            if noise is not None and bool((s <= noise[..., None]).any()):
                # Complete the determined part U1 V1^T on the null spaces by the part of the
                # identity that maps one to the other; polar factors act block by block.
                null = (s <= noise[..., None]).to(s.dtype)
                left = (u * null[..., None, :]) @ u.mT
                right = (vh.mT * null[..., None, :]) @ vh
                u, _, vh = svd((u * (1 - null[..., None, :])) @ vh + left @ right)
            result: torch.Tensor = u @ vh
        return result

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        with single_thread(gram.device, if_size=self.n):
            return singular_values(gram).sum(-1)

    def most_gain(self, gram: torch.Tensor) -> torch.Tensor:
        """Return |L^-1 A|_F^2 for M = S + A, S = L L^T symmetric, A antisymmetric.

        For every positive P, 2 |M|_* <= tr P + tr M^T P^-1 M (arithmetic and geometric mean). With
        P = S this is 2 tr S + tr A^T S^-1 A. There is no bound where S is not positive definite.
        """
        with single_thread(gram.device, if_size=self.n):
            lower, info = torch.linalg.cholesky_ex((gram + gram.mT) / 2)
            half = torch.linalg.solve_triangular(lower, (gram - gram.mT) / 2, upper=False)
        gain = half.square().sum((-2, -1))
        return torch.where((info == 0) & gain.isfinite(), gain, torch.inf)

    def bound(self, gram: torch.Tensor) -> torch.Tensor:
        # The nuclear norm is a norm, and that of one row is its length.
        bound: torch.Tensor = gram.square().sum(-1).sqrt().sum(-1)
        return bound

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        normal = torch.randn(batch, self.n, self.n, dtype=torch.float64, generator=generator)
        return self.project(normal)

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        eye = torch.eye(self.n, dtype=g.dtype, device=g.device)
        return bool(((g @ g.mT - eye).abs() <= atol).all())


@dataclass(frozen=True)
class OrthogonalFixingOnes(Group):
    """All rotations and reflections of R^n that fix the vector of ones.

    They commute with LayerNorm, which removes the mean. The vector of ones itself is invisible to
    it, so the projection is the polar factor of M on the complement, with M centred on both sides.
    """

    n: int

    @property
    def freedom(self) -> int:
        return (self.n - 1) * (self.n - 2) // 2

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        gram = gram - gram.mean(-1, keepdim=True)
        gram = gram - gram.mean(-2, keepdim=True)
        # The ones are made the strongest direction, which the polar factor then maps to itself.
        ones = torch.full_like(gram, 1 / self.n)
        strength = torch.linalg.matrix_norm(gram)
        strength = torch.where(strength > 0, strength, torch.ones_like(strength))
        if noise is not None:
            noise = torch.maximum(noise, self.n * torch.finfo(gram.dtype).eps * strength)
        g = Orthogonal(self.n).project(gram + strength[..., None, None] * ones, noise)
        g = g - g.mean(-1, keepdim=True)
        return g - g.mean(-2, keepdim=True) + ones

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        normal = torch.randn(batch, self.n, self.n, dtype=torch.float64, generator=generator)
        return self.project(normal)

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        ones = torch.ones(self.n, dtype=g.dtype, device=g.device)
        fixed = bool(((g @ ones - ones).abs() <= atol * self.n).all())
        return fixed and Orthogonal(self.n).contains(g, atol)


@dataclass(frozen=True)
class _Planes(Group):
    """Base of the groups that act on each frequency pair (i, j) of a rotary head separately."""

    n: int
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if sorted(dim for pair in self.pairs for dim in pair) != list(range(self.n)):
            raise SymmetryError(f"pairs {self.pairs} do not cover {self.n} dimensions once each")

    def _index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.tensor(self.pairs, dtype=torch.long, device=device).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def factors(self) -> list[tuple[torch.Tensor, Group]]:
        index = torch.stack(self._index(torch.device("cpu")), 1)
        return [(index, type(self)(2, ((0, 1),)))]

    def _overlap(self, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Real and imaginary part of sum Z_ref conj(Z_other), Z = row i + 1j row j."""
        i, j = self._index(gram.device)
        return gram[..., i, i] + gram[..., j, j], gram[..., j, i] - gram[..., i, j]

    def _matrix(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        i, j = self._index(cos.device)
        g = torch.eye(self.n, dtype=cos.dtype, device=cos.device)
        g = g.repeat(*cos.shape[:-1], 1, 1)
        g[..., i, i] = cos
        g[..., j, j] = cos
        g[..., i, j] = -sin
        g[..., j, i] = sin
        return g

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        return bool(((g - self.project(g)).abs() <= atol).all())


@dataclass(frozen=True)
class PlaneRotations(_Planes):
    """One phase per frequency pair: what commutes with rotary embedding.

    The best phase is the argument of the complex number sum Z_ref conj(Z_other); the value is the
    sum of the moduli. A zero overlap gives the phase 0.
    """

    @property
    def freedom(self) -> int:
        return len(self.pairs)

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return self.pairs

    @property
    def stretches(self) -> int:  # type: ignore[override]
        return len(self.pairs)

    def invariants(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (self._overlap(s)[0] * self._overlap(t)[0]).sqrt()

    def balance(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        size, dual = self._overlap(s)[0], self._overlap(t)[0]
        sound = (size > 0) & (dual > 0)
        one = torch.ones_like(size)
        scale = (torch.where(sound, dual, one) / torch.where(sound, size, one)) ** 0.25
        sound = scale.amax(-1, keepdim=True) <= MAX_CONDITION * scale.amin(-1, keepdim=True)
        return self._matrix(torch.where(sound, scale, one), torch.zeros_like(scale))

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        real, imag = self._overlap(gram)
        modulus = torch.hypot(real, imag)
        least = 0.0 if noise is None else noise[..., None]
        determined = modulus > least
        safe = torch.where(determined, modulus, torch.ones_like(modulus))
        cos = torch.where(determined, real / safe, torch.ones_like(real))
        return self._matrix(cos, torch.where(determined, imag / safe, torch.zeros_like(imag)))

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.hypot(*self._overlap(gram)).sum(-1)

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        phase = torch.rand(batch, len(self.pairs), dtype=torch.float64, generator=generator)
        angle = 2 * torch.pi * phase
        return self._matrix(angle.cos(), angle.sin())


@dataclass(frozen=True)
class PlaneSigns(_Planes):
    """One sign per frequency pair: what commutes with rotary embedding *and* with a shared
    RMS norm of queries and keys whose weights differ inside the pairs (QK-norm).
    """

    exact = True
    freedom = 0

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        real, _ = self._overlap(gram)
        least = 0.0 if noise is None else noise[..., None]
        sign = torch.where(real < -least, -torch.ones_like(real), torch.ones_like(real))
        return self._matrix(sign, torch.zeros_like(sign))

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        return self._overlap(gram)[0].abs().sum(-1)

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        bits = torch.randint(2, (batch, len(self.pairs)), generator=generator)
        sign = 2.0 * bits.to(torch.float64) - 1.0
        return self._matrix(sign, torch.zeros_like(sign))


@dataclass(frozen=True)
class Signs(Group):
    """One sign per dimension: what commutes with a shared RMS norm where nothing is rotary."""

    n: int
    exact = True
    freedom = 0

    def factors(self) -> list[tuple[torch.Tensor, Group]]:
        return [(torch.arange(self.n)[:, None], Signs(1))]

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        overlap = gram.diagonal(dim1=-2, dim2=-1)
        least = 0.0 if noise is None else noise[..., None]
        sign = torch.where(overlap < -least, -torch.ones_like(overlap), torch.ones_like(overlap))
        return torch.diag_embed(sign)

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        return gram.diagonal(dim1=-2, dim2=-1).abs().sum(-1)

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        bits = torch.randint(2, (batch, self.n), generator=generator)
        return torch.diag_embed(2.0 * bits.to(torch.float64) - 1.0)

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        return bool(((g - self.project(g)).abs() <= atol).all())


@dataclass(frozen=True)
class DirectSum(Group):
    """Groups that act on consecutive ranges of dimensions (partial rotary embedding)."""

    blocks: tuple[Group, ...]

    @property
    def n(self) -> int:  # type: ignore[override]  # derived from the blocks
        return sum(block.n for block in self.blocks)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return all(block.exact for block in self.blocks)

    @property
    def freedom(self) -> int:
        return sum(block.freedom for block in self.blocks)

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return tuple(
            tuple(start + k for k in cell)
            for start, block in self._placed()
            for cell in block.cells
        )

    @property
    def stretches(self) -> int:  # type: ignore[override]
        return sum(block.stretches for block in self.blocks)

    def factors(self) -> list[tuple[torch.Tensor, Group]]:
        return [
            (start + index, part)
            for start, block in self._placed()
            for index, part in block.factors()
        ]

    def most_gain(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.stack([block.most_gain(x) for block, x in self._ranges(gram)]).sum(0)

    def invariants(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        pairs = zip(self._ranges(s), self._ranges(t), strict=True)
        return torch.cat([block.invariants(a, b) for (block, a), (_, b) in pairs], dim=-1)

    def balance(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        pairs = zip(self._ranges(s), self._ranges(t), strict=True)
        return self._assemble([block.balance(a, b) for (block, a), (_, b) in pairs])

    def _placed(self) -> list[tuple[int, Group]]:
        """Return the blocks, each with the first of its dimensions."""
        starts = accumulate((block.n for block in self.blocks), initial=0)
        return list(zip(starts, self.blocks, strict=False))

    def _ranges(self, gram: torch.Tensor) -> list[tuple[Group, torch.Tensor]]:
        return [
            (block, gram[..., start : start + block.n, start : start + block.n])
            for start, block in self._placed()
        ]

    def _assemble(self, parts: list[torch.Tensor]) -> torch.Tensor:
        first = parts[0]
        g = first.new_zeros(*first.shape[:-2], self.n, self.n)
        for (_, place), part in zip(self._ranges(g), parts, strict=True):
            place[...] = part
        return g

    def project(self, gram: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        return self._assemble([block.project(part, noise) for block, part in self._ranges(gram)])

    def value(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.stack([block.value(part) for block, part in self._ranges(gram)]).sum(0)

    def bound(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.stack([block.bound(part) for block, part in self._ranges(gram)]).sum(0)

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        return self._assemble([block.sample(batch, generator) for block in self.blocks])

    def contains(self, g: torch.Tensor, atol: float) -> bool:
        parts = self._ranges(g)
        rest = (g - self._assemble([part for _, part in parts])).abs()
        return bool((rest <= atol).all()) and all(b.contains(part, atol) for b, part in parts)
