# SPDX-License-Identifier: MIT
"""Gate and up projection of some tens of tokens, activation and product in one Gluon launch.

The product of gemm/stream.py: a CTA takes 32 pairs of a gate row and its up row, 64 rows of the
weight in boxes of 32 rows, so that both sums of a pair meet in its accumulator. What it leaves: y,
rounded where the unfused operations round, and the largest magnitude of its pairs.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.gemm.stream import stream_stages
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import magnitude_bits
from oss_fused.kernels.pipeline import barriers_of, copy_box, descriptor, free_previous, next_slot
from oss_fused.kernels.qkv.stream import paired_layout
from oss_fused.kernels.tiles import row_bucket

PAIRS = 32
BLOCK_K = 128
# weight tiles that arrive together
SLABS = 2
# CTAs that share a multiprocessor: one stores its pairs while the other multiplies
_CTAS = 2


@gluon.jit
def _request_weights(desc, first, n, start, k, buffers, slot, SLABS: gl.constexpr):
    """Ask for the gate and up rows of SLABS blocks of K."""
    _tokens, weights, full, _empty = buffers
    ROWS: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    ready = full.index(slot)
    for slab in gl.static_range(SLABS):
        tile = weights.index(slot * SLABS + slab)
        at = start + slab * WIDTH
        copy_box(desc, [first, at], ready, tile.slice(0, ROWS, dim=0), pred=start < k)
        copy_box(desc, [first + n, at], ready, tile.slice(ROWS, ROWS, dim=0), pred=start < k)


@gluon.jit
def _request_tokens(desc, start, k, buffers, slot, SLABS: gl.constexpr):
    tokens, _weights, full, _empty = buffers
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    for slab in gl.static_range(SLABS):
        at = start + slab * WIDTH
        box = tokens.index(slot * SLABS + slab)
        copy_box(desc, [0, at], full.index(slot), box, pred=start < k)


@gluon.jit
def _load(
    a_desc,
    b_desc,
    buffers,
    warm,
    first,
    n,
    k,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    tokens, _weights, full, empty = buffers
    STEP: gl.constexpr = SLABS * b_desc.block_type.shape[1]
    BYTES: gl.constexpr = SLABS * (a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes)
    wait_unless(PREFETCH)
    for slot in gl.static_range(STAGES):
        mbarrier.expect(full.index(slot), BYTES, pred=slot * STEP < k)
        _request_weights(b_desc, first, n, slot * STEP, k, buffers, slot, SLABS)
    # a box outside of the tensor reads no input, and has the descriptor in its cache from here on
    mbarrier.expect(warm, a_desc.block_type.nbytes)
    copy_box(a_desc, [0, (k + 127) // 128 * 128], warm, tokens.index(0))
    mbarrier.wait(warm, 0)
    wait_for_inputs()
    for slot in gl.static_range(STAGES):
        _request_tokens(a_desc, slot * STEP, k, buffers, slot, SLABS)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for start in range(STAGES * STEP, k, STEP):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), BYTES)
        _request_weights(b_desc, first, n, start, k, buffers, slot, SLABS)
        _request_tokens(a_desc, start, k, buffers, slot, SLABS)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _sums(buffers, k, STAGES: gl.constexpr, SLABS: gl.constexpr):
    """[64, tokens] float32: gate rows, then up rows."""
    tokens, weights, full, empty = buffers
    ROWS: gl.constexpr = weights.type.shape[1]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    WIDTH: gl.constexpr = tokens.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32])
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=layout)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for start in range(0, k, SLABS * WIDTH):
        mbarrier.wait(full.index(slot), phase)
        for slab in gl.static_range(SLABS):
            tile = weights.index(slot * SLABS + slab)
            x = tokens.index(slot * SLABS + slab).permute((1, 0))
            acc = warpgroup_mma(tile, x, acc, is_async=True)
        acc = warpgroup_mma_wait(SLABS, deps=[acc])
        free_previous(empty, slot, STAGES, start > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _multiply(
    buffers,
    operands,
    sizes,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    tokens, weights, _full, _empty = buffers
    a_scale, b_scale, y, part_amax = operands
    first, m, n, k = sizes
    PAIRS: gl.constexpr = weights.type.shape[1] // 2
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    dtype: gl.constexpr = y.dtype.element_ty
    paired: gl.constexpr = paired_layout(PAIRS, BLOCK_M, gl.num_warps())
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, paired)))
    pair = first + gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, paired)))
    wait_unless(PREFETCH)
    gate_scale = gl.load(b_scale + pair, mask=pair < n, other=0.0)[:, None]
    up_scale = gl.load(b_scale + n + pair, mask=pair < n, other=0.0)[:, None]
    wait_for_inputs()
    start_next()
    row_scale = gl.load(a_scale + token, mask=token < m, other=0.0)[None, :]
    acc = _sums(buffers, k, STAGES, SLABS)
    acc = acc.reshape([2, PAIRS, BLOCK_M]).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(acc, paired))
    gate = (gate * row_scale * gate_scale).to(dtype).to(gl.float32)
    up = (up * row_scale * up_scale).to(dtype).to(gl.float32)
    value = (activate(gate, ACTIVATION).to(dtype).to(gl.float32) * up).to(dtype)
    inside = (pair < n)[:, None] & (token < m)[None, :]
    gl.store(y + token.to(gl.int64)[None, :] * n + pair[:, None], value, mask=inside)
    amax = gl.max(gl.where(inside, magnitude_bits(value.to(gl.float32)), 0), 0)
    parts = gl.num_programs(0)
    gl.store(part_amax + token * parts + gl.program_id(0), amax, mask=token < m)


@gluon.jit(do_not_specialize=["m"])
def _gate_up_stream_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    y,
    part_amax,
    m,
    n,
    k,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    PAIRS: gl.constexpr = b_desc.block_type.shape[0]
    WIDTH: gl.constexpr = b_desc.block_type.shape[1]
    first = gl.program_id(0) * PAIRS
    tokens = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * SLABS, BLOCK_M, WIDTH], a_desc.layout
    )
    weights = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES * SLABS, 2 * PAIRS, WIDTH], b_desc.layout
    )
    full = barriers_of(STAGES, 1)
    empty = barriers_of(STAGES, 1)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    buffers = (tokens, weights, full, empty)
    operands = (a_scale, b_scale, y, part_amax)
    sizes = (first, m, n, k)
    gl.warp_specialize(
        [
            (_multiply, (buffers, operands, sizes, ACTIVATION, STAGES, SLABS, PREFETCH)),
            (_load, (a_desc, b_desc, buffers, warm, first, n, k, STAGES, SLABS, PREFETCH)),
        ],
        [1],
        [24],
    )


def gate_up_stream(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    activation: str,
    prefetch_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [M, I] and the largest magnitudes [M, parts] of its parts, as float32 bits; M <= 64."""
    m, k = a.shape
    n = b.shape[0] // 2
    block_m = max(8, row_bucket(m))
    y = torch.empty(m, n, dtype=out_dtype, device=a.device)
    part_amax = torch.empty(m, cdiv(n, PAIRS), dtype=torch.int32, device=a.device)
    _gate_up_stream_kernel[(cdiv(n, PAIRS),)](
        descriptor(a, block_m, BLOCK_K),
        descriptor(b, PAIRS, BLOCK_K),
        a_scale,
        b_scale,
        y,
        part_amax,
        m,
        n,
        k,
        ACTIVATION=activation,
        STAGES=stream_stages(k, block_m, 2 * PAIRS, BLOCK_K * SLABS, _CTAS),
        SLABS=SLABS,
        PREFETCH=prefetch_weights,
        num_warps=4,
        maxnreg=65536 // (256 * _CTAS),
        **pdl_options(a.device),
    )
    return y, part_amax
