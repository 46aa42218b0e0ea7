# SPDX-License-Identifier: MIT
"""The product of qkv_rope_kv in Gluon: weights by TMA, a few tokens of FP8 codes.

A CTA asks for its weights first, where the caller allows it before it waits for the kernels ahead.
Then it asks for the codes. As in gemm/stream.py the product is [rows of the weight, K] @
[K, tokens], with the tokens on the narrow side.
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

from oss_fused.kernels.checks import has_aligned_rows
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.pipeline import copy_box

MAX_ROWS = 16
BLOCK_K = 128
# weight tiles that arrive together: every wait costs the whole CTA two barriers
SLABS = 2
# tokens arrive in tiles of so many columns
GROUP_K = 4 * BLOCK_K
# rows of the weight in one box; two are a tile of wgmma
BOX_ROWS = 32
# bytes of shared memory for a CTA's weights and tokens
_SHARED = 220 * 1024
# fewer weight tiles in flight than these stream no faster than the separate kernels
_MIN_STAGES = 4


@gluon.jit
def request_weights(desc, first, second, step, slot, full, tiles, SLABS: gl.constexpr):
    """Ask for SLABS tiles, each of the rows from ``first`` and from ``second``, into ``slot``."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    barrier = full.index(slot)
    mbarrier.expect(barrier, 2 * SLABS * ROWS * WIDTH)
    for slab in gl.static_range(SLABS):
        at = (step * SLABS + slab) * WIDTH
        tile = tiles.index(slot * SLABS + slab)
        copy_box(desc, [first, at], barrier, tile.slice(0, ROWS, dim=0))
        copy_box(desc, [second, at], barrier, tile.slice(ROWS, ROWS, dim=0))


@gluon.jit
def request_tokens(desc, full, tokens, STAGES: gl.constexpr):
    """Ask for all tokens, counted by the barrier behind those of the ring."""
    GROUPS: gl.constexpr = tokens.shape[0]
    mbarrier.expect(full.index(STAGES), GROUPS * tokens.shape[1] * tokens.shape[2])
    for group in gl.static_range(GROUPS):
        at = [0, group * tokens.shape[2]]
        copy_box(desc, at, full.index(STAGES), tokens.index(group))


@gluon.jit
def product(
    desc,
    first,
    second,
    full,
    tokens,
    tiles,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
):
    """[rows of both boxes, tokens] float32."""
    ROWS: gl.constexpr = tiles.shape[1]
    WIDTH: gl.constexpr = tiles.shape[2]
    BLOCK_M: gl.constexpr = tokens.shape[1]
    PER_GROUP: gl.constexpr = tokens.shape[2] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32])
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=layout)
    for step in gl.static_range(STEPS):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) % 2)
        for slab in gl.static_range(SLABS):
            weights = tiles.index(step % STAGES * SLABS + slab)
            x = tokens.index((step * SLABS + slab) // PER_GROUP)
            x = x.slice((step * SLABS + slab) % PER_GROUP * WIDTH, WIDTH, 1)
            acc = warpgroup_mma(weights, x.permute((1, 0)), acc, is_async=True)
        if step >= 1 and step - 1 + STAGES < STEPS:
            # the products of the step before have left its slot
            acc = warpgroup_mma_wait(SLABS, deps=[acc])
            request_weights(
                desc, first, second, step - 1 + STAGES, (step - 1) % STAGES, full, tiles, SLABS
            )
    return warpgroup_mma_wait(0, deps=[acc])


def block_m(rows: int) -> int:
    """Narrow side of the tile."""
    return 8 if rows <= 8 else 16


def steps(k: int) -> int:
    """Waits for weights along K."""
    return cdiv(k, BLOCK_K * SLABS)


def groups(k: int) -> int:
    """Tiles of tokens along K."""
    return cdiv(k, GROUP_K)


def stages(rows: int, k: int) -> int:
    """Weight tiles in flight: all of K, or what shared memory leaves beside the tokens."""
    room = _SHARED - groups(k) * block_m(rows) * GROUP_K
    return min(steps(k), room // (2 * BOX_ROWS * BLOCK_K * SLABS))


def fits(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether the product takes ``x`` [tokens, K] @ ``weight`` [N, K]."""
    rows, k = x.shape
    return (
        runs_gluon(x.device)
        and 0 < rows <= MAX_ROWS
        and weight_scale.numel() == weight.shape[0]
        and stages(rows, k) >= min(_MIN_STAGES, steps(k))
        and has_aligned_rows(x)
        and has_aligned_rows(weight)
    )
