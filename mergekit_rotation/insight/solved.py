"""One model aligned to another without writing anything: a planned ``rotation_align``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit import merge as mergekit_merge
from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

from mergekit_rotation.graph import run
from mergekit_rotation.graph.checkpoints import Checkpoint
from mergekit_rotation.graph.context import known_families
from mergekit_rotation.graph.errors import RotationError, one_line
from mergekit_rotation.graph.layout import Unsupported, check_same_layout, layout_of
from mergekit_rotation.graph.run import Run
from mergekit_rotation.graph.whole import WholeModels


class Apart(Exception):
    """Two models whose layers cannot be brought together at all; the message says why."""


@dataclass(frozen=True)
class Solved:
    """One model aligned to another.

    Attributes
    ----------
    reference, other : ModelReference
    whole : WholeModels
        With the transformation that was solved in its ``rewriter``.
    run : Run
        What was recorded on the way.
    depths : (int, int)
        How many layers the two models have.
    """

    reference: ModelReference
    other: ModelReference
    whole: WholeModels
    run: Run
    depths: tuple[int, int]


def settings(
    reference: str, other: str, residual: str, scale: bool, layers: int | None = None
) -> dict[str, Any]:
    """Return the configuration of the merge that moves one model to another's coordinates.

    Parameters
    ----------
    reference, other : str
    residual : str
        See ``align_residual``.
    scale : bool
        See ``align_scale``.
    layers : int, optional
        How many layers of the other model are taken; all by default.
    """
    parameters: dict[str, Any] = {"align_reference": reference, "align_residual": residual}
    if scale:
        parameters["align_scale"] = True
    # align_as: the model as a whole is solved for at once, even if its stream stays as it is.
    source = {"model": other, "parameters": {"align_as": other}}
    if layers is None:
        inputs: dict[str, Any] = {"models": [source]}
    else:
        inputs = {"slices": [{"sources": [{**source, "layer_range": [0, layers]}]}]}
    return {"merge_method": "rotation_align", **inputs, "parameters": parameters}


def solve(reference: str, other: str, options: MergeOptions, scale: bool = False) -> Solved:
    """Align one model to another, with the largest exact map of the stream that both allow.

    Parameters
    ----------
    reference, other : str
        As in a configuration of mergekit's.
    options : MergeOptions
    scale : bool
        Whether maps that are not orthogonal may be undone, too; they are in any case where the
        first attempt finds that nothing else is left.

    Raises
    ------
    Apart
        If the shapes of the two models differ.
    RotationError
        If one of them cannot be read, or no symmetries are known for it.
    """
    LoaderCache().setup(options=options)
    first, second = (checkpoint_of(model, options) for model in (reference, other))
    try:
        layout_of(first)
        layout_of(second)
    except Unsupported as problem:
        raise RotationError(str(problem)) from problem
    try:
        family, _ = check_same_layout(first, second)
    except Unsupported as problem:
        raise Apart(str(problem).split(";")[0]) from problem
    try:
        maps = family.stream.maps
        for residual in [kind for kind in ("orthogonal", "permutation") if kind in maps][:1]:
            try:
                return _solve(reference, other, residual, scale, options)
            except RotationError as problem:
                if "align_residual: none" not in str(problem):
                    raise
        return _solve(reference, other, "none", scale, options)
    except RotationError as problem:
        if first.model_class == second.model_class:
            raise
        raise Apart(str(problem).split(";")[0]) from problem


def checkpoint_of(model: str, options: MergeOptions) -> Checkpoint:
    """Return the checkpoint of a model, as in a configuration of mergekit's.

    Raises
    ------
    RotationError
        If it cannot be read, or is quantised.
    """
    found = ModelReference.parse(model)
    LoaderCache().setup(options)
    try:
        config = found.config(trust_remote_code=options.trust_remote_code)
        checkpoint = Checkpoint(found, config, known_families(None))
    except RotationError:
        raise
    except Exception as problem:
        there = Path(found.model.path).exists()
        said = "cannot be read as a model" if there else "there is no such folder or model"
        raise RotationError(
            f"{model}: {said} ({one_line(problem).split('. ')[0]}); name a folder with a "
            "config.json and weights, or a model of the hub"
        ) from problem
    checkpoint.check_stored()
    return checkpoint


def _solve(reference: str, other: str, residual: str, scale: bool, options: MergeOptions) -> Solved:
    depths = _depths(reference, other, options)
    layers = depths[0] if depths[1] > depths[0] else None
    this = run.start()
    whole = planned(settings(reference, other, residual, scale, layers), options)
    if not scale and any(record.scaled for record in this.records):
        return _solve(reference, other, residual, True, options)
    this.warn_of_left()
    first, second = (ModelReference.parse(model) for model in (reference, other))
    return Solved(first, second, whole, this, depths)


def planned(config: Mapping[str, Any], options: MergeOptions) -> WholeModels:
    """Plan a merge that aligns whole models, and return what was solved for it."""
    planner = planner_of(config, options)
    planner._plan()
    whole: WholeModels = planner._rotation.whole
    return whole


def planner_of(config: Mapping[str, Any], options: MergeOptions) -> MergePlanner:
    """Return the planner of a merge, with nothing planned yet."""
    parsed = MergeConfiguration.model_validate(config)
    definition = architecture(parsed, options)
    return MergePlanner(
        parsed,
        definition,
        options=options,
        out_model_config=mergekit_merge._model_out_config(
            parsed, definition, trust_remote_code=options.trust_remote_code
        ),
    )


def architecture(config: MergeConfiguration, options: MergeOptions) -> ModelArchitecture:
    """Return the definition that a merge will use: mergekit's, or one of our families."""
    return mergekit_merge.get_architecture_info(config, options)


def _depths(reference: str, other: str, options: MergeOptions) -> tuple[int, int]:
    """Return how many layers two models have; of those with several modules, 0."""
    counts = []
    for model in (reference, other):
        entry = {"merge_method": "rotation_passthrough", "models": [{"model": model}]}
        parsed = MergeConfiguration.model_validate(entry)
        definition = architecture(parsed, options)
        config = ModelReference.parse(model).config(trust_remote_code=options.trust_remote_code)
        modules = definition.modules
        if len(modules) != 1:
            raise RotationError(
                f"{model}: has several modules ({', '.join(modules)}), but only models of "
                "one can be compared; rotation_* methods align each module by itself, and the "
                "alignment.json of a merge has its distances"
            )
        name = next(iter(modules))
        counts.append(int(modules[name].architecture.num_layers(config)))
    return counts[0], counts[1]
