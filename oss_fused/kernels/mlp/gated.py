# SPDX-License-Identifier: MIT
"""Gated MLP in one kernel: gate(x) * act(up(x)), or act(gate(x)) * up(x).

x [T, H], gate and up weights [I, H]; both products of a tile share the tile of x and meet in the
epilogue, so neither projection is written. bf16/fp16 operands, or FP8 codes with scales per token
and per output channel; float32 accumulation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import INTERPRETED, dot_fp8, round_to
from oss_fused.kernels.quantize.triton import quantize_fp8
from oss_fused.kernels.tma import row_descriptor

# up to so many, the weights' bytes decide, and a tile of 128 rows would be mostly padding
_FEW_ROWS = 64


@triton.jit
def _dot(x, w, acc):
    if x.dtype == tl.float8e4nv:
        return dot_fp8(x, w.T, acc)
    elif INTERPRETED:
        # the interpreter multiplies bfloat16 bit patterns
        return tl.dot(x.to(tl.float32), w.T.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["m"])
def _gated_mlp_kernel(
    x_source,
    gate_source,
    up_source,
    x_scale,
    gate_scale,
    up_scale,
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
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    inside = pid % (GROUP_M * blocks_n)
    size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    first_m = (group * GROUP_M + inside % size) * BLOCK_M
    first_n = (inside // size) * BLOCK_N
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    in_m = offs_m < m
    in_n = offs_n < n
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TMA:
        for start in range(0, k, BLOCK_K):
            x = x_source.load([first_m, start])
            gate = _dot(x, gate_source.load([first_n, start]), gate)
            up = _dot(x, up_source.load([first_n, start]), up)
    else:
        offs_k = tl.arange(0, BLOCK_K)
        rows_x = x_source + offs_m.to(tl.int64)[:, None] * k + offs_k[None, :]
        rows_w = offs_n.to(tl.int64)[:, None] * k + offs_k[None, :]
        for start in range(0, k, BLOCK_K):
            in_k = (offs_k < k - start)[None, :]
            x = tl.load(rows_x + start, mask=in_m[:, None] & in_k, other=0.0)
            in_w = in_n[:, None] & in_k
            gate = _dot(x, tl.load(gate_source + rows_w + start, mask=in_w, other=0.0), gate)
            up = _dot(x, tl.load(up_source + rows_w + start, mask=in_w, other=0.0), up)

    if x_scale is not None:
        token = tl.load(x_scale + offs_m, mask=in_m, other=0.0)[:, None]
        if CHANNELS:
            gate *= token * tl.load(gate_scale + offs_n, mask=in_n, other=0.0)[None, :]
            up *= token * tl.load(up_scale + offs_n, mask=in_n, other=0.0)[None, :]
        else:
            gate *= token * tl.load(gate_scale)
            up *= token * tl.load(up_scale)
    if ACTIVATE_GATE:
        result = activate(gate, ACTIVATION) * up
    else:
        result = gate * activate(up, ACTIVATION)
    tl.store(
        out + offs_m.to(tl.int64)[:, None] * n + offs_n[None, :],
        round_to(result, out.dtype.element_ty),
        mask=in_m[:, None] & in_n[None, :],
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
    n, k = gate_weight.shape
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x).contiguous()
    x_scale, channels = None, False
    if gate_scale is not None and up_scale is not None:
        rows, x_scale = quantize_fp8(rows, None, "token")
        channels = gate_scale.numel() != 1 or up_scale.numel() != 1
        gate_scale, up_scale = gate_scale.expand(n, 1), up_scale.expand(n, 1)
        if channels:
            gate_scale, up_scale = gate_scale.contiguous(), up_scale.contiguous()
    weights = [gate_weight.contiguous(), up_weight.contiguous()]
    m = rows.shape[0]
    tma = (k * rows.element_size()) % 16 == 0 and all(
        t.data_ptr() % 16 == 0 for t in (rows, *weights)
    )
    if config is None and tma and m > _FEW_ROWS and runs_gluon(x.device):
        from oss_fused.kernels.mlp.gated_cooperative import gated_cooperative

        on_gate = activation_on == "gate"
        gated_cooperative(
            rows,
            weights[0],
            weights[1],
            x_scale,
            gate_scale,
            up_scale,
            out,
            activation,
            on_gate,
            channels,
        )
        return out
    config = config or _config(rows, n)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    sources = [rows, *weights]
    if tma:
        blocks = (block_m, block_n, block_n)
        sources = [row_descriptor(t, b, block_k) for t, b in zip(sources, blocks, strict=True)]
    _gated_mlp_kernel[(cdiv(m, block_m) * cdiv(n, block_n),)](
        *sources,
        x_scale,
        gate_scale,
        up_scale,
        out,
        m,
        n,
        k,
        CHANNELS=channels,
        ACTIVATION=activation,
        ACTIVATE_GATE=activation_on == "gate",
        TMA=tma,
        GROUP_M=8,
        **config,
    )
    return out


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
