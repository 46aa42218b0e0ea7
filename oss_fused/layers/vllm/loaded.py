# SPDX-License-Identifier: MIT
"""What a load must bring: every tensor of a model, and finite numbers only.

- A quantisation method of this package marks the memory of its layer and checks it (CheckedMethod).
- vLLM's own linear layers and embeddings have memory that nobody wrote. It is marked and checked
  here.
- Layers without a method (norms) hold values that would serve. Their names are counted, as vLLM
  does for models that are not quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.checks import FLOATS, check_finite, tensor_name
from oss_fused.quant.patterns import spellings


class CheckedMethod:
    """What a load needs from a quantisation method; ``prefix`` is the layer's name.

    Attributes:
        drafts: the layer is of a head that drafts (EAGLE). Such a head may lack tensors that the
            served model has, and the served model checks every draft.
    """

    prefix: str
    drafts = False

    def mark_missing(self, layer: Any) -> None:
        """Fill the tensors of ``layer``, so that its processing finds what is not loaded."""

    def check_first(self, layer: Any) -> None:
        """Refuse a first load that left out ``layer``, where no mark in its memory tells.

        Raises:
            CheckpointError: names the tensor that is missing.
        """

    def check_session(self, layer: Any, loaded: set[str]) -> None:
        """Refuse a load that ends with only the parameters ``loaded`` of an unprocessed layer.

        Raises:
            CheckpointError: names the tensor that is missing.
        """
        if not loaded:
            refuse_layer(layer, self.prefix)


def method_of(module: nn.Module) -> Any:
    """The quantisation method that ``module`` itself holds, or None.

    vLLM's LoRA wrappers answer ``quant_method`` with that of the layer in them.
    """
    # some methods of vLLM's are modules
    return vars(module).get("quant_method", module._modules.get("quant_method"))


def checked_layers(model: nn.Module) -> Iterator[tuple[Any, CheckedMethod]]:
    """Layers of ``model`` with a method of this package."""
    for module in model.modules():
        method = method_of(module)
        if isinstance(method, CheckedMethod):
            yield module, method


def is_draft_head(model: nn.Module) -> bool:
    """Whether ``model`` is a head that drafts, of which not every tensor must come."""
    return any(method.drafts for _, method in checked_layers(model))


def is_vllms(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer or an embedding with vLLM's method."""
    method = method_of(module)
    return not isinstance(method, CheckedMethod) and isinstance(
        method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    )


def mark_missing(layer: nn.Module) -> None:
    """Fill the tensors of ``layer`` that a load must bring with what no checkpoint holds."""
    method = method_of(layer)
    if isinstance(method, CheckedMethod):
        method.mark_missing(layer)
    elif is_vllms(layer):
        _fill(layer, "weight")


def mark_model(model: nn.Module) -> None:
    """Mark what no method of this package does: layers of vLLM's own, and all biases."""
    for layer in model.modules():
        vllms = is_vllms(layer)
        if vllms or isinstance(method_of(layer), CheckedMethod):
            # made after the method's tensors, and loaded in place by a reload
            _fill(layer, "bias")
        if vllms:
            _fill(layer, "weight")


def _fill(layer: nn.Module, name: str) -> None:
    parameter = layer._parameters.get(name)
    if parameter is not None:
        parameter.data.fill_(float("nan"))


def refuse_layer(layer: nn.Module, name: str) -> None:
    """Raise CheckpointError: no tensor came for ``layer`` of that name."""
    # experts have w13_weight
    leaf = next((name for name in layer._parameters if name.endswith("weight")), "weight")
    tensor = tensor_name(f"{_plain(name)}.{leaf}", 0, len(getattr(layer, "logical_widths", ())))
    raise CheckpointError(f"the checkpoint has no {tensor!r}; expected every tensor of the model")


def check_names(model: nn.Module, loaded: Collection[str] | None) -> None:
    """Refuse a load without a tensor of a layer that has no method.

    Args:
        model: whose layers they are.
        loaded: names of its parameters that were loaded; None: its class does not say.

    Raises:
        CheckpointError: names the first missing tensors.
    """
    if loaded is None:
        return
    needed = (
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if method_of(module) is None
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
    missing = [spellings(name)[-1] for name in needed if name not in loaded]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"the checkpoint has no {', '.join(map(repr, missing[:3]))}{more}; expected every "
            f"tensor of the model"
        )


def check_values(model: nn.Module) -> None:
    """Refuse NaN and Inf in the layers that no method of this package checks.

    Raises:
        CheckpointError: names the tensor.
    """
    for prefix, module in model.named_modules():
        if isinstance(method_of(module), CheckedMethod):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype in FLOATS and not parameter.is_meta:
                values, widths = parameter.data, getattr(module, "logical_widths", ())
                if name == "sinks":
                    # that of a head without one
                    values = values.masked_fill(values == float("-inf"), 0.0)
                check_finite(f"{_plain(prefix)}.{name}", values, widths)


def _plain(name: str) -> str:
    """The layer's name without vLLM's LoRA wrapper."""
    return name.replace(".base_layer", "")
