"""Random transformers models, and their outputs in exact float64."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

WEIGHT_GAIN = 1.5
BIAS_STD = 0.5
NORM_STD = 0.3


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw every parameter anew, in state-dict order; tied parameters are drawn once.

    Weights keep the size of what they multiply, and norms and biases are far from neutral, so that
    every tensor is seen in the outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = {
        f"{path}.{name}" if path else name: module
        for path, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    seen: set[int] = set()
    for name in model.state_dict():
        parameter = parameters.get(name)
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        kind = type(owners[name]).__name__
        if name.endswith("bias"):
            noise = BIAS_STD * noise
        elif "Norm" in kind:
            noise = NORM_STD * noise + (0.0 if kind.startswith("Gemma") else 1.0)
        else:
            fan_in = parameter.shape[0 if kind == "Conv1D" else -1]
            noise = WEIGHT_GAIN * fan_in**-0.5 * noise
        with torch.no_grad():
            parameter.copy_(noise)


def run(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Run a model, or the language model with a head of its own that it holds."""
    inner = getattr(model, "language_model", None)
    if isinstance(inner, PreTrainedModel) and inner.get_output_embeddings() is not None:
        model = inner
    with torch.no_grad():
        return model(**inputs)


def outputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All logits of a model, or its last hidden state, flattened, as float64."""
    result = run(model, inputs)
    values = result.logits if "logits" in result else result.last_hidden_state
    return values.to(torch.float64).flatten()


class Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exact_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float64 copy of a model, with its inverse frequencies computed anew in float64."""
    exact = copy.deepcopy(model).double().eval()
    with Float64():
        for module in exact.modules():
            frequencies = [name for name, _ in module.named_buffers(recurse=False)]
            known = any(name.endswith("inv_freq") for name in frequencies)
            if known and hasattr(module, "config"):
                fresh = type(module)(module.config)
                for name in frequencies:
                    getattr(module, name).copy_(getattr(fresh, name))
    return exact


@contextlib.contextmanager
def float64_exact(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A float64 copy of a model that, inside the context, is evaluated in float64 throughout.

    transformers casts up to float32 in norms, rotary embeddings and softmax; inside the context
    these casts go to float64. The given model is not changed. The redirection ends with the
    context.
    """
    exact = exact_copy(model)
    with Float64():
        yield exact


def exact_outputs(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Outputs in float64, with the tensors of `state_dict`, if given, in place of the model's."""
    with float64_exact(model) as exact:
        if state_dict is not None:
            exact.load_state_dict(state_dict)
        given = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        return outputs(exact, given)
