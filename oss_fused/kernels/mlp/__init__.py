# SPDX-License-Identifier: MIT
"""``act_mul_quant``, ``gate_up_quant``, ``mlp_fp8``, ``mlp_norm``, ``gated_mlp`` and its backward.

act_mul_quant: x [..., 2 I] = gate | up; ``q, scale = quantize_fp8(activation(gate) * up)``, per
token, or static where ``scale`` [1] is given; both steps rounded to x.dtype as vLLM rounds.

gate_up_quant: codes x [T, H] and weight [2 I, H], gate rows before up rows, with x_scale [T, 1] or
[1] and weight_scale [2 I, 1] or [1]: ``act_mul_quant`` per token of ``fp8_gemm``'s result in
out_dtype. prefetch_weights as in kernels/gemm.

mlp_fp8: ``fp8_gemm`` of gate_up_quant's codes and down_weight [N, I] with down_scale [N, 1] or [1]
and bias [N] or None; returns [T, N] in out_dtype.

mlp_norm: ``add_rms_norm_quant`` (kernels/norm) of mlp_fp8's result in residual's dtype, residual
[T, N], gain [N], eps, scale and bf16_rows; returns its codes, scale, new residual and levels.

gated_mlp: x [..., H], gate_weight and up_weight [I, H] in x.dtype, or float8_e4m3fn with
gate_scale and up_scale [I, 1] or [1] (x is then quantised per token). activation_on="up" gives
``gate * activation(up)``, "gate" gives ``activation(gate) * up``; float32, rounded once.
Returns [..., I] in x.dtype.

gated_mlp_backward: grad [..., I] of that result and inputs of one dtype -> the gradients [rows, I]
of ``x @ gate_weight.T`` and ``x @ up_weight.T``, which it computes again.

Activations: "silu", "gelu" (erf form), "gelu_tanh".
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import ACTIVATIONS, FLOAT_DTYPES, FP8, check_dtype
from oss_fused.kernels.contract import Epsilon, OneOf, Operand, Rule, Scale
from oss_fused.kernels.levels import BF16_ROWS_RULE, check_bf16_rows
from oss_fused.kernels.mlp import reference
from oss_fused.kernels.op import declare


def _check_halves(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected [..., 2 * intermediate]")


def _check_rows(weight: torch.Tensor) -> None:
    if weight.shape[0] % 2:
        raise ShapeMismatchError(
            f"weight.shape={tuple(weight.shape)}: expected [2 * intermediate, hidden]"
        )


def _gate_up_fake(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape[0], weight.shape[0] // 2)
    return codes, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _mlp_fake(x: torch.Tensor, down_weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape[0], down_weight.shape[0], dtype=out_dtype)


def _norm_fake(
    x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None, bf16_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, columns = residual.shape
    return (
        x.new_empty(tokens, columns),
        x.new_empty((tokens, 1) if scale is None else scale.shape, dtype=torch.float32),
        residual.new_empty(tokens, columns),
        x.new_empty(2 * bf16_rows, columns),
    )


def _check_down(weight: torch.Tensor, down_weight: torch.Tensor) -> None:
    _check_rows(weight)
    if weight.shape[0] != 2 * down_weight.shape[1]:
        raise ShapeMismatchError(
            f"down_weight.shape={tuple(down_weight.shape)}: expected [N, {weight.shape[0] // 2}]"
        )


def _check_norm(
    weight: torch.Tensor, down_weight: torch.Tensor, scale: torch.Tensor | None, bf16_rows: int = 0
) -> None:
    _check_down(weight, down_weight)
    if not down_weight.shape[0]:
        raise ShapeMismatchError(
            f"down_weight.shape={tuple(down_weight.shape)}: expected [N, I], N at least 1"
        )
    check_bf16_rows(bf16_rows, "scale", scale)


def _check_format(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
) -> None:
    if not gate_weight.numel():
        raise ShapeMismatchError(
            f"gate_weight.shape={tuple(gate_weight.shape)}: expected [I, H], I and H at least 1"
        )
    if (gate_scale is None) != (up_scale is None):
        raise SchemeError("gate_scale and up_scale: expected both, or neither")
    check_dtype("gate_weight", gate_weight, (x.dtype,) if gate_scale is None else (FP8,))


declare(
    reference.act_mul_quant,
    {
        "x": Operand("... C", *FLOAT_DTYPES),
        "activation": OneOf(*ACTIVATIONS),
        "scale": Scale(),
    },
    {"triton": "triton", "cuda": "cuda", "cpu": "cpu"},
    check=_check_halves,
    example={"...": (7,), "C": 128, "scale": None},
)
declare(
    reference.gate_up_quant,
    {
        "x": Operand("T H", FP8),
        "weight": Operand("C H", FP8),
        "x_scale": Scale("T"),
        "weight_scale": Scale("C"),
        "out_dtype": OneOf(*FLOAT_DTYPES),
        "activation": OneOf(*ACTIVATIONS),
    },
    {"triton": "gate_up"},
    check=_check_rows,
    fake=_gate_up_fake,
    example={"T": 2, "H": 64, "C": 96},
)
_MLP: dict[str, Rule] = {
    "x": Operand("T H", FP8),
    "weight": Operand("C H", FP8),
    "x_scale": Scale("T"),
    "weight_scale": Scale("C"),
    "down_weight": Operand("N I", FP8),
    "down_scale": Scale("N"),
    "bias": Operand("N", *FLOAT_DTYPES),
    "activation": OneOf(*ACTIVATIONS),
}
_MLP_SIZES = {"T": 2, "H": 64, "C": 96, "I": 48, "N": 64}
declare(
    reference.mlp_fp8,
    {**_MLP, "out_dtype": OneOf(*FLOAT_DTYPES)},
    {"triton": "gate_up"},
    check=_check_down,
    fake=_mlp_fake,
    example=_MLP_SIZES,
)
declare(
    reference.mlp_norm,
    {
        **_MLP,
        "residual": Operand("T N", *FLOAT_DTYPES),
        "gain": Operand("N", *FLOAT_DTYPES),
        "eps": Epsilon(),
        "scale": Scale(),
        "bf16_rows": BF16_ROWS_RULE,
    },
    {"triton": "gate_up"},
    check=_check_norm,
    fake=_norm_fake,
    example={**_MLP_SIZES, "eps": 1e-5, "scale": None},
)
declare(
    reference.gated_mlp,
    {
        "x": Operand("... H", *FLOAT_DTYPES),
        "gate_weight": Operand("I H", FP8, like="x"),
        "up_weight": Operand("I H", like="gate_weight"),
        "gate_scale": Scale("I"),
        "up_scale": Scale("I"),
        "activation": OneOf(*ACTIVATIONS),
        "activation_on": OneOf("up", "gate"),
    },
    {"triton": "gated", "tilelang": "tilelang"},
    check=_check_format,
    example={"...": (2, 5), "H": 64, "I": 48, "gate_scale": None, "up_scale": None},
)
declare(
    reference.gated_mlp_backward,
    {
        "grad": Operand("... I", like="x"),
        "x": Operand("... H", *FLOAT_DTYPES, torch.float64),
        "gate_weight": Operand("I H", like="x"),
        "up_weight": Operand("I H", like="x"),
        "activation": OneOf(*ACTIVATIONS),
        "activation_on": OneOf("up", "gate"),
    },
    {"triton": "gated_backward"},
    example={"...": (2, 5), "H": 64, "I": 48},
)
