"""What can be known of a checkpoint before its tensors are read: names, shapes, dtypes."""

import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache, LoadTensor
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mergekit_rotation.architecture import Family, find_family
from mergekit_rotation.graph.errors import RotationError, one_line

LOG = logging.getLogger(__name__)

#: dtypes whose tensors are weights that can be moved, as safetensors headers spell them
FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: ends of the names under which quantised weights and their scales are stored
_QUANTISED = (".qweight", ".weight_packed", ".absmax", ".weight_scale", ".weight_scale_inv")


def read_config(model: ModelReference, trust_remote_code: bool) -> PretrainedConfig:
    """Read the configuration of a model.

    Raises
    ------
    RotationError
        If there is no such model, or its config.json cannot be read.
    """
    for part in (model.model, model.lora):
        if part is not None and part.path.startswith(("/", ".", "~")):
            if not os.path.isdir(part.path):
                raise RotationError(
                    f"{part.path}: there is no such folder; correct the path of the model"
                )
    path = model.model.path
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise RotationError(f"{model}: is an adapter; write its model before it, MODEL+{path}")
        raise RotationError(f"{model}: has no config.json; fetch or save the model again")
    try:
        return model.config(trust_remote_code=trust_remote_code)
    except Exception as problem:
        remedy = "repair or fetch it again"
        if not os.path.isdir(path):
            remedy = "correct the name, or write ./ before the path of a folder"
        raise RotationError(
            f"{model}: cannot read its config.json ({one_line(problem)}); {remedy}"
        ) from problem


def _index(model: ModelReference) -> ShardedTensorIndex:
    """Return mergekit's index of the tensors of a model, whose files are all there.

    Raises
    ------
    RotationError
    """
    remedy = "fetch the model again"
    if model.lora is not None:
        folder = LoaderCache().lora_cache_dir
        if not folder:
            raise RotationError(
                f"{model}: an adapter is merged into its model first; say where such models are "
                "kept, with --lora-merge-cache FOLDER"
            )
        remedy = f"what {folder} holds of it may be incomplete, delete it there"
    try:
        index = LoaderCache().get(model).index
        shards = sorted(set(index.tensor_paths.values()))
    except Exception as problem:
        raise RotationError(
            f"{model}: cannot read its weights ({one_line(problem)}); {remedy}"
        ) from problem
    if not shards:
        raise RotationError(f"{model}: its files hold no tensor; fetch the model again")
    for shard in shards:
        if not os.path.isfile(os.path.join(index.base_path, shard)):
            raise RotationError(
                f"{model}: the index lists {shard}, which is not there; fetch the model again"
            )
    return index


class Checkpoint:
    """Names, shapes and dtypes of one model's tensors, from its index and file headers.

    Parameters
    ----------
    model : ModelReference
        Local, or downloaded by mergekit; an adapter is merged first, as mergekit does.
    config : PretrainedConfig
    families : sequence of Family
        What is known, the first that fits counts.

    Attributes
    ----------
    model_class : str
        ``?`` if the configuration does not name it.
    family : Family, optional
        None if its symmetries are not known.
    """

    def __init__(self, model: ModelReference, config: PretrainedConfig, families: Sequence[Family]):
        self.model = model
        self.config = config
        self.model_class = str(next(iter(getattr(config, "architectures", None) or ["?"])))
        self.family = find_family(config, self.model_class, families)
        self.index = _index(model)
        self._headers: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        self._convertible: dict[str, bool] = {}

    def resolve(self, load: LoadTensor) -> str | None:
        """Return the name under which mergekit will find a tensor in the files, if any."""
        for name in [load.tensor, *(load.aliases or ()), *(load.tied_names or ())]:
            if name in self.index.tensor_paths:
                return str(name)
        return None

    def has(self, load: LoadTensor) -> bool:
        """Tell whether mergekit can load a tensor, converting the checkpoint if it has to."""
        if self.resolve(load) is not None:
            return True
        return any(self._can_convert(name) for name in [load.tensor, *(load.aliases or ())])

    def _can_convert(self, target: str) -> bool:
        if target not in self._convertible:  # mergekit goes through all names each time
            names = set(self.index.tensor_paths)
            found = can_convert_checkpoint_keys(self.config.model_type, names, target)
            self._convertible[target] = bool(found)
        return self._convertible[target]

    @cached_property
    def _conversions(self) -> list[Any]:
        return list(get_checkpoint_conversion_mapping(self.config.model_type) or ())

    def converted(self, name: str) -> set[str]:
        """Return the names that a stored tensor may have, alone or as a part, for mergekit.

        These are its own and those that transformers' conversion of checkpoints leads to.
        """
        names = {name}
        for transform in self._conversions:
            for old in tuple(names):
                new, matched = transform.rename_source_key(old)
                if matched is not None:
                    first, *others = transform.target_patterns
                    names |= {new, *(new.replace(first, other, 1) for other in others)}
        return names

    def header(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Return shape and safetensors dtype of a stored tensor; None for pickled files."""
        if not self.index.is_safetensors:
            return None
        shard = self.index.tensor_paths[name]
        if shard not in self._headers:
            self._headers[shard] = self._read(shard)
        if name not in self._headers[shard]:
            raise RotationError(
                f"{self.model}: the index lists {name} in {shard}, which does not hold it; "
                "fetch the model again"
            )
        return self._headers[shard][name]

    def _read(self, shard: str) -> dict[str, tuple[tuple[int, ...], str]]:
        path = os.path.join(self.index.base_path, shard)
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}
                return {
                    name: (tuple(part.get_shape()), str(part.get_dtype()))
                    for name, part in slices.items()
                }
        except Exception as problem:
            raise RotationError(
                f"{self.model}: cannot read {shard} ({one_line(problem)}); fetch the model again"
            ) from problem

    def warn_of_two_formats(self) -> None:
        """Say which weights are read where a folder holds more than one set of them."""
        single = ("model.safetensors", "pytorch_model.bin")
        files = [name for file in single for name in (f"{file}.index.json", file)]
        found = [f for f in files if os.path.isfile(os.path.join(self.index.base_path, f))]
        if len(found) > 1:
            LOG.warning(
                "%s: holds %s; mergekit reads what %s says, remove the others if they differ",
                self.model,
                " and ".join(found),
                found[0],
            )

    def check_stored(self) -> None:
        """Read all headers, and refuse files that are damaged and weights that are quantised.

        Raises
        ------
        RotationError
        """
        if getattr(self.config, "quantization_config", None):
            raise self._quantised("its config has a quantization_config")
        for name in self.index.tensor_paths:
            if name.endswith(_QUANTISED):
                raise self._quantised(f"it has a tensor {name}")
            header = self.header(name)
            if header is not None and name.endswith(".weight") and header[1] not in FLOATING:
                raise self._quantised(f"{name} is stored as {header[1]}")

    def _quantised(self, sign: str) -> RotationError:
        return RotationError(
            f"{self.model}: {sign}; quantised weights cannot be aligned or merged, use the "
            "unquantised model"
        )
