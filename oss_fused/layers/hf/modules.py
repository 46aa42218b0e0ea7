# SPDX-License-Identifier: MIT
"""The library's functions as ``torch.nn`` modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from oss_fused import autograd, functional
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import (
    ACTIVATIONS,
    ON_OVERFLOW,
    SIDES,
    check_choice,
    check_eps,
    check_scale,
    check_sizes,
)
from oss_fused.kernels.op import CPU, REFERENCE, check_arguments, default_backend
from oss_fused.kernels.scale_values import check_scale_values
from oss_fused.layers.hf.codes import HoldsCodes

_ops = torch.ops.oss_fused


class FusedRMSNormRoPE(nn.Module):
    """RMSNorm over ``hidden_dim`` and rotary embedding per head, in one launch.

    Args:
        hidden_dim: size of the last dimension of x.
        head_dim: even divisor of hidden_dim.
        eps: added to the mean square.

    Shapes: x [B, S, hidden_dim], cos and sin [S, head_dim] -> [B, S, hidden_dim].

    Raises:
        ShapeMismatchError: head_dim is odd or no divisor of hidden_dim, or a size is below 1.
        SchemeError: ``eps`` is negative or not finite.
    """

    def __init__(
        self,
        hidden_dim: int,
        head_dim: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the weight, all ones."""
        super().__init__()
        check_sizes(1, hidden_dim=hidden_dim, head_dim=head_dim)
        check_eps(eps)
        if head_dim % 2 or hidden_dim % head_dim:
            raise ShapeMismatchError(
                f"head_dim={head_dim}: expected an even divisor of hidden_dim={hidden_dim}"
            )
        self.hidden_dim, self.head_dim, self.eps = hidden_dim, head_dim, eps
        self.weight = nn.Parameter(torch.ones(hidden_dim, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Normalise and rotate; see ``oss_fused.fused_rmsnorm_rope``."""
        return functional.fused_rmsnorm_rope(x, self.weight, cos, sin, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"hidden_dim={self.hidden_dim}, head_dim={self.head_dim}, eps={self.eps}"


class FusedRMSNorm(nn.Module):
    """RMSNorm over the last dimension by the same kernel, with a rotation by nothing.

    Rounded once at the end, as gpt-oss does; Llama's own module rounds before the weight too.

    Args:
        weight: [hidden_dim], hidden_dim even; shared, not copied.
        eps: added to the mean square.

    Raises:
        ShapeMismatchError: ``weight`` is no vector of even size.
        SchemeError: ``eps`` is negative or not finite.
    """

    _cos: torch.Tensor
    _sin: torch.Tensor

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        """Share ``weight``."""
        super().__init__()
        check_eps(eps)
        if weight.dim() != 1 or weight.shape[0] % 2 or not weight.numel():
            raise ShapeMismatchError(f"weight.shape={tuple(weight.shape)}: expected an even [H]")
        self.weight, self.eps = weight, eps
        self._make_rotation()

    def _make_rotation(self) -> None:
        one = torch.ones(1, self.weight.shape[0], device=self.weight.device)
        self.register_buffer("_cos", one, persistent=False)
        self.register_buffer("_sin", torch.zeros_like(one), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # no checkpoint holds the constants: to_empty() would leave them uninitialised
        self._make_rotation()
        return self

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` [..., H] normalised, same shape and dtype."""
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        # stride 0 along the sequence: one row of constants serves all
        cos, sin = self._cos.expand(rows.shape[1], -1), self._sin.expand(rows.shape[1], -1)
        out = functional.fused_rmsnorm_rope(rows, self.weight, cos, sin, eps=self.eps)
        return out.view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class FusedGatedMLP(HoldsCodes):
    """Both projections of a gated MLP, activation and product, in one kernel.

    Args:
        hidden_dim: size of the last dimension of x.
        intermediate_dim: size of the last dimension of the result.
        activation: "silu", "gelu" or "gelu_tanh".
        activation_on: "up" (``gate(x) * activation(up(x))``) or "gate", the form of HF models.

    Shapes: x [..., hidden_dim] -> [..., intermediate_dim].

    Raises:
        ShapeMismatchError: a size below 1.
        SchemeError: unknown activation or activation_on.
    """

    _codes = ("gate_weight", "up_weight")
    _scales = ("gate_scale", "up_scale")
    gate_scale: torch.Tensor | None
    up_scale: torch.Tensor | None

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim: int,
        activation: str = "silu",
        *,
        activation_on: str = "up",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make both weights [intermediate_dim, hidden_dim], initialised as nn.Linear's."""
        super().__init__()
        check_sizes(1, hidden_dim=hidden_dim, intermediate_dim=intermediate_dim)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("activation_on", activation_on, SIDES)
        self.activation, self.activation_on = activation, activation_on
        shape = (intermediate_dim, hidden_dim)
        self.gate_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.up_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for weight in (self.gate_weight, self.up_weight):
            nn.init.kaiming_uniform_(weight, a=5**0.5)
        self.register_buffer("gate_scale", None)
        self.register_buffer("up_scale", None)

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, up: nn.Linear, activation: str, fp8: bool = False
    ) -> FusedGatedMLP:
        """The HF form of two existing bias-free projections.

        Args:
            gate: gate projection; its weight is shared unless ``fp8``.
            up: up projection, likewise.
            activation: "silu", "gelu" or "gelu_tanh".
            fp8: quantise both weights per output channel.
        """
        with torch.device("meta"):
            made = cls(gate.in_features, gate.out_features, activation, activation_on="gate")
        made.gate_weight = cast(nn.Parameter, gate.weight)
        made.up_weight = cast(nn.Parameter, up.weight)
        if fp8:
            for name, weight in (("gate", gate.weight), ("up", up.weight)):
                codes, scale = functional.quantize_fp8(weight.detach(), strategy="channel")
                setattr(made, f"{name}_weight", nn.Parameter(codes, requires_grad=False))
                setattr(made, f"{name}_scale", scale)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project, activate, multiply; see ``oss_fused.fused_gated_mlp``."""
        return functional.fused_gated_mlp(
            x,
            self.gate_weight,
            self.up_weight,
            self.activation,
            activation_on=self.activation_on,
            gate_scale=self.gate_scale,
            up_scale=self.up_scale,
        )

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        size, hidden = self.gate_weight.shape
        return f"{hidden} -> {size}, {self.activation} on {self.activation_on}"


class FP8Linear(HoldsCodes):
    """A linear layer with FP8 weights, one scale per output channel, and FP8 inputs by default.

    Args:
        in_features: K, size of the last dimension of x.
        out_features: N.
        bias: whether to add one.
        dtype: of the bias, and of the weights that ``from_linear`` quantises.
        quantize_inputs: quantise x per token; False multiplies it as it is (W8A16).
        on_overflow: what happens where an ``input_scale`` is too small for a row of x: "adjust"
            (that row gets the scale that fits), "saturate" or "raise"; see ``quantize_fp8``.

    Shapes: x [..., K] -> [..., N] in x.dtype. The state dict has ``weight`` [N, K] float8_e4m3fn,
    ``weight_scale`` [N, 1] float32, optionally ``input_scale`` [1] and ``bias`` [N]: the names of
    an oss_fp8 checkpoint. Gradients reach x and bias; the weight is constant. Results are the same
    with and without grad. A cast (``half()``, ``to(dtype)``) changes the bias only.

    Raises:
        ShapeMismatchError: a size below 1, or the shape of a scale.
        SchemeError: unknown ``on_overflow``, or an ``input_scale`` of inputs that stay as they are.
        UnsupportedDtypeError: ``dtype``, or x's, the bias's or a scale's dtype.
        NumericalOverflowError: a value of a scale; or x, with ``on_overflow="raise"``.
    """

    _codes = ("weight",)
    _scales = ("weight_scale", "input_scale")
    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    # of a module pickled without it
    quantize_inputs = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quantize_inputs: bool = True,
        on_overflow: str = "adjust",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer initialised as nn.Linear's, then quantised."""
        super().__init__()
        check_sizes(1, in_features=in_features, out_features=out_features)
        start = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(start, quantize_inputs, on_overflow)

    def _take(self, linear: nn.Linear, quantize_inputs: bool, on_overflow: str) -> None:
        check_choice("on_overflow", on_overflow, ON_OVERFLOW)
        self.quantize_inputs, self.on_overflow = quantize_inputs, on_overflow
        weight = linear.weight.detach()
        self.out_features, self.in_features = weight.shape
        codes, scale = functional.quantize_fp8(weight, strategy="channel")
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", None)
        self.bias = linear.bias
        self._unpacked: tuple[torch.Tensor, tuple[int, int], torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the unpacked weight, which a copy makes for itself."""
        return {**super().__getstate__(), "_unpacked": None}

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        input_scale: torch.Tensor | None = None,
        *,
        quantize_inputs: bool = True,
        on_overflow: str = "adjust",
    ) -> FP8Linear:
        """Quantise an existing layer; the bias is shared.

        Args:
            linear: the layer.
            input_scale: static scale [1] of the inputs; None quantises them per token.
            quantize_inputs: as in the class.
            on_overflow: as in the class.
        """
        if input_scale is not None:
            if not quantize_inputs:
                raise SchemeError(
                    "quantize_inputs=False: expected input_scale=None, found a tensor of shape "
                    f"{tuple(input_scale.shape)}"
                )
            check_scale("input_scale", input_scale, 1)
            check_scale_values("input_scale", input_scale)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(linear, quantize_inputs, on_overflow)
        made.input_scale = input_scale
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise, multiply, add the bias."""
        check_scale_values("weight_scale", self.weight_scale)
        check_scale_values("input_scale", self.input_scale)
        if not autograd.needs_grad(x, self.bias):
            return self._product(x)
        with torch.no_grad():
            out = self._product(x)
            wide = _ops.dequantize_fp8(self.weight, self.weight_scale, x.dtype)
        rows = x.reshape(-1, self.in_features)
        flat = autograd.FP8Product.apply(rows, wide.t(), self.bias, out.view(-1, self.out_features))
        return flat.view(out.shape)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._kernel_weight()
        if not self.quantize_inputs:
            return _ops.weight_only_linear(x, weight, self.weight_scale, self.bias)
        if self.input_scale is None or self.on_overflow == "saturate":
            return _ops.fp8_linear(x, weight, self.weight_scale, self.input_scale, self.bias)
        check_arguments("fp8_linear", x, weight, self.weight_scale, self.input_scale, self.bias)
        rows = x.reshape(-1, self.in_features)
        if self.on_overflow == "raise":
            codes, scale = functional.quantize_fp8(
                rows, scale=self.input_scale, on_overflow="raise"
            )
        else:
            least = self.input_scale.reshape(1, 1).expand(rows.shape[0], 1)
            codes, scale = _ops.quantize_fp8_adjusted(rows, least)
        out = _ops.fp8_gemm(codes, weight, scale, self.weight_scale, self.bias, x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def _kernel_weight(self) -> torch.Tensor:
        weight = self.weight
        # a graph would keep the copy that it was compiled with
        if torch.compiler.is_compiling() or weight.device.type != "cpu":
            return weight
        if default_backend(weight.device) not in (REFERENCE, CPU):
            return weight
        # on a CPU unpacking the codes at every call would cost 30 times the product. The codes
        # are kept with what was unpacked: their address alone may be another tensor's by now
        state = (weight.data_ptr(), -1 if weight.is_inference() else weight._version)
        if self._unpacked is None or self._unpacked[0] is not weight or self._unpacked[1] != state:
            self._unpacked = (weight, state, weight.float())
        return self._unpacked[2]

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        inputs = "per token" if self.input_scale is None else "static"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, inputs={inputs if self.quantize_inputs else '16 bits'}"
        )
