"""What can be known of a checkpoint before its tensors are read: names, shapes, dtypes."""

import os

import torch
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache, LoadTensor
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mergekit_rotation.graph.errors import RotationError

#: dtypes whose tensors are weights that can be moved, as safetensors headers spell them
FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Checkpoint:
    """Names, shapes and dtypes of one model's tensors, from its index and file headers.

    Parameters
    ----------
    model : ModelReference
        Local, or downloaded by mergekit; an adapter is merged first, as mergekit does.
    config : PretrainedConfig
    """

    def __init__(self, model: ModelReference, config: PretrainedConfig):
        self.model = model
        self.config = config
        self.index = LoaderCache().get(model).index
        self._headers: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}

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
        names = set(self.index.tensor_paths)
        return any(
            can_convert_checkpoint_keys(self.config.model_type, names, target)
            for target in [load.tensor, *(load.aliases or ())]
        )

    def loaded_as(self, name: str) -> str:
        """Return the name of the tensor that a stored one becomes, or becomes a part of.

        mergekit loads tensors (experts, say) as transformers packs and names them.
        """
        for transform in get_checkpoint_conversion_mapping(self.config.model_type) or ():
            name, _ = transform.rename_source_key(name)
        return name

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
                f"{self.model}: cannot read {shard} ({problem}); fetch the model again"
            ) from problem

    def check_not_quantised(self) -> None:
        """Refuse a model that says that it is quantised.

        Raises
        ------
        RotationError
        """
        if getattr(self.config, "quantization_config", None):
            raise RotationError(
                f"{self.model}: its config has a quantization_config; quantised weights cannot be "
                "aligned or merged, use the unquantised model"
            )
