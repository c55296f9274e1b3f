"""Models of which only headers are read: tensors on the meta device, with shape and dtype."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import huggingface_hub
import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from peft import PeftConfig


class NotHere(BaseException):
    """A model that would have to be downloaded; no error of a merge, so nothing may handle it."""


@dataclass(eq=False)
class Shard:
    """A file of weights that a merge has open, and how much of it is in memory.

    Attributes
    ----------
    path : str
    mapped : bool
        Whether it is mapped into memory, so that only what was touched counts, and the system can
        drop it; else it is read as a whole.
    """

    path: str
    mapped: bool
    touched: int = 0

    @property
    def resident(self) -> int:
        """Bytes of it that are in memory."""
        return self.touched if self.mapped else os.path.getsize(self.path)


class HeaderLoader(LazyTensorLoader):
    """A loader of mergekit's that returns tensors without values.

    Parameters
    ----------
    index : ShardedTensorIndex
    lazy_unpickle : bool
        Whether the merge reads pickled files tensor by tensor.
    """

    def __init__(self, index: ShardedTensorIndex, lazy_unpickle: bool):
        super().__init__(index, lazy_unpickle=False)
        self.by_tensor = lazy_unpickle and not index.is_safetensors
        #: the file that is open now
        self.shard: Shard | None = None
        self._seen: set[str] = set()
        #: bytes of all tensors that were asked for, each time
        self.bytes = 0

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> torch.Tensor | None:
        """Return a tensor on the meta device, whose attribute ``shard`` is the file it views."""
        # A tensor of a mapped file is read when it is used, which it is not.
        place = "cpu" if self.index.is_safetensors else "meta"
        found = super().get_tensor(key, place, aliases, raise_on_missing)
        if found is None:
            return None
        path = os.path.join(self.index.base_path, self.index.tensor_paths[key])
        if self.shard is None or self.shard.path != path:
            self.shard, self._seen = Shard(path, self.index.is_safetensors), set()
        tensor = torch.empty_like(found, device="meta")
        self.bytes += tensor.nbytes
        if key not in self._seen:
            self._seen.add(key)
            self.shard.touched += tensor.nbytes
        if not self.by_tensor:
            tensor.shard = self.shard  # type: ignore[attr-defined]
        return tensor

    def flush(self) -> None:
        """Close the file that is open."""
        super().flush()
        self.shard = None


class HeaderLoaders(dict[ModelReference, HeaderLoader]):
    """What stands for the loaders of mergekit's `LoaderCache` while a merge is planned.

    Parameters
    ----------
    options : MergeOptions
        Those of the merge.
    """

    def __init__(self, options: MergeOptions):
        super().__init__()
        self.options = options
        #: adapters that the merge would first merge into their model: bytes of that
        self.adapters: dict[ModelReference, int] = {}

    def __contains__(self, model: object) -> bool:
        return True

    def __missing__(self, model: ModelReference) -> HeaderLoader:
        self[model] = loader = HeaderLoader(self._index(model), self.options.lazy_unpickle)
        return loader

    def _index(self, model: ModelReference) -> ShardedTensorIndex:
        if model.lora is not None:
            folder = self._merged_adapter(model)
            if folder is None:
                index = self._index(ModelReference(model=model.model))
                self.adapters[model] = stored_bytes(index)
                return index
            model = folder
        return ShardedTensorIndex.from_disk(self._folder(model))

    def _merged_adapter(self, model: ModelReference) -> ModelReference | None:
        """Return where mergekit keeps a merged adapter; None if it has not been merged yet."""
        options = self.options
        bare = ModelReference(model=model.model)
        if options.lora_merge_cache is not None:
            name = f"{model.model._unique_id()}_{model.lora._unique_id()}"
            if not os.path.exists(os.path.join(options.lora_merge_cache, name)):
                self._folder(bare)
                adapter = PeftConfig.from_pretrained(model.lora.path, revision=model.lora.revision)
                if adapter.peft_type is None:
                    raise ValueError(f"{model.lora}: its adapter_config.json names no peft_type")
                return None
        found: ModelReference = model.merged(
            options.lora_merge_cache, options.trust_remote_code, options.lora_merge_dtype
        )
        return found

    def _folder(self, model: ModelReference) -> str:
        path: str = model.model.path
        if os.path.exists(path):
            return path
        try:
            found: str = huggingface_hub.snapshot_download(
                path,
                revision=model.model.revision,
                cache_dir=self.options.transformers_cache,
                local_files_only=True,
            )
        except Exception:
            raise NotHere(
                f"{path}: its weights are not on this machine, and plan downloads none; run "
                f"`hf download {path}` first"
            ) from None
        return found


def stored_bytes(index: ShardedTensorIndex) -> int:
    """Return the size of all files of a model's weights."""
    shards = set(index.tensor_paths.values())
    return sum(os.path.getsize(os.path.join(index.base_path, shard)) for shard in shards)


@contextmanager
def headers_only(options: MergeOptions) -> Iterator[HeaderLoaders]:
    """Let mergekit read headers in place of weights."""
    before, LoaderCache.loaders = LoaderCache.loaders, HeaderLoaders(options)
    try:
        yield LoaderCache.loaders
    finally:
        LoaderCache.loaders = before
