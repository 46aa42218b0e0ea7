# SPDX-License-Identifier: MIT
"""Which tiles the expert kernels take: deterministic rules, measured on an H200.

No rule looks at anything but shapes, so that the kernels a server needs can be compiled before it
serves (the ``_variant`` functions tell which batches differ) and a CUDA graph always runs the same
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2

# tokens up to which norm and router product are one launch, and logits, since every token reads
# all of the router's weights there; tokens up to which a program takes four experts, or one where
# it also finds expected logits (measured on an H200)
_NORM_AND_ROUTER, _LOGITS, _FOUR_EXPERTS = 128, 4096, 16
# tokens up to which moe/few.py has w13 and w2 (measured on an H200: w13 of three and four tokens
# takes as long as in gemm.py)
_FEW_GATE_UP, _FEW_DOWN = 2, 4
# experts of which each w13 program there touches the weights: more were not measured
_TOUCHED = 64
# pairs, and so tokens, up to which w2 runs in shares of K: several programs then add up a token
SHARED_ROWS = 16
# int32 entries that a block's kernels use as scratch: arrivals, and one token's expected logits
SCRATCH = SHARED_ROWS + _TOUCHED
# elements [experts, tokens] that one routing program ranks in one piece, also where the launch
# encodes x; there twice as many for up to 128 tokens (measured on an H200)
_ELEMENTS, _CODED_ELEMENTS = 2048, 4096
# tokens up to which one launch places the pairs and encodes x (every token reads all ids there),
# and a routing program of several takes 16 tokens
_PLACED_WITH_CODES = 768
# multiprocessors of an H200, whose waves of programs the tiles for few pairs fill, and what a wave
# has beyond the mean, since the experts that are chosen vary
_MULTIPROCESSORS, _MARGIN = 132, 1.02
# columns from which on w2's programs are long enough for that (measured at 2880; not so at 1440)
_LONG = 2048
# tokens up to which a program of w13 asks L2 for the weights of one of the next wave: at 16 a layer
# is 0.4 us faster, at 32 as much slower (measured on an H200)
_NEXT_WAVE = 16
# w13's programs in all, above which a fifth stage costs more than it saves (measured on an H200)
_FIVE_STAGES = 5000


class ExpertShape(NamedTuple):
    """Experts that a token is sent to, experts of this rank and of all, H, and I of this rank."""

    top_k: int
    experts: int
    global_experts: int
    hidden: int
    inter: int


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
    whether the kernels for many tokens, for tens of tokens an expert, or for few tokens run;
    of many tokens, whether an expert has few tiles; of tens of tokens, whether tiles of few tokens
    take fewer columns; of few tokens, the distance in programs to the one for which a program of
    w13 asks L2 for weights (0: none does).
    """

    rows: int
    gate_up: Tile
    down: Tile
    promote: bool
    large: bool = False
    stream: bool = False
    few: bool = False
    few_tiles: bool = False
    narrow: bool = False
    next_wave: int = 0

    @property
    def sorted_codes(self) -> bool:
        """Whether the codes of x lie in the order of the pairs, not of the tokens."""
        return self.large or self.stream


def choose_config(tokens: int, shape: ExpertShape, fp8: bool, gluon: bool = False) -> MoEConfig:
    """Tiles for a batch, from the mean number of pairs an expert gets.

    Args:
        tokens: T.
        shape: of the layer.
        fp8: FP8 activations, one level instead of two.
        gluon: the device runs the kernels for many tokens, and for tens of tokens.
    """
    pairs = tokens * shape.top_k
    mean = pairs / shape.experts
    single, wide = Tile(1, 1, 4), Tile(2, 1, 4)
    if gluon and mean > (160 if fp8 else 96):
        rows = 256 if fp8 and mean >= 384 else 128
        return MoEConfig(rows, wide, wide, False, large=True, few_tiles=mean < 4 * rows)
    if gluon and not fp8 and mean > 12:
        rows, narrow = 32 if mean <= 24 else 64, 24 < mean <= 40
        return MoEConfig(rows, wide, wide, False, stream=True, narrow=narrow)
    if gluon and mean >= 48:
        return MoEConfig(128, wide, wide, False, stream=True, narrow=True)
    if fp8:
        if mean <= 24:
            return MoEConfig(32, wide, single, False)
        return MoEConfig(64, wide, wide, False)
    if mean <= 4:
        # few programs in all: long steps for w13, shares of K for w2, one step each if that is
        # enough for K (then its weights are on their way before the kernel waits for w13)
        gate_up = _gate_up_tile(tokens, shape)
        wave = _fitting(gate_up.stages) if tokens <= _NEXT_WAVE else 0
        if pairs <= 8:
            down = Tile(1, 4, 3, shares=_shares(6, 4, shape.inter))
            return MoEConfig(8, gate_up, down, True, few=gluon)
        if pairs <= SHARED_ROWS:
            down = Tile(1, 1, 4, shares=_shares(4, 1, shape.inter))
            return MoEConfig(8, gate_up, down, True, few=gluon, next_wave=wave)
        return MoEConfig(8, gate_up, _down_tile(tokens, shape), True, next_wave=wave)
    if mean <= 12:
        down = Tile(1, 2, 3) if shape.inter >= _LONG else single
        return MoEConfig(16, wide, down, promote=True)
    if mean <= 24:
        return MoEConfig(16, wide, single, False)
    return MoEConfig(32, wide, wide, False)


def _shares(most: int, depth: int, inter: int) -> int:
    """Shares of K of equal steps, of which none is empty."""
    steps = cdiv(inter, depth * 128)
    return cdiv(steps, cdiv(steps, most))


def _chosen(tokens: int, shape: ExpertShape) -> float:
    """Experts of this rank that random routing sends a batch to."""
    left_out = max(0.0, 1 - shape.top_k / shape.global_experts)
    return shape.experts * float(1 - left_out**tokens)


def _fitting(stages: int) -> int:
    """Programs of w13's tile for few pairs that shared memory holds at once: 5, 4 and 3 with 4, 5
    and 6 stages a multiprocessor. Registers hold 4."""
    return (9 - stages) * _MULTIPROCESSORS


def _gate_up_tile(tokens: int, shape: ExpertShape) -> Tile:
    """w13's tile where an expert gets few pairs. More stages: fewer programs at once."""
    programs = _chosen(tokens, shape) * (shape.inter // 32)
    if tokens * shape.top_k <= 4:
        return Tile(1, 4, 3) if programs <= 3 * _MULTIPROCESSORS else Tile(1, 2, 6)
    if programs > _FIVE_STAGES:
        return Tile(1, 2, 4)
    if programs > 2 * 5 * _MULTIPROCESSORS:
        return Tile(1, 2, 5)

    def fill(stages: int) -> float:
        waves = programs / _fitting(stages)
        return waves / ceil(_MARGIN * waves)

    return Tile(1, 2, max((4, 5, 6), key=fill))


def _down_tile(tokens: int, shape: ExpertShape) -> Tile:
    """w2's tile where an expert gets few pairs: one whose programs fill whole waves."""
    if shape.inter >= _LONG:
        experts, groups = _MARGIN * _chosen(tokens, shape), shape.hidden // 64
        if experts * cdiv(groups, 2) <= 4 * _MULTIPROCESSORS:
            return Tile(2, 1, 4)
        if experts * groups <= 2 * 5 * _MULTIPROCESSORS:
            return Tile(1, 2, 3)
    return Tile(1, 1, 4)


def takes_few(config: MoEConfig, tokens: int, hidden: int, inter: int) -> bool:
    """Whether w2's kernel for few tokens runs (moe/few.py)."""
    return config.few and tokens <= _FEW_DOWN and hidden % 64 == 0 and _fits_few(inter)


def takes_few_gate_up(config: MoEConfig, tokens: int, hidden: int, experts: int) -> bool:
    """Whether w13's kernel for few tokens runs (moe/few.py); ``experts`` of this rank."""
    few = tokens <= _FEW_GATE_UP and experts <= _TOUCHED
    return config.few and few and _fits_few(hidden)


def _fits_few(columns: int) -> bool:
    """Whether steps of two chunks divide K, no share of it is empty, and one fits shared memory."""
    chunks = columns // 128
    return chunks % 2 == 0 and 10 <= chunks <= 64


def fp8_rows(pairs: int, experts: int) -> int:
    """Tokens of a tile of FP8 experts, from the mean number of pairs an expert gets."""
    mean = pairs / experts
    return 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 48 else 128


def mxfp4_variant(tokens: int, shape: ExpertShape, fp8: bool) -> tuple[object, ...]:
    """What the kernels of MXFP4 experts are compiled for, as far as it depends on the batch.

    Args:
        tokens: T.
        shape: of the layer.
        fp8: FP8 activations.
    """
    configs = [choose_config(tokens, shape, fp8, gluon) for gluon in (False, True)]
    by_pair = any(config.sorted_codes for config in configs)
    chunk = placing_chunk(tokens, shape.top_k) if by_pair else 0
    # each number of so few tokens has kernels of its own, and one token has no routing
    few = min(tokens, _FEW_GATE_UP + 1)
    policy = activation_policy(tokens)
    return (fp8, *configs, chunk, few, policy, *_routing(tokens, shape.global_experts))


def router_variant(tokens: int, experts: int) -> tuple[object, ...]:
    """As ``mxfp4_variant``, of the norm with the router's product."""
    return router_part(tokens, experts), activation_policy(tokens)


def fp8_variant(tokens: int, top_k: int, experts: int, global_experts: int) -> tuple[object, ...]:
    """As ``mxfp4_variant``, of FP8 experts."""
    rows, policy = fp8_rows(tokens * top_k, experts), activation_policy(tokens)
    return (rows, policy, *_routing(tokens, global_experts))


def is_unrouted(tokens: int, experts: int) -> bool:
    """Whether the products find a token's experts themselves, rather than after a routing launch.

    One token of up to 64 experts: of 128 the products take longer than they save (measured on an
    H200 with 32 and 128).
    """
    return tokens == 1 and experts <= 64


def router_part(tokens: int, experts: int) -> int | None:
    """Experts a program of the norm takes of the router's product; None: the product is torch's."""
    if tokens > _NORM_AND_ROUTER or tokens * experts > _LOGITS:
        return None
    return 4 if tokens <= _FOUR_EXPERTS else 8


def routing_block(tokens: int, global_experts: int, coded: bool) -> tuple[int, bool]:
    """Tokens a routing program takes (a power of two), and whether one program does it all; with
    ``coded`` the launch also encodes x, which one for many tokens does not."""
    padded = max(16, next_power_of_2(global_experts))
    limit = max(1, _ELEMENTS // padded)
    if coded:
        limit = max(1, min(2 * _CODED_ELEMENTS // padded, max(128, _CODED_ELEMENTS // padded)))
    if tokens <= limit:
        # a token for each of four warps
        return max(min(4, limit), next_power_of_2(tokens)), True
    # a program ranks 16 tokens sooner, but the counts of more programs are then added up
    return min(16 if tokens <= _PLACED_WITH_CODES else 32, limit), False


def placing_chunk(tokens: int, top_k: int) -> int:
    """Pairs that a program reads at once where the launch that places the pairs also encodes x in
    their order; 0: encoding is a launch of its own."""
    if tokens > _PLACED_WITH_CODES:
        return 0
    # 2048 ids, and 8192 comparisons of them with a token's, in registers of four warps
    most = max(128, min(2048, 8192 // next_power_of_2(top_k)))
    return min(most, max(512, next_power_of_2(tokens * top_k)))


def _routing(tokens: int, global_experts: int) -> tuple[object, ...]:
    return tuple(routing_block(tokens, global_experts, coded) for coded in (False, True))
