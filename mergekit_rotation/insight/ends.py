"""The two models of a merge as it would combine them, aligned or as they are; nothing is written.

The merge is planned once, as `rotation_linear`. The tasks that gather the inputs of an output
tensor give both ends of the aligned line; with stock gatherings in their place they give those of
the plain one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from mergekit import merge as mergekit_merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.buffers import copy_non_floating_buffer
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from transformers import AutoTokenizer

from mergekit_rotation.graph import methods, parameters, run
from mergekit_rotation.graph.checkpoints import Checkpoint
from mergekit_rotation.graph.errors import RotationError, one_line
from mergekit_rotation.graph.layer import rewrap, unwrap
from mergekit_rotation.graph.tasks import GatherChecked
from mergekit_rotation.graph.vocabulary import by_row
from mergekit_rotation.insight.running import stored_dtype
from mergekit_rotation.insight.solved import checkpoint_of, planner_of

StateDict = dict[str, torch.Tensor]


class Inputs(Task[dict[ModelReference, torch.Tensor]]):
    """Return the inputs of one output tensor, by model."""

    name: str
    gather: Task

    def arguments(self) -> dict[str, Task]:
        """What gathers them."""
        return {"tensors": self.gather}

    def group_label(self) -> str | None:
        """As the gathering, so that tensors come in mergekit's order."""
        return self.gather.group_label()

    def priority(self) -> int:
        """Hand on before more is read."""
        return 1000

    def execute(
        self, tensors: dict[ModelReference, torch.Tensor]
    ) -> dict[ModelReference, torch.Tensor]:
        """Hand them on."""
        return tensors


@dataclass(frozen=True)
class Ends:
    """The reference and the other model of a merge.

    Attributes
    ----------
    file : Path
        The configuration.
    reference, other : ModelReference
    planner : MergePlanner
        Of the merge of the two.
    options : MergeOptions
    """

    file: Path
    reference: ModelReference
    other: ModelReference
    planner: MergePlanner
    options: MergeOptions

    @classmethod
    def of(cls, file: Path, options: MergeOptions) -> "Ends":
        """Read a configuration; no weights.

        Parameters
        ----------
        file : Path
            Of a ``rotation_*`` merge, of which models, reference, ``align_*`` parameters, ``dtype``
            and tokenizer count.
        options : MergeOptions

        Raises
        ------
        RotationError
            If it is of no such merge, or of more or fewer than two models.
        """
        raw = _read(file)
        parsed = MergeConfiguration.model_validate(raw)
        reference, other = _two_models(parsed, file)
        LoaderCache().setup(options=options)
        planner = planner_of(_interpolating(raw, parsed, reference, file), options)
        return cls(file, reference, other, planner, options)

    def plan(self) -> None:
        """Plan the merge, and solve if whole models are aligned.

        Raises
        ------
        RotationError
            If the two cannot be merged, or slices would make other models of them.
        """
        settings = self.planner.config.parameters
        run.start(self.planner.config)
        with TemporaryDirectory() as folder:  # what align_save names is not to be overwritten
            if settings.get("align_save"):
                settings["align_save"] = str(Path(folder, "transformations.safetensors"))
            self.planner._plan()
        self._check_whole()

    def tensors(self, aligned: bool) -> tuple[StateDict, StateDict]:
        """Read the tensors of both models, those of the other moved to the reference or not.

        Returns
        -------
        dict, dict of name in the output to Tensor
            In the dtype that the merge works in; on the CPU.

        Raises
        ------
        RotationError
            If only one of them has a tensor, or it is of integers that differ.
        """
        targets = [
            Inputs(name=weight.name, gather=self._gather(task, aligned))
            for weight, task in self.planner._tensors
        ]
        executor = Executor(targets, math_device=self.options.device, storage_device="cpu")
        first: StateDict = {}
        second: StateDict = {}
        words = "Aligning" if aligned else "Reading"
        for task, found in executor.run(quiet=self.options.quiet, desc=words):
            for model in (self.reference, self.other):
                if found and model not in found:
                    raise RotationError(
                        f"{model}: has no {task.name}, which the other model has, so that there is "
                        "nothing to interpolate; choose models with the same tensors"
                    )
            if found:
                a, b = found[self.reference], found[self.other]
                copy_non_floating_buffer([a, b], task.name)  # refuses those that differ
                first[task.name], second[task.name] = a, b
        LoaderCache().flush_all()
        return first, second

    def _check_whole(self) -> None:
        """Refuse slices that make something else of the two models than the models themselves."""
        for name, module in self.planner.config.modules.items():
            depth = self.planner.arch_info.modules[name].architecture.num_layers(
                self.checkpoint.config
            )
            layers: list[int] = []
            for part in module.slices:
                ranges = {tuple(source.layer_range) for source in part.sources}
                models = {source.model for source in part.sources}
                if len(ranges) == 1 and models == {self.reference, self.other}:
                    layers += range(*ranges.pop())
            if layers != list(range(depth)):
                raise RotationError(
                    f"{self.file}: its slices are not the two models from the first layer to the "
                    "last, so that the ends of the line would be others; list both whole under "
                    "models:"
                )

    @staticmethod
    def _gather(task: Any, aligned: bool) -> Any:
        if aligned:
            return task.gather_tensors
        inner = unwrap(task)
        plain = GatherChecked(weight_info=inner.weight_info, dtype=inner.dtype, device=inner.device)
        return rewrap(task, plain).gather_tensors

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model whose configuration and tokenizer the merge takes."""
        return checkpoint_of(str(self.planner.config.base_model or self.reference), self.options)

    def size(self) -> int:
        """Return of how many numbers one of the models consists, of pickled ones about."""
        checkpoint, index = self.checkpoint, self.checkpoint.index
        if index.is_safetensors:
            headers = [checkpoint.header(name) for name in index.tensor_paths]
            return sum(torch.Size(entry[0]).numel() for entry in headers if entry is not None)
        files = {Path(index.base_path, shard) for shard in index.tensor_paths.values()}
        return sum(file.stat().st_size for file in files) // stored_dtype(checkpoint).itemsize

    def tokenizer(self) -> Any:
        """Return the tokenizer of the merge, and give its configuration that vocabulary.

        Raises
        ------
        RotationError
            If there is none.
        """
        config = self.planner.config
        if self.planner._tokenizer_task is not None:
            task = by_row(self.planner._tokenizer_task)
            _, info = next(iter(Executor([task]).run(quiet=True)))
            pad = config.tokenizer.pad_to_multiple_of if config.tokenizer else None
            mergekit_merge._update_config_vocab(
                self.planner.out_model_config, self.planner.arch_info, info.tokenizer, pad
            )
            return info.tokenizer
        return tokenizer_of(self.checkpoint, self.options)


def tokenizer_of(checkpoint: Checkpoint, options: MergeOptions) -> Any:
    """Return the tokenizer of a model.

    Raises
    ------
    RotationError
        If it has none.
    """
    model = checkpoint.model.model
    try:
        return AutoTokenizer.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=options.trust_remote_code
        )
    except Exception as problem:
        raise RotationError(
            f"{checkpoint.model}: cannot load its tokenizer ({one_line(problem)}), and a text is "
            "to be read; add its files"
        ) from problem


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise RotationError(
            f"{file}: is no configuration of one merge ({one_line(problem)}); correct it"
        ) from problem
    if not isinstance(raw, dict):
        raise RotationError(f"{file}: is no configuration of a merge; name a YAML of mergekit's")
    given = raw.get("merge_method", raw.get("method"))
    if not methods.is_rotation(given):
        raise RotationError(
            f"{file}: its merge_method is {given}, which aligns nothing; write "
            f"{methods.PREFIX}{given or 'linear'} to see what alignment does"
        )
    return raw


def _two_models(config: MergeConfiguration, file: Path) -> tuple[ModelReference, ModelReference]:
    """Return the reference and the other model."""
    outputs = [config, *(config.modules or {}).values()]
    slices = [s for output in outputs for s in output.slices or []]
    named = [parameters.explicit_reference([s.parameters]) for s in slices]
    explicit = parameters.explicit_reference([config.parameters])
    found = [explicit, *config.referenced_models(), *named, *parameters.named_models(config)]
    models = [model for model in dict.fromkeys(found) if model is not None]
    if len(models) != 2:
        names = ", ".join(map(str, models))
        raise RotationError(
            f"{file}: names {len(models)} model{'s' * (len(models) != 1)} ({names}), and a line "
            "has two ends; write a configuration of two models"
        )
    return models[0], models[1]


def _interpolating(
    raw: Mapping[str, Any], parsed: MergeConfiguration, reference: ModelReference, file: Path
) -> dict[str, Any]:
    """Return the configuration of the same models and alignment, merged by `rotation_linear`."""
    config: dict[str, Any] = _only_alignment(raw)
    config.pop("method", None)
    config["merge_method"] = f"{methods.PREFIX}linear"
    config["parameters"] = {**(config.get("parameters") or {}), "weight": 1.0}
    if reference not in parsed.referenced_models():
        if not isinstance(config.get("models"), list):
            raise RotationError(
                f"{file}: {reference} is none of its inputs; list both models whole under models:"
            )
        config["models"] = [*config["models"], {"model": str(reference)}]
    return config


def _only_alignment(node: Any) -> Any:
    """Return a configuration without the parameters of its merge method."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_only_alignment(entry) for entry in node]
    if not isinstance(node, Mapping):
        return node
    return {
        key: {k: v for k, v in (value or {}).items() if k in parameters.KNOWN}
        if key == "parameters"
        else value
        if key == "tokenizer"
        else _only_alignment(value)
        for key, value in node.items()
    }
