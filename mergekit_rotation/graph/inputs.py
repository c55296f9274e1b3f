"""What configurations and file headers tell about inputs that cannot be merged, or only badly."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.config import InputSliceDefinition, MergeConfiguration
from mergekit.io.tasks import GatherTensors
from mergekit.merge import _set_chat_template
from transformers import AutoTokenizer

from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.errors import RotationError, one_line
from mergekit_rotation.graph.layer import unwrap


def check_depths(context: Context) -> None:
    """Refuse models of different depth that are listed whole.

    Raises
    ------
    RotationError
        Where mergekit's error would not name them.
    """
    config = context.planner.config
    for name in context.planner.arch_info.modules:
        output = (config.modules or {}).get(name, config)
        models = [entry.model for entry in output.models or []]
        if not models:
            continue
        models += [config.base_model] if config.base_model is not None else []
        first, *others = depths = {model: _depth(context, model, name) for model in models}
        for model in others:
            if depths[model] != depths[first]:
                raise RotationError(
                    f"{model}: has {depths[model]} layers, but {depths[first]} in {first}; choose "
                    "layers of both under slices:"
                )


def check_layer(context: Context, source: InputSliceDefinition, offset: int, module: str) -> None:
    """Refuse a slice that asks for a layer that its model lacks.

    Raises
    ------
    RotationError
    """
    index, depth = source.layer_range[0] + offset, _depth(context, source.model, module)
    if depth is not None and index >= depth:
        raise RotationError(
            f"{source.model}: layer_range asks for layer {index}, but the model has {depth} "
            "layers, counted from 0; correct the slice"
        )


def _depth(context: Context, model: ModelReference, module: str) -> int | None:
    """Return the number of layers; None if it is not where mergekit looks for it."""
    architecture = context.planner.arch_info.modules[module].architecture
    try:
        return int(architecture.num_layers(context.checkpoint(model).config))
    except RuntimeError:
        return None


def check_tokenizers(context: Context) -> None:
    """Refuse a merge of vocabularies for which mergekit cannot load the tokenizer that it needs.

    Raises
    ------
    RotationError
    """
    config = context.planner.config
    if config.tokenizer is None and config.tokenizer_source is None:
        return
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    base = config.base_model or config.referenced_models()[0]
    for model in dict.fromkeys([base, source if isinstance(source, ModelReference) else base]):
        try:
            AutoTokenizer.from_pretrained(
                model.model.path,
                revision=model.model.revision,
                trust_remote_code=context.planner.options.trust_remote_code,
            )
        except Exception as problem:
            raise RotationError(
                f"{model}: cannot load its tokenizer ({one_line(problem)}); add its files, or name "
                "a model that has them as the source under tokenizer:"
            ) from problem


def check_chat_template(config: MergeConfiguration) -> None:
    """Refuse a chat template that mergekit would only find invalid when all weights are written.

    Raises
    ------
    RotationError
    """
    if config.chat_template == "auto":
        return
    try:
        _set_chat_template(SimpleNamespace(), config)
    except RuntimeError as problem:
        raise RotationError(
            f"chat_template: {config.chat_template!r} is neither a template nor the name of one; "
            "write auto, chatml or a Jinja template"
        ) from problem


def check_shapes(context: Context, weight: WeightInfo, task: Any) -> None:
    """Refuse tensors of different shape before anything is solved, as mergekit would later.

    Nothing is known here of tensors in pickled files; those that move are looked at by
    `layout.check_header`, and vocabularies that mergekit rewrites may differ.

    Raises
    ------
    RotationError
    """
    gather = getattr(task, "gather_tensors", None)
    if type(gather) is not GatherTensors or unwrap(task) is not gather:
        return
    shapes: dict[ModelReference, tuple[int, ...]] = {}
    for load in gather.arguments().values():
        checkpoint = context.checkpoint(load.model)
        name = checkpoint.resolve(load)
        header = checkpoint.header(name) if name is not None else None
        if header is not None:
            shapes[load.model] = header[0]
    axis = weight.vocabulary_axis
    for model, shape in shapes.items():
        first, expected = next(iter(shapes.items()))
        if axis is not None and _without(shape, axis) == _without(expected, axis):
            _check_vocabulary(context, model, weight, shape[axis])
            if shape != expected:
                raise RotationError(
                    f"{model}: {weight.name} has {shape[axis]} rows, but {expected[axis]} in "
                    f"{first}; bring the vocabularies together, for example with tokenizer: "
                    "{source: base}"
                )
        elif shape != expected:
            raise RotationError(
                f"{model}: {weight.name} has shape {list(shape)}, but {list(expected)} in {first}, "
                "and mergekit cannot merge the two; remove the model"
            )


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _check_vocabulary(
    context: Context, model: ModelReference, weight: WeightInfo, rows: int
) -> None:
    """Refuse embeddings whose number of rows is not that of the configuration."""
    size = getattr(context.checkpoint(model).config.get_text_config(), "vocab_size", rows)
    if size != rows:
        raise RotationError(
            f"{model}: {weight.name} has {rows} rows where its config demands {size}; repair its "
            "config.json"
        )


def warn_of_frequencies(
    context: Context, reference: ModelReference, models: Sequence[ModelReference]
) -> None:
    """Say which models rotate their queries and keys by other angles than the reference."""
    for model in models:
        if model == reference or not context.first_time((reference, model)):
            continue
        ours, theirs = (_rotary(context.checkpoint(m).config) for m in (reference, model))
        differing = [
            f"{key} {theirs.get(key)} instead of {ours.get(key)}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if ours and theirs and differing:
            context.warn_once(
                f"{model}: its rotary settings differ from those of {reference} "
                f"({', '.join(differing)}); queries and keys are compared under different "
                "frequencies, and the output has the settings of one of them"
            )


def _rotary(config: Any) -> dict[str, Any]:
    """Return the settings of rotary embeddings by dotted path, wherever a configuration has them.

    transformers collects the older entries under ``rope_parameters``.
    """
    found: dict[str, Any] = {}
    entries = config.get_text_config().to_dict()
    pending = [(k, v) for k, v in entries.items() if k.startswith(("rope_", "rotary_"))]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}.{key}", inner) for key, inner in value.items()]
        else:
            found[path] = value
    return found
