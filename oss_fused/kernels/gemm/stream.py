# SPDX-License-Identifier: MIT
"""FP8 GEMM for some tens of rows in Gluon: weights on their way before the inputs are there.

Computes [N, K] @ [K, M] as gemm_swap does. Gluon states which copies are issued when: where
the caller allows it, weights of most stages of a CTA (``pipeline.early_stages``) are requested
before it waits for the kernel before, so that a chain of kernels keeps memory busy across their
ends. Triton's own pipeliner cannot do that.

A tile of the tensor cores has 64 weight rows, so a narrow output leaves multiprocessors idle. With
SLICES of K a CTA takes 64 / SLICES rows: its tile stacks their slices of K, and that of the tokens
lays the same slices side by side. Blocks of the product that pair a slice of weights with another
one of tokens are dropped, the others added (CUTLASS calls this sliced K). With SPLITS of K each CTA
leaves float32 sums of its own part, which the kernel behind adds (split K).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.errors import TritonKernelError
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.gemm.codes import LEAST_ROWS, make_code_tiles, store_codes, sum_parts
from oss_fused.kernels.gemm.scales import scale_column, scale_row
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.pipeline import descriptor, token_descriptor
from oss_fused.kernels.ring import WIDTH, load_ring, make_ring, make_tiles, ring_layout, sum_ring
from oss_fused.kernels.tiles import MOST_QUANTISED, ONE_WAVE

# bytes of shared memory of a multiprocessor, and what a CTA needs beside the weights' buffers
_SHARED_MEMORY = 228 * 1024
_RESERVED = 4 * 1024
# rows of weights in a tile of slices, and most columns of a tile
_TILE_ROWS, _MAX_COLUMNS = 64, 256
# columns up to which all rows of a tile of tokens have codes of the same columns (codes.py)
_COPIED = 4096
# where threads exchange float32 sums
_EXCHANGE = 16 * 1024


@gluon.constexpr_function
def _sums_layout(rows, tokens, slices, warps):
    """Layout of the sums [rows, tokens] of a CTA; both levels of a row are in one thread."""
    if slices == 1 and tokens >= 8:
        return ring_layout(tokens, warps)
    lanes = min(rows, 32)
    # of [slices, rows, tokens]: a thread has all slices of its sums
    each = gl.BlockedLayout([slices, 1, 2], [1, lanes, 32 // lanes], [1, 1, warps], [1, 2, 0])
    return gl.SliceLayout(0, each)


@gluon.jit
def _add_slices(acc, SLICES: gl.constexpr, TOKENS: gl.constexpr):
    """Sums [64 / SLICES, TOKENS] of a tile that stacks slices of K [64, SLICES * columns].

    Every TOKENS of its columns are the sums of a part of K (``sum_parts``).
    """
    ROWS: gl.constexpr = acc.shape[0] // SLICES
    COLUMNS: gl.constexpr = acc.shape[1] // SLICES
    layout: gl.constexpr = acc.type.layout
    of_weights = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)) // ROWS
    of_tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)) // COLUMNS
    acc = gl.where(of_weights[:, None] == of_tokens[None, :], acc, 0.0)
    acc = gl.sum(acc.reshape([SLICES, ROWS, SLICES * COLUMNS // TOKENS, TOKENS]), 2)
    sums: gl.constexpr = _sums_layout(ROWS, TOKENS, SLICES, gl.num_warps())
    return gl.sum(gl.convert_layout(acc, sums.parent), 0)


@gluon.jit
def _store(acc, out, first_m, first_n, m, n, EXCHANGE: gl.constexpr, POLICY: gl.constexpr):
    """Round [rows of b, rows of a] and write what lies inside out [m, n].

    With EXCHANGE a thread gets neighbouring outputs first; else a warp has them already.
    """
    BLOCK_N: gl.constexpr = acc.type.shape[0]
    BLOCK_M: gl.constexpr = acc.type.shape[1]
    result = acc.to(out.dtype.element_ty)
    if EXCHANGE:
        # eight outputs of a token in a thread: 16-byte stores
        result = gl.convert_layout(
            result, gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
        )
    stored: gl.constexpr = result.type.layout
    offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
    offs_m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))
    gl.store(
        out + offs_m.to(gl.int64)[None, :] * n + offs_n[:, None],
        result,
        mask=(offs_m < m)[None, :] & (offs_n < n)[:, None],
        eviction_policy=POLICY,
    )


@gluon.jit
def _multiply(
    operands,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    LEVELS: gl.constexpr,
    SLICES: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTS: gl.constexpr,
    PREFETCH: gl.constexpr,
    POLICY: gl.constexpr,
):
    ring, row, scales, first, sizes = operands
    a_scale, b_scale, bias, out = scales
    first_m, first_n, first_k = first
    m, n, k, columns = sizes
    BLOCK_M: gl.constexpr = ring[0].type.shape[1] // SLICES if row is None else LEVELS
    BLOCK_N: gl.constexpr = ring[1].type.shape[1] // SLICES
    layout: gl.constexpr = _sums_layout(BLOCK_N, BLOCK_M, SLICES, gl.num_warps())
    offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    offs_m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    wait_unless(PREFETCH)
    # everything that the epilogue needs arrives while the weights do
    channel = scale_column(b_scale, offs_n, offs_n < n, B_ROWS)
    if bias is not None:
        # the first split's alone
        here = (offs_n < n) & (first_k == 0)
        shift = gl.load(bias + offs_n, mask=here, other=0.0).to(gl.float32)[:, None]
    wait_for_inputs()
    start_next()
    if row is None:
        token = scale_row(a_scale, offs_m // LEVELS, offs_m < m, A_ROWS)
        acc = sum_ring(ring, k)
    else:
        token = store_codes(row, columns, k, ring[0], LEVELS, SLICES, PARTS)
        acc = sum_parts(ring, k, LEVELS)
    if SLICES > 1 or BLOCK_M < 8:
        acc = _add_slices(acc, SLICES, BLOCK_M)

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
        left, right = gl.split(acc.reshape([BLOCK_N, BLOCK_M // 2, 2]))
        acc = left + right
    rows = m // LEVELS
    if SPLITS > 1:
        out += gl.program_id(2).to(gl.int64) * rows * n
    EXCHANGE: gl.constexpr = SLICES == 1 and SPLITS == 1
    _store(acc, out, first_m // LEVELS, first_n, rows, n, EXCHANGE, POLICY)


@gluon.jit(do_not_specialize=["m"])
def _gemm_stream_kernel(
    a_desc,
    row,
    b_desc,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    columns,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    LEVELS: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    SLICES: gl.constexpr,
    WHOLE: gl.constexpr,
    TILES: gl.constexpr,
    PARTS: gl.constexpr,
    PREFETCH: gl.constexpr,
    POLICY: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """``k``: columns of a slice or split; ``row`` of 16 bits in place of ``a_desc``."""
    first_n = gl.program_id(0) * b_desc.block_type.shape[0]
    if row is None:
        first_m = gl.program_id(1) * a_desc.block_type.shape[0]
        tiles = make_tiles(a_desc, STAGES * SLABS, SLICES)
    else:
        first_m = gl.to_tensor(0)
        tiles = make_code_tiles(TILES, SLICES)
    # a constant where there is one split: a number would take the loading warp's registers
    first_k = gl.program_id(2) * SLICES * k if SPLITS > 1 else gl.to_tensor(0)
    first = (first_m, first_n, first_k)
    ring = make_ring(tiles, b_desc, STAGES, SLABS, SLICES, WHOLE)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    scales = (a_scale, b_scale, bias, out)
    sizes = (m, n, k, columns)
    step = (0, k)
    operands = (ring, row, scales, first, sizes)
    gl.warp_specialize(
        [
            (
                _multiply,
                (operands, A_ROWS, B_ROWS, LEVELS, SLICES, SPLITS, PARTS, PREFETCH, POLICY),
            ),
            (load_ring, (a_desc, b_desc, ring, warm, first, (step, step), k, PREFETCH)),
        ],
        [1],
        [24],
    )


def stream_stages(
    k: int, block_m: int, block_n: int, block_k: int, ctas: int, exchange: int = 0
) -> int:
    """Stages of the ring where ``ctas`` share a multiprocessor.

    ``exchange``: bytes that each needs beside it, where its threads exchange sums.

    The product of a stage ends only after the next one has begun, so K of several steps needs two
    stages: with one, the loading warp and the others would wait for each other for ever.

    Raises:
        TritonKernelError: shared memory does not hold them.
    """
    fitting = (_SHARED_MEMORY // ctas - _RESERVED - exchange) // ((block_m + block_n) * block_k)
    stages = min(fitting, cdiv(k, block_k))
    if stages < min(2, cdiv(k, block_k)):
        raise TritonKernelError(
            f"block_m={block_m}, block_n={block_n}, block_k={block_k}, ctas={ctas}: expected a "
            f"tile of which shared memory holds two stages, it holds {fitting}"
        )
    return stages


def _check_tile(block_m: int, block_n: int, block_k: int, slices: int) -> None:
    if slices not in (1, 2, 4):
        raise TritonKernelError(f"slices={slices}: expected 1, 2 or 4")
    if slices > 1 and block_n != _TILE_ROWS:
        raise TritonKernelError(f"block_n={block_n}: expected {_TILE_ROWS} with slices={slices}")
    if block_k <= 0 or block_k % WIDTH:
        raise TritonKernelError(f"block_k={block_k}: expected a multiple of {WIDTH}")
    if block_m < 8 or block_m * slices > _MAX_COLUMNS or block_m & (block_m - 1):
        raise TritonKernelError(
            f"block_m={block_m}: expected a power of two from 8 to {_MAX_COLUMNS // slices}"
        )


def _check_row(a: torch.Tensor, block_k: int, splits: int) -> None:
    """What a product takes that quantises."""
    if splits > 1:
        raise TritonKernelError(f"splits={splits}: expected 1 without a_scale")
    if a.shape[0] != 1 or a.shape[1] > MOST_QUANTISED or a.element_size() != 2:
        expected = f"one row of 16 bits and at most {MOST_QUANTISED} columns without a_scale"
        raise TritonKernelError(f"a={a.dtype} {list(a.shape)}: expected {expected}")
    if block_k & (block_k - 1):
        raise TritonKernelError(f"block_k={block_k}: expected a power of two without a_scale")


def _sizes(
    k: int,
    tile: tuple[int, int, int, int],
    levels: int,
    slices: int,
    splits: int,
    wide: bool,
    quantises: bool,
) -> tuple[int, dict[str, int]]:
    """Columns of a slice or split of K, and what the kernel is compiled for.

    ``tile``: block_m, block_n, block_k, ctas. ``wide``: threads exchange float32 results.
    ``quantises``: codes of all columns lie in shared memory.
    """
    block_m, block_n, block_k, ctas = tile
    exchange = _EXCHANGE if wide or slices > 1 or quantises else 0
    if wide:
        # stages of half the bytes: two fit beside the exchange also where two programs share
        block_k = min(block_k, WIDTH)
    if quantises and k > _COPIED:
        # codes leave less room to the ring: more stages of fewer bytes
        block_k = min(block_k, 2 * WIDTH)
    # whole steps: a box behind the last column brings zeros
    length = cdiv(cdiv(k, slices * splits), block_k) * block_k if slices * splits > 1 else k
    of_stage, tiles, parts = block_m * slices, 0, 1
    if quantises:
        parts = LEAST_ROWS // levels if k > _COPIED else 1
        tiles = next_power_of_2(cdiv(length, parts * block_k)) * (block_k // WIDTH)
        of_stage, exchange = 0, exchange + tiles * slices * LEAST_ROWS * WIDTH
    stages = stream_stages(length, of_stage, block_n, block_k, ctas, exchange)
    sizes = {"STAGES": stages, "SLABS": block_k // WIDTH, "SLICES": slices}
    sizes |= {"WHOLE": stages * block_k >= length, "TILES": tiles, "PARTS": parts}
    sizes["SPLITS"] = splits
    return length, sizes


def gemm_stream(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 16,
    block_n: int = 64,
    block_k: int = 256,
    ctas: int = 2,
    prefetch_weights: bool = False,
    levels: int = 1,
    slices: int = 1,
) -> None:
    """Launch with room for ``ctas`` in a multiprocessor; K, row strides multiples of 16.

    With two ``levels`` rows 2 i and 2 i + 1 of ``a`` are those of row i of ``out``. A CTA has
    ``slices`` (1, 2 or 4) slices of K of 64 / slices weight rows, or one slice of ``block_n``.
    Without ``a_scale``, ``a`` is one row of 16 bits, which each CTA quantises. A float32 ``out``
    [splits, M, N] gets the sums of as many parts of K, the first with the bias.

    Raises:
        TritonKernelError: shared memory does not hold the tile, a size does not fit ``slices``, or
            a CTA cannot quantise ``a``.
    """
    _check_tile(block_m, block_n, block_k, slices)
    splits = out.shape[0] if out.dim() == 3 else 1
    if a_scale is None:
        _check_row(a, block_k, splits)
    k = a.shape[1]
    m, n = out.shape[-2:]
    rows, tile = block_n // slices, (block_m, block_n, block_k, ctas)
    wide = out.element_size() > 2 and splits == 1
    length, sizes = _sizes(k, tile, levels, slices, splits, wide, a_scale is None)
    _gemm_stream_kernel[(cdiv(n, rows), cdiv(levels * m, block_m), splits)](
        None if a_scale is None else token_descriptor(a, block_m, WIDTH),
        a if a_scale is None else None,
        descriptor(b, rows, WIDTH),
        a_scale,
        b_scale,
        bias,
        out,
        levels * m,
        n,
        length,
        k,
        A_ROWS=a_scale is not None and a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        LEVELS=levels,
        PREFETCH=prefetch_weights,
        # logits of a vocabulary are not little
        POLICY=activation_policy(m) if n <= ONE_WAVE else "",
        **sizes,
        num_warps=4,
        maxnreg=65536 // (256 * ctas) // 8 * 8 if ctas > 1 else 168,
        **pdl_options(a.device),
    )
