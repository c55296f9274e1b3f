"""Symmetries of transformer layers as pure tensor functions.

This package imports torch and scipy only. It knows axes, groups and how to solve for the group
element that brings one set of tensors closest to another; it knows no model, no file and no
mergekit.

The one lemma: for an isometric group G acting on the legs (tensor, axis) of two models,

    argmin_g sum_legs || reference - g . other ||_F^2  =  argmax_g <g, M>,
    M = sum_legs mat(reference) mat(other)^T,

so aligning means: accumulate the cross-Gram matrix M and project it onto G.
"""

from mergekit_rotation.symmetry.action import (
    Element,
    Linear,
    Permute,
    Rotate,
    Scale,
    Sign,
    Transformation,
    act,
    inverse,
    moves,
)
from mergekit_rotation.symmetry.assignment import lazy_assignment, linear_assignment
from mergekit_rotation.symmetry.attention import AttentionLayout, solve_attention
from mergekit_rotation.symmetry.axes import Pattern, Piece, base_axis
from mergekit_rotation.symmetry.chance import chance_share
from mergekit_rotation.symmetry.distance import Squares, squares
from mergekit_rotation.symmetry.errors import PatternError, SymmetryError
from mergekit_rotation.symmetry.experts import ExpertLayout, solve_experts
from mergekit_rotation.symmetry.factorisation import eigh, svd
from mergekit_rotation.symmetry.gauges import free_parts, without_gauge
from mergekit_rotation.symmetry.groups import (
    DirectSum,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    PlaneRotations,
    PlaneSigns,
    Signs,
    Trivial,
    rotary_pairs,
)
from mergekit_rotation.symmetry.neurons import NeuronLayout, solve_neurons
from mergekit_rotation.symmetry.norms import Norm, target_norm
from mergekit_rotation.symmetry.precision import (
    all_finite,
    full_precision,
    product_dtype,
    working_dtype,
)
from mergekit_rotation.symmetry.scaling import (
    best_scale,
    same_products,
    solve_scaled_attention,
    solve_scaled_neurons,
)
from mergekit_rotation.symmetry.stream import (
    STREAM_AXES,
    OrthogonalMap,
    SignedPermutation,
    StreamMap,
    act_stream,
    composed,
    cross_gram,
    solve_permutation,
    solve_rotation,
)
from mergekit_rotation.symmetry.transformation import (
    ModelTransformation,
    StreamLayout,
    averaged_apart,
    bias_of,
    into_stream,
    out_of_stream,
)

__all__ = [
    "STREAM_AXES",
    "AttentionLayout",
    "DirectSum",
    "Element",
    "ExpertLayout",
    "Group",
    "ModelTransformation",
    "NeuronLayout",
    "Norm",
    "Orthogonal",
    "OrthogonalFixingOnes",
    "OrthogonalMap",
    "Pattern",
    "PatternError",
    "Linear",
    "Permute",
    "Piece",
    "PlaneRotations",
    "PlaneSigns",
    "Signs",
    "Rotate",
    "Scale",
    "best_scale",
    "same_products",
    "solve_scaled_attention",
    "solve_scaled_neurons",
    "Sign",
    "SignedPermutation",
    "StreamLayout",
    "StreamMap",
    "Squares",
    "SymmetryError",
    "Transformation",
    "Trivial",
    "act",
    "act_stream",
    "all_finite",
    "averaged_apart",
    "bias_of",
    "chance_share",
    "composed",
    "cross_gram",
    "eigh",
    "full_precision",
    "into_stream",
    "inverse",
    "lazy_assignment",
    "linear_assignment",
    "moves",
    "out_of_stream",
    "product_dtype",
    "rotary_pairs",
    "solve_attention",
    "base_axis",
    "free_parts",
    "without_gauge",
    "solve_experts",
    "solve_neurons",
    "solve_permutation",
    "solve_rotation",
    "svd",
    "squares",
    "target_norm",
    "working_dtype",
]
