# SPDX-License-Identifier: MIT
"""Gated MLP for many rows in Gluon: the warp-specialised pipeline of pipeline.py.

A tile's columns are BLOCK_N of the gate and the same BLOCK_N of the up projection, which meet in
the epilogue of the warps that hold both. FP8 codes with scales, or bfloat16 / float16.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oss_fused.kernels.gemm.portable import tile_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.pipeline import (
    descriptor,
    load_tiles,
    make_ring,
    multiply_tile,
    ring_stages,
    store_tile,
    token_descriptor,
)


@gluon.jit
def _multiply(
    ring,
    scales,
    sizes,
    CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ACTIVATE_GATE: gl.constexpr,
    GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):
    x_scale, gate_scale, up_scale, out = scales
    blocks_m, blocks_n, m, n, k = sizes
    rows, columns, _full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns[0].type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns[0].type.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        sums, slot, phase = multiply_tile(ring, slot, phase, k, PART)
        gate, up = sums
        first_m = (block_m * CONSUMERS + PART) * ROWS
        first_n = block_n * BLOCK_N
        if x_scale is not None:
            layout: gl.constexpr = gate.type.layout
            offs_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            token = gl.load(x_scale + offs_m, mask=offs_m < m, other=0.0)[:, None]
            if CHANNELS:
                gate *= token * gl.load(gate_scale + offs_n, mask=offs_n < n, other=0.0)[None, :]
                up *= token * gl.load(up_scale + offs_n, mask=offs_n < n, other=0.0)[None, :]
            else:
                gate *= token * gl.load(gate_scale)
                up *= token * gl.load(up_scale)
        if ACTIVATE_GATE:
            result = activate(gate, ACTIVATION) * up
        else:
            result = gate * activate(up, ACTIVATION)
        store_tile(result, out, first_m, first_n, m, n)


@gluon.jit(do_not_specialize=["m"])
def _gated_cooperative_kernel(
    x_desc,
    gate_desc,
    up_desc,
    x_scale,
    gate_scale,
    up_scale,
    out,
    m,
    n,
    k,
    CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ACTIVATE_GATE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_N: gl.constexpr = gate_desc.block_type.shape[0]
    weights = (gate_desc, up_desc)
    ring = make_ring(x_desc, weights, STAGES, 2)
    sizes = (gl.cdiv(m, 2 * x_desc.block_type.shape[0]), gl.cdiv(n, BLOCK_N), m, n, k)
    scales = (x_scale, gate_scale, up_scale, out)
    gl.warp_specialize(
        [
            (_multiply, (ring, scales, sizes, CHANNELS, ACTIVATION, ACTIVATE_GATE, GROUP_M, 0)),
            (_multiply, (ring, scales, sizes, CHANNELS, ACTIVATION, ACTIVATE_GATE, GROUP_M, 1)),
            (load_tiles, (x_desc, weights, ring, sizes, BLOCK_N, False, GROUP_M, False)),
        ],
        [4, 1],
        [240, 24],
    )


def gated_cooperative(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    activate_gate: bool,
    channels: bool,
    block_n: int = 128,
    group_m: int = 8,
) -> None:
    """Launch; rows of every operand are multiples of 16 bytes. Scales as in gated_mlp."""
    m, k = x.shape
    n = gate_weight.shape[0]
    block_k = 128 // x.element_size()
    tiles = cdiv(m, 128) * cdiv(n, block_n)
    _gated_cooperative_kernel[(min(tiles, multiprocessors(x.device)),)](
        token_descriptor(x, 64, block_k),
        descriptor(gate_weight, block_n, block_k),
        descriptor(up_weight, block_n, block_k),
        x_scale,
        gate_scale,
        up_scale,
        out,
        m,
        n,
        k,
        CHANNELS=channels,
        ACTIVATION=activation,
        ACTIVATE_GATE=activate_gate,
        STAGES=ring_stages((128 + 2 * block_n) * 128),
        GROUP_M=group_m,
        num_warps=4,
        **pdl_options(x.device),
    )
