# SPDX-License-Identifier: MIT
"""FP8 GEMM for some tens of rows in Gluon: weights on their way before the inputs are there.

Computes [N, K] @ [K, M] as gemm_swap does. Gluon states which copies are issued when: the
first STAGES weight tiles of a CTA are requested before it waits for the kernel before, where the
caller allows it, so that a chain of kernels keeps memory busy across their ends. Triton's own
pipeliner cannot do that.
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

from oss_fused.errors import TritonKernelError
from oss_fused.kernels.gemm.scales import scale_column, scale_row
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.pipeline import barriers_of, copy_box, descriptor, free_previous, next_slot

# bytes of shared memory of a multiprocessor, and what a CTA needs beside the weights' buffers
_SHARED_MEMORY = 228 * 1024
_RESERVED = 4 * 1024
# and for the exchange of a float32 result's layout
_EXCHANGE = 16 * 1024


@gluon.jit
def _load(a_desc, b_desc, buffers, warm, first_m, first_n, k, PREFETCH: gl.constexpr):
    tokens, weights, full, empty = buffers
    STAGES: gl.constexpr = weights.type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    BYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    wait_unless(PREFETCH)
    for slot in gl.static_range(STAGES):
        start = slot * BLOCK_K
        ready = full.index(slot)
        mbarrier.expect(ready, BYTES, pred=start < k)
        copy_box(b_desc, [first_n, start], ready, weights.index(slot), pred=start < k)
    # a box outside of the tensor reads no input, and has the descriptor in its cache from here on
    mbarrier.expect(warm, a_desc.block_type.nbytes)
    copy_box(a_desc, [first_m, (k + 127) // 128 * 128], warm, tokens.index(0))
    mbarrier.wait(warm, 0)
    wait_for_inputs()
    for slot in gl.static_range(STAGES):
        start = slot * BLOCK_K
        ready = full.index(slot)
        copy_box(a_desc, [first_m, start], ready, tokens.index(slot), pred=start < k)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for start in range(STAGES * BLOCK_K, k, BLOCK_K):
        mbarrier.wait(empty.index(slot), phase)
        ready = full.index(slot)
        mbarrier.expect(ready, BYTES)
        copy_box(b_desc, [first_n, start], ready, weights.index(slot))
        copy_box(a_desc, [first_m, start], ready, tokens.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _store(acc, out, first_m, first_n, m, n):
    """Round [rows of b, rows of a] and write what lies inside out [m, n]."""
    BLOCK_N: gl.constexpr = acc.type.shape[0]
    BLOCK_M: gl.constexpr = acc.type.shape[1]
    # eight outputs of a token in a thread: 16-byte stores
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    result = gl.convert_layout(acc.to(out.dtype.element_ty), stored)
    offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
    offs_m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))
    gl.store(
        out + offs_m.to(gl.int64)[None, :] * n + offs_n[:, None],
        result,
        mask=(offs_m < m)[None, :] & (offs_n < n)[:, None],
    )


@gluon.jit
def _multiply(
    buffers,
    scales,
    first_m,
    first_n,
    m,
    n,
    k,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    LEVELS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    tokens, weights, full, empty = buffers
    a_scale, b_scale, bias, out = scales
    STAGES: gl.constexpr = weights.type.shape[0]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    BLOCK_N: gl.constexpr = weights.type.shape[1]
    BLOCK_K: gl.constexpr = weights.type.shape[2]
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32]
    )
    offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, product))
    offs_m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, product))
    wait_unless(PREFETCH)
    # everything that the epilogue needs arrives while the weights do
    channel = scale_column(b_scale, offs_n, offs_n < n, B_ROWS)
    if bias is not None:
        shift = gl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(gl.float32)[:, None]
    wait_for_inputs()
    start_next()
    token = scale_row(a_scale, offs_m // LEVELS, offs_m < m, A_ROWS)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=product)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for start in range(0, k, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        x = tokens.index(slot).permute((1, 0))
        acc = warpgroup_mma(weights.index(slot), x, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_previous(empty, slot, STAGES, start > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])

    if LEVELS == 2:
        # both levels of a row are neighbouring columns, in one thread
        is_first = (offs_m % 2 == 0)[None, :]
        token *= gl.where(is_first, 1.0, 0.0625)
        if bias is not None:
            shift = gl.where(is_first, shift, 0.0)
    acc *= token
    acc *= channel
    if bias is not None:
        acc += shift
    if LEVELS == 2:
        first, second = gl.split(acc.reshape([BLOCK_N, BLOCK_M // 2, 2]))
        acc = first + second
    _store(acc, out, first_m // LEVELS, first_n, m // LEVELS, n)


@gluon.jit(do_not_specialize=["m"])
def _gemm_stream_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    LEVELS: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    first_n = gl.program_id(0) * BLOCK_N
    first_m = gl.program_id(1) * BLOCK_M
    tokens = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    weights = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    full = barriers_of(STAGES, 1)
    empty = barriers_of(STAGES, 1)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    buffers = (tokens, weights, full, empty)
    scales = (a_scale, b_scale, bias, out)
    gl.warp_specialize(
        [
            (
                _multiply,
                (buffers, scales, first_m, first_n, m, n, k, A_ROWS, B_ROWS, LEVELS, PREFETCH),
            ),
            (_load, (a_desc, b_desc, buffers, warm, first_m, first_n, k, PREFETCH)),
        ],
        [1],
        [24],
    )


def stream_stages(
    k: int, block_m: int, block_n: int, block_k: int, ctas: int, wide: bool = False
) -> int:
    """Stages of the ring where ``ctas`` share a multiprocessor; ``wide``: of a float32 result.

    The product of a stage ends only after the next one has begun, so K of several steps needs two
    stages: with one, the loading warp and the others would wait for each other for ever.

    Raises:
        TritonKernelError: shared memory does not hold them.
    """
    other = _RESERVED + (_EXCHANGE if wide else 0)
    fitting = (_SHARED_MEMORY // ctas - other) // ((block_m + block_n) * block_k)
    stages = min(fitting, cdiv(k, block_k))
    if stages < min(2, cdiv(k, block_k)):
        raise TritonKernelError(
            f"block_m={block_m}, block_n={block_n}, block_k={block_k}, ctas={ctas}: expected a "
            f"tile of which shared memory holds two stages, it holds {fitting}"
        )
    return stages


def gemm_stream(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 16,
    block_n: int = 64,
    block_k: int = 256,
    ctas: int = 2,
    prefetch_weights: bool = False,
    levels: int = 1,
) -> None:
    """Launch with room for ``ctas`` in a multiprocessor; K, row strides multiples of 16.

    With two ``levels`` rows 2 i and 2 i + 1 of ``a`` are those of row i of ``out``.
    """
    m, k = a.shape
    n = b.shape[0]
    wide = out.element_size() > 2
    if wide:
        # stages of half the bytes: two fit beside the exchange also where two programs share
        block_k = min(block_k, 128)
    _gemm_stream_kernel[(cdiv(n, block_n), cdiv(m, block_m))](
        descriptor(a, block_m, block_k),
        descriptor(b, block_n, block_k),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        LEVELS=levels,
        STAGES=stream_stages(k, block_m, block_n, block_k, ctas, wide),
        PREFETCH=prefetch_weights,
        num_warps=4,
        maxnreg=65536 // (256 * ctas) // 8 * 8 if ctas > 1 else 168,
        **pdl_options(a.device),
    )
