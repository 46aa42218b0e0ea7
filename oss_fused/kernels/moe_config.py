# SPDX-License-Identifier: MIT
"""Which tiles the expert kernels take: deterministic rules, measured on an H200.

No rule looks at anything but shapes, so that the kernels a server needs can be compiled before it
serves (powers of two up to its largest batch meet them all) and a CUDA graph always runs the same
ones.
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
    single, wide = Tile(1, 1, 4), Tile(2, 1, 4)
    if gluon and mean > (160 if fp8 else 96):
        return MoEConfig(256 if fp8 and mean >= 384 else 128, wide, wide, False, large=True)
    if fp8:
        if mean <= 24:
            return MoEConfig(32, wide, single, False)
        return MoEConfig(64, wide, wide, False)
    if mean <= 4:
        # few programs in all: long steps for w13, shares of K for w2, one step each if that is
        # enough for K (then its weights are on their way before the kernel waits for w13)
        if pairs <= 8:
            gate_up = Tile(1, 4, 3) if pairs <= 4 else Tile(1, 2, 4)
            return MoEConfig(8, gate_up, Tile(1, 4, 3, shares=6), True)
        return MoEConfig(8, Tile(1, 2, 4), Tile(1, 1, 4, shares=4 if pairs <= 16 else 1), True)
    if mean <= 24:
        return MoEConfig(16, wide, single, promote=mean <= 12)
    return MoEConfig(32, wide, wide, False)


def routing_block(tokens: int, global_experts: int, top_k: int) -> tuple[int, bool]:
    """Tokens a routing program takes (a power of two), and whether one program does it all."""
    width = max(16, _power_of_two(global_experts)) * _power_of_two(top_k)
    limit = max(1, _ONE_HOT // width)
    if tokens <= limit:
        return _power_of_two(tokens), True
    return min(32, limit), False


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
