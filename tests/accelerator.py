"""Accelerators without any hardware: tensors with numbers that say they lie on one.

PyTorch refuses to compute with tensors of several devices, to hand one of an accelerator to NumPy
and to draw from a generator of another device, but only where there is such a device. In `on` these
rules hold for ``cuda:0``, ``cuda:1`` and so on as well, and the numbers are computed on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
#: what takes tensors of two devices: it copies one to the place of the other
ACROSS = {torch.Tensor.copy_, torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default}
#: what takes indices from the CPU, too
INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
}
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
#: methods that ask for the accelerator itself before they dispatch
ASKING = INDEXING | {
    getattr(torch.Tensor, f"__{name}__") for name in ("bool", "float", "index", "int", "invert")
}
ASKING |= {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.contiguous, torch.Tensor.copy_}
ASKING |= {torch.nonzero}
#: what changes the shape of a tensor in place on its way
WHOLE = {torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul}


class Placed(torch.Tensor):
    """A tensor that says it lies on an accelerator; ``inner`` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "Placed":
        result: Placed = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        result.inner = inner
        return result

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placed({self.inner}, {self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in ASKING | WHOLE:
            return run(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return run(func, args, kwargs or {})


class Rules(TorchDispatchMode):
    """Lets tensors be made on accelerators that are not there."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # so that torch does not look for them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and place its result where the arguments lie.

    Raises
    ------
    RuntimeError
        As torch does, where they lie on several devices.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if func in ACROSS:
        place = args[0].device
    elif func in INDEXED | INDEXING:
        place = args[0].device
        others = {x.device for x in tensors} - {CPU, place}
        if others:
            raise RuntimeError(f"{func}: indices on {others} of a tensor on {place}")
    else:
        # a number that lies on the CPU may meet any tensor, as in torch
        places = {x.device for x in tensors if x.dim() or x.device != CPU}
        if len(places) > 1:
            raise RuntimeError(f"{func}: tensors on {sorted(map(str, places))}")
        place = next(iter(places), CPU)
    wanted = kwargs.get("device")
    if wanted is not None:
        place = _indexed(torch.device(wanted))
        kwargs = {**kwargs, "device": CPU}
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != place.type:
        raise RuntimeError(f"{func}: a generator on {generator.device} for a tensor on {place}")
    given = {id(x.inner): x for x in tensors if isinstance(x, Placed)}
    inside = tree_map(lambda x: x.inner if isinstance(x, Placed) else x, (args, kwargs))
    found = func(*inside[0], **inside[1])
    if place.type == "cpu":
        return found

    def placed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, Placed):
            return x
        return given[id(x)] if id(x) in given else Placed(x, place)

    return tree_map(placed, found)


def _indexed(device: torch.device) -> torch.device:
    return (
        torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device
    )


@contextmanager
def on(*_: object) -> Iterator[None]:
    """Let there be accelerators in this thread."""
    torch._C._set_only_lift_cpu_tensors(True)  # numbers of Python go by way of the CPU
    try:
        with Rules():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
