# SPDX-License-Identifier: MIT
"""Gated MLP in one kernel: gate(x) * act(up(x)), or act(gate(x)) * up(x).

x [T, H], gate and up weights [I, H]; both products of a tile share the tile of x and meet in the
epilogue, so neither projection is written. bf16/fp16 operands, or FP8 codes with scales per token
and per output channel; float32 accumulation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import as_rows, has_aligned_rows
from oss_fused.kernels.gemm.portable import tile_of
from oss_fused.kernels.gemm.scales import scale_row
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import INTERPRETED, dot_fp8, round_to
from oss_fused.kernels.quantize.triton import quantize_fp8
from oss_fused.kernels.tma import row_descriptor

# up to so many, the weights' bytes decide, and a tile of 128 rows would be mostly padding
_FEW_ROWS = 64


class _Scales(NamedTuple):
    """Dequantisation multipliers of tokens [T, 1] and channels [I, 1]; None of 16-bit operands."""

    x: Any
    gate: Any
    up: Any


@triton.jit
def _dot(x, w, acc):
    if x.dtype == tl.float8e4nv:
        return dot_fp8(x, w.T, acc)
    elif INTERPRETED:
        # the interpreter multiplies bfloat16 bit patterns
        return tl.dot(x.to(tl.float32), w.T.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def _load_rows(pointer, rows, end, k, start, BLOCK_K: tl.constexpr):
    """Columns ``start`` and on of some rows of a contiguous [end, k]; zero where there is none."""
    columns = start + tl.arange(0, BLOCK_K)
    pointers = pointer + rows.to(tl.int64)[:, None] * k + columns[None, :]
    return tl.load(pointers, mask=(rows < end)[:, None] & (columns < k)[None, :], other=0.0)


@triton.jit
def _scale(gate, up, scales, offs_m, offs_n, m, n, CHANNELS: tl.constexpr):
    """Both products times the scales of their operands."""
    token = tl.load(scales.x + offs_m, mask=offs_m < m, other=0.0)[:, None]
    gate *= token * scale_row(scales.gate, offs_n, offs_n < n, CHANNELS)
    up *= token * scale_row(scales.up, offs_n, offs_n < n, CHANNELS)
    return gate, up


@triton.jit(do_not_specialize=["m"])
def _gated_mlp_kernel(
    x_source,
    gate_source,
    up_source,
    scales,
    out,
    m,
    n,
    k,
    CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACTIVATE_GATE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    block_m, block_n = tile_of(tl.program_id(0), blocks_m, blocks_n, GROUP_M)
    first_m, first_n = block_m * BLOCK_M, block_n * BLOCK_N
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        if TMA:
            x = x_source.load([first_m, start])
            gate = _dot(x, gate_source.load([first_n, start]), gate)
            up = _dot(x, up_source.load([first_n, start]), up)
        else:
            x = _load_rows(x_source, offs_m, m, k, start, BLOCK_K)
            gate = _dot(x, _load_rows(gate_source, offs_n, n, k, start, BLOCK_K), gate)
            up = _dot(x, _load_rows(up_source, offs_n, n, k, start, BLOCK_K), up)
    if scales.x is not None:
        gate, up = _scale(gate, up, scales, offs_m, offs_n, m, n, CHANNELS)
    if ACTIVATE_GATE:
        result = activate(gate, ACTIVATION) * up
    else:
        result = gate * activate(up, ACTIVATION)
    tl.store(
        out + offs_m.to(tl.int64)[:, None] * n + offs_n[None, :],
        round_to(result, out.dtype.element_ty),
        mask=(offs_m < m)[:, None] & (offs_n < n)[None, :],
    )


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Both projections, activation and product; see kernels/mlp for the contract.

    ``config`` is the tuner's: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages.
    """
    n = gate_weight.shape[0]
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x).contiguous()
    scales, channels = _Scales(None, None, None), False
    if gate_scale is not None and up_scale is not None:
        channels = gate_scale.numel() != 1 or up_scale.numel() != 1
        rows, x_scale = quantize_fp8(rows, None, "token")
        gate_scale, up_scale = (s.reshape(-1, 1).expand(n, 1) for s in (gate_scale, up_scale))
        scales = _Scales(x_scale, gate_scale, up_scale)
        if channels:
            scales = _Scales(x_scale, gate_scale.contiguous(), up_scale.contiguous())
    gate_weight, up_weight = gate_weight.contiguous(), up_weight.contiguous()
    tma = all(has_aligned_rows(t) for t in (rows, gate_weight, up_weight))
    on_gate = activation_on == "gate"
    if config is None and tma and rows.shape[0] > _FEW_ROWS and runs_gluon(x.device):
        from oss_fused.kernels.mlp.gated_cooperative import gated_cooperative

        operands = (rows, gate_weight, up_weight, scales.x, scales.gate, scales.up)
        gated_cooperative(*operands, out, activation, on_gate, channels)
        return out
    config = config or _config(rows, n)
    blocks = {"CHANNELS": channels, "TMA": tma, "GROUP_M": 8, **config}
    sources = (rows, gate_weight, up_weight)
    _launch(sources, scales, out, ACTIVATION=activation, ACTIVATE_GATE=on_gate, **blocks)
    return out


def _launch(
    sources: tuple[torch.Tensor, ...], scales: _Scales, out: torch.Tensor, **options: Any
) -> None:
    """Launch into ``out`` for contiguous x [M, K] and weights [N, K]."""
    x, gate, up = sources
    (m, k), n = x.shape, gate.shape[0]
    block_m, block_n, block_k = (options[f"BLOCK_{axis}"] for axis in "MNK")
    if options["TMA"]:
        x = row_descriptor(x, block_m, block_k)
        gate, up = (row_descriptor(weight, block_n, block_k) for weight in (gate, up))
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    _gated_mlp_kernel[grid](x, gate, up, scales, out, m, n, k, **options)


def _config(rows: torch.Tensor, n: int) -> dict[str, int]:
    """Tile sizes for ``rows`` [T, H]: BLOCK_K is 128 bytes of an operand's row."""
    m, k = rows.shape
    key = f"{tiles.row_bucket(m)}x{n}x{k}"
    known = tiles.lookup(rows.device, "gated_mlp", key) if rows.element_size() == 1 else None
    if known is not None:
        return known
    block_k = 128 // rows.element_size()
    if m <= _FEW_ROWS:
        block_m = max(16, next_power_of_2(m))
        return {
            "BLOCK_M": block_m,
            "BLOCK_N": 64,
            "BLOCK_K": block_k,
            "num_warps": 4,
            "num_stages": 5,
        }
    return {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": block_k,
        "num_warps": 8,
        "num_stages": 3,
    }
