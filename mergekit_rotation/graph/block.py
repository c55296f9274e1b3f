"""One block of a layer (attention or neurons): what moves together, and how it is solved."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict

from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Element,
    ExpertLayout,
    Group,
    NeuronLayout,
    Pattern,
    Permute,
    Rotate,
    Sign,
    SymmetryError,
    Transformation,
    Trivial,
    act,
    moves,
    product_dtype,
    same_products,
    solve_attention,
    solve_experts,
    solve_neurons,
    solve_scaled_attention,
    solve_scaled_neurons,
    without_gauge,
    working_dtype,
)

Tensors = Mapping[str, torch.Tensor]


class BlockSpec(BaseModel):
    """The legs of a block by name, and the symmetries that may be used.

    Attributes
    ----------
    kind : str
        See `mergekit_rotation.architecture.Block`.
    patterns : tuple of (name, pattern)
    sizes : tuple of (axis, size)
    query_key, value_output : Group, optional
        What acts on the heads; None for neurons and experts.
    expert_groups : int
        Of experts, see `ExpertLayout`; 0 for what is not made of experts.
    shifted, folded : tuple of str
        See `ExpertLayout` and `AttentionLayout`.
    use_query_key, use_value_output, use_heads, use_neurons, use_experts : bool
    use_scale : bool
        Whether maps that are not orthogonal may be used, too.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    kind: str
    patterns: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]
    query_key: Group | None = None
    value_output: Group | None = None
    expert_groups: int = 0
    shifted: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    use_query_key: bool = True
    use_value_output: bool = True
    use_heads: bool = True
    use_neurons: bool = True
    use_experts: bool = True
    use_scale: bool = False

    def used(self) -> bool:
        """Tell whether any symmetry is switched on."""
        if self.expert_groups:
            return self.use_neurons or self.use_experts
        if self.query_key is None:
            return self.use_neurons
        return self.use_query_key or self.use_value_output or self.use_heads

    def orders(self) -> dict[str, tuple[int, int]]:
        """Return the axes that may be reordered: how often each stands there, and its size."""
        sizes = dict(self.sizes)
        if self.expert_groups:
            switches = {"x": self.use_experts, "f": self.use_neurons}
        elif self.query_key is None:
            switches = {"f": self.use_neurons}
        else:
            switches = {"kv": self.use_heads, "g": self.use_heads}
        times = {"g": sizes.get("kv", 1)} | ({"f": sizes["x"]} if self.expert_groups else {})
        axes = (axis for axis, on in switches.items() if on and sizes.get(axis, 1) > 1)
        return {axis: (times.get(axis, 1), sizes[axis]) for axis in axes}

    def pattern(self, name: str) -> Pattern:
        """Return the pattern of a leg."""
        return Pattern.parse(dict(self.patterns)[name])

    def layout(self) -> AttentionLayout | NeuronLayout | ExpertLayout:
        """Return where the legs are stored, and what acts on them whether it is used or not."""
        patterns = {name: Pattern.parse(text) for name, text in self.patterns}
        sizes = dict(self.sizes)
        if self.expert_groups:
            return ExpertLayout(patterns, sizes, self.expert_groups, frozenset(self.shifted))
        if self.query_key is None or self.value_output is None:
            return NeuronLayout(patterns, sizes)
        return AttentionLayout(
            patterns,
            sizes,
            self.query_key,
            self.value_output,
            frozenset(self.shifted),
            frozenset(self.folded),
        )

    def seen(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the function sees of a tensor: without what can change for nothing."""
        if self.query_key is None or name not in (*self.shifted, *self.folded):
            return tensor
        layout = self.layout()
        assert isinstance(layout, AttentionLayout)
        return without_gauge(tensor.to(working_dtype(tensor.dtype)), name, layout)

    def solve(
        self,
        reference: Tensors,
        other: Tensors,
        stored: torch.dtype,
        where: str,
        work: torch.dtype | None = None,
    ) -> Transformation | None:
        """Return what brings the other side closest to the reference.

        Parameters
        ----------
        reference, other : mapping of leg name to Tensor
        stored : torch.dtype
            Precision in which the moved tensors will be stored.
        where : str
            Model and layer, for errors.
        work : torch.dtype, optional
            `product_dtype` of all legs, where that is known.

        Returns
        -------
        Transformation or None
            None if a factorisation or an assignment that it takes cannot be computed.

        Raises
        ------
        RotationError
            If the weights cannot be compared.
        """
        if not self.used():
            return ()
        find: Callable[[Tensors, Tensors], Transformation]
        try:
            reference, other = _raised(self._legs(reference), self._legs(other), work=work)
            layout = self.layout()
            if isinstance(layout, AttentionLayout):
                layout = self._used_heads(layout)
                find = partial(solve_attention, layout=layout, heads=self.use_heads, stored=stored)
                if self.use_scale:
                    return solve_scaled_attention(reference, other, layout, find, stored)
                return find(reference, other)
            if isinstance(layout, ExpertLayout):
                find = partial(
                    solve_experts,
                    layout=layout,
                    experts=self.use_experts,
                    neurons=self.use_neurons,
                )
            else:
                find = partial(solve_neurons, layout=layout)
            if self.use_scale and self.use_neurons:
                return solve_scaled_neurons(reference, other, layout, find)
            return find(reference, other)
        except SymmetryError as problem:
            raise RotationError(f"{where}: {problem}; the model is damaged") from problem
        except torch.linalg.LinAlgError:
            return None

    def outline(self) -> Transformation:
        """Return a transformation of the kind that `solve` may find, with the identity's numbers.

        Every symmetry that is switched on has an element; maps that are not orthogonal count as
        rotations, which touch the same tensors.
        """
        sizes = dict(self.sizes)
        per = {"g": "kv"} | ({"f": "x"} if self.expert_groups else {})
        result: list[Element] = []
        for axis, (times, size) in self.orders().items():
            index = torch.arange(size)
            if axis in per:
                result.append(Permute(axis, index.expand(times, -1), per=per[axis]))
            else:
                result.append(Permute(axis, index))
        used = {"qk": self.use_query_key, "vo": self.use_value_output}
        for axis in (a for a, on in used.items() if self.query_key is not None and on):
            eye = torch.eye(sizes[axis]).expand(sizes["kv"], -1, -1)
            result.append(Rotate(axis, eye, per="kv"))
        return tuple(result)

    def _used_heads(self, layout: AttentionLayout) -> AttentionLayout:
        """Return a layout with only the groups that are switched on."""
        return replace(
            layout,
            query_key=layout.query_key if self.use_query_key else Trivial(layout.query_key.n),
            value_output=(
                layout.value_output if self.use_value_output else Trivial(layout.value_output.n)
            ),
        )

    def scaled_apart(self, reference: Tensors, other: Tensors, after: float, scale: float) -> bool:
        """Tell whether only ``align_scale`` would bring two sides together.

        That is so if they differ after alignment, by more than rounding a rotation of n
        dimensions explains, and the products of their factors agree.

        Parameters
        ----------
        reference, other : mapping of leg name to Tensor
        after, scale : float
            Squared distance after alignment, and square of the reference.
        """
        if self.use_scale or not (self.use_neurons and self.use_query_key):
            return False
        reference, other = self._legs(reference), self._legs(other)
        layout = self.layout()
        eps = max(torch.finfo(x.dtype).eps for x in (*reference.values(), *other.values()))
        n = max(layout.sizes.get("qk", 1), layout.sizes.get("vo", 1))
        if after <= (8 * eps) ** 2 * n * scale:
            return False
        try:
            return same_products(reference, other, layout)
        except torch.linalg.LinAlgError:
            return False

    def _legs(self, side: Tensors) -> dict[str, torch.Tensor]:
        """Return what is seen of the legs among some tensors; norms may be read with them."""
        return {name: self.seen(name, side[name]) for name, _ in self.patterns if name in side}

    def move_legs(
        self, transformation: Transformation, tensors: Tensors
    ) -> dict[str, torch.Tensor]:
        """Return tensors with the legs of the block among them moved."""
        legs = {name for name, _ in self.patterns}
        return {n: self.move(transformation, n, x) if n in legs else x for n, x in tensors.items()}

    def move(self, transformation: Transformation, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Apply a transformation to one leg, in the working dtype if numbers change."""
        pattern = self.pattern(name)
        rounding = tuple(e for e in transformation if not isinstance(e, Permute | Sign))
        # Permutations and signs are exact in any dtype; only the others need more.
        if moves(rounding, pattern):
            tensor = tensor.to(working_dtype(tensor.dtype))
        return act(transformation, tensor, pattern, dict(self.sizes))


def _raised(*sides: Tensors, work: torch.dtype | None) -> tuple[Tensors, ...]:
    """Return the legs as they are, or in float64 if products of their entries need it."""
    work = work or product_dtype(*(x for side in sides for x in side.values()))
    if work != torch.float64:
        return sides
    return tuple({name: x.double() for name, x in side.items()} for side in sides)
