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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.gemm.stream import stream_stages
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import KEPT, pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import magnitude_bits
from oss_fused.kernels.pipeline import descriptor, token_descriptor
from oss_fused.kernels.qkv.stream import paired_layout
from oss_fused.kernels.ring import WIDTH, load_ring, make_ring, make_tiles, sum_ring
from oss_fused.kernels.tiles import row_bucket

PAIRS = 32
# weight tiles that arrive together
SLABS = 2
# CTAs that share a multiprocessor: one stores its pairs while the other multiplies
_CTAS = 2


@gluon.jit
def _multiply(ring, operands, sizes, ACTIVATION: gl.constexpr, PREFETCH: gl.constexpr):
    tokens, weights, _full, _empty = ring
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
    acc = sum_ring(ring, k)
    acc = acc.reshape([2, PAIRS, BLOCK_M]).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(acc, paired))
    gate = (gate * row_scale * gate_scale).to(dtype).to(gl.float32)
    up = (up * row_scale * up_scale).to(dtype).to(gl.float32)
    value = (activate(gate, ACTIVATION).to(dtype).to(gl.float32) * up).to(dtype)
    inside = (pair < n)[:, None] & (token < m)[None, :]
    place = y + token.to(gl.int64)[None, :] * n + pair[:, None]
    gl.store(place, value, mask=inside, eviction_policy=KEPT)
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
    first = gl.program_id(0) * b_desc.block_type.shape[0]
    # gate rows and up rows
    ring = make_ring(make_tiles(a_desc, STAGES * SLABS, 1), b_desc, STAGES, SLABS, 2)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    operands = (a_scale, b_scale, y, part_amax)
    steps = ((0, 0), (n, 0))
    gl.warp_specialize(
        [
            (_multiply, (ring, operands, (first, m, n, k), ACTIVATION, PREFETCH)),
            (load_ring, (a_desc, b_desc, ring, warm, (0, first, 0), steps, k, PREFETCH)),
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
        token_descriptor(a, block_m, WIDTH),
        descriptor(b, PAIRS, WIDTH),
        a_scale,
        b_scale,
        y,
        part_amax,
        m,
        n,
        k,
        ACTIVATION=activation,
        STAGES=stream_stages(k, block_m, 2 * PAIRS, WIDTH * SLABS, _CTAS),
        SLABS=SLABS,
        PREFETCH=prefetch_weights,
        num_warps=4,
        maxnreg=65536 // (256 * _CTAS),
        **pdl_options(a.device),
    )
    return y, part_amax
