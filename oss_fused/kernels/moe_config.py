# SPDX-License-Identifier: MIT
"""Which tiles the expert kernels take: deterministic rules, measured on an H200.

No rule looks at anything but shapes, so that the kernels a server needs can be compiled before it
serves (``warmup_batches``) and a CUDA graph always runs the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

# one-hot elements [pairs, experts] that one routing program ranks in one piece
_ONE_HOT = 8192


@dataclass(frozen=True)
class Tile:
    """Tile of one product: 64-row weight groups, chunks a step, stages, w2's shares of K, and the
    warpgroups (four warps each) among which the groups are divided."""

    groups: int
    depth: int
    stages: int
    shares: int = 1
    warpgroups: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """Tokens of a tile, how the two products run, whether sums are promoted to float32, and
    whether the kernels for many tokens run where there are such.
    """

    rows: int
    gate_up: Tile
    down: Tile
    promote: bool
    large: bool = False


def choose_config(pairs: int, experts: int, fp8: bool, gluon: bool = False) -> MoEConfig:
    """Tiles for a batch, from the mean number of pairs an expert gets.

    Args:
        pairs: T * top_k.
        experts: of this rank.
        fp8: FP8 activations, one level instead of two.
        gluon: the device runs the kernels for many tokens.
    """
    mean = pairs / experts
    narrow, wide = Tile(1, 1, 3), Tile(2, 1, 3)
    if fp8:
        if mean <= 48:
            return MoEConfig(32, wide, wide, False)
        return MoEConfig(128, narrow, narrow, False)
    if mean <= 4:
        # few programs in all: long steps for w13, shares of K for w2
        if pairs <= 4:
            return MoEConfig(8, Tile(1, 4, 3), Tile(1, 2, 3, shares=4), True)
        return MoEConfig(8, Tile(1, 2, 3), Tile(1, 1, 4, shares=4 if pairs <= 16 else 1), True)
    if mean <= 12:
        return MoEConfig(16, Tile(2, 1, 4), Tile(1, 1, 4), True)
    if mean <= 48:
        return MoEConfig(32, wide, Tile(1, 1, 4) if mean <= 24 else wide, False)
    return MoEConfig(128, narrow, narrow, False)


def routing_block(tokens: int, global_experts: int, top_k: int) -> tuple[int, bool]:
    """Tokens a routing program takes (a power of two), and whether one program does it all."""
    width = max(16, _power_of_two(global_experts)) * _power_of_two(top_k)
    limit = max(1, _ONE_HOT // width)
    if tokens <= limit:
        return _power_of_two(tokens), True
    return min(32, limit), False


def warmup_batches(
    max_tokens: int, experts: int, global_experts: int, top_k: int, fp8_min_tokens: int = -1
) -> list[int]:
    """Batch sizes that between them use every kernel variant up to ``max_tokens``.

    Args:
        max_tokens: the largest batch that will be served.
        experts: of this rank.
        global_experts: of the model.
        top_k: experts a token.
        fp8_min_tokens: as moe_mxfp4 takes it.

    Returns:
        Sizes in ascending order; run the layer once with each before serving.
    """
    batches, seen = [], set()
    for tokens in range(1, max_tokens + 1):
        fp8 = 0 <= fp8_min_tokens <= tokens
        key = (
            choose_config(tokens * top_k, experts, fp8),
            routing_block(tokens, global_experts, top_k),
            fp8,
        )
        if key not in seen:
            seen.add(key)
            batches.append(tokens)
    return batches


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
