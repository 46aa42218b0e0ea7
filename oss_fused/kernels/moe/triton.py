# SPDX-License-Identifier: MIT
"""MXFP4 experts on a GPU: route, gate and up, down, combine; which tiles a batch gets."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton.language as tl

from oss_fused.kernels.checks import HALF_DTYPES, check_dtype
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, runs_gluon
from oss_fused.kernels.moe.combine_norm import Summands, combine
from oss_fused.kernels.moe.config import (
    ExpertShape,
    MoEConfig,
    Tile,
    choose_config,
    is_unrouted,
    takes_few,
    takes_few_gate_up,
)
from oss_fused.kernels.moe.encode import encode_rows
from oss_fused.kernels.moe.gemm import Product, _down_kernel, _gate_up_kernel
from oss_fused.kernels.moe.place import Routing, unrouted
from oss_fused.kernels.moe.reference import uses_fp8_activations
from oss_fused.kernels.moe.router import route

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _product(
    routing: Routing, weight: torch.Tensor, columns: int, tile: Tile, config: MoEConfig, levels: int
) -> Product:
    """The product of the routed tokens with packed ``weight`` [E, N, columns / 2]."""
    groups = weight.shape[1] // 64
    taken = min(tile.groups, 1 << (groups.bit_length() - 1))
    return Product(
        n=weight.shape[1],
        k=columns,
        rows=config.rows,
        levels=levels,
        groups=taken,
        depth=tile.depth,
        shares=tile.shares,
        stages=tile.stages,
        warpgroups=min(tile.warpgroups, taken),
        promote=config.promote,
        mxfp4=True,
        policy=activation_policy(routing.topk_weights.shape[0]),
    )


def runs_gluon_products(device: torch.device, rows13: int, hidden: int) -> bool:
    """Whether the products in Gluon run on ``device``, for outputs of these sizes.

    Triton 3.6 does not compile stream.py for an output that fits one program's groups.
    """
    return runs_gluon(device) and min(rows13, hidden) > 256


def moe_mxfp4(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    activation: str = "swigluoai",
    fp8_min_tokens: int = -1,
    prefetch_weights: bool = False,
    config: MoEConfig | None = None,
) -> torch.Tensor:
    """MXFP4 experts; see kernels/moe for the contract. ``config`` overrides the choice of tiles."""
    check_dtype("x", x, HALF_DTYPES)
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts, rows13, _ = w13.shape
    if tokens == 0 or experts == 0:
        return out.zero_()
    fp8 = uses_fp8_activations(tokens, activation, fp8_min_tokens)
    if config is None:
        gluon = activation == "swigluoai" and runs_gluon_products(x.device, rows13, hidden)
        shape = ExpertShape(top_k, experts, router_logits.shape[1], hidden, rows13 // 2)
        config = choose_config(tokens, shape, fp8, gluon)
    levels = 1 if fp8 else 2
    plain = expert_map is None and activation == "swigluoai"
    if plain and is_unrouted(tokens, experts):
        routing = unrouted(router_logits.contiguous(), *encode_rows(x.contiguous(), levels))
    else:
        routing = encode(x, router_logits, top_k, renormalize, expert_map, experts, levels, config)
    act, act_scale = gate_up(
        routing, w13, w13_scale, w13_bias, hidden, top_k, activation, x.dtype, levels, config
    )
    y_dtype = x.dtype if fp8 or config.large else torch.float32
    y = down(
        routing,
        act,
        act_scale,
        w2,
        w2_scale,
        w2_bias,
        rows13 // 2,
        y_dtype,
        config,
        prefetch_weights,
    )
    summands = Summands(y, routing.topk_weights, routing.place)
    return combine(summands, top_k, renormalize, out, prefetch_weights)


def encode(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None,
    experts: int,
    levels: int,
    config: MoEConfig,
) -> Routing:
    """Routing, and x as codes: a row a token, for many tokens one for each sorted pair."""
    return route(
        router_logits,
        top_k,
        renormalize,
        expert_map,
        experts,
        config.rows,
        x,
        levels,
        by_pair=config.sorted_codes,
    )


def _gluon_product(config: MoEConfig) -> Callable[..., None]:
    """The product of sorted codes: Gluon is imported where a device runs it."""
    if config.large:
        from oss_fused.kernels.moe.large import large_product

        return functools.partial(large_product, few_tiles=config.few_tiles)
    from oss_fused.kernels.moe.stream import stream_product

    return functools.partial(stream_product, narrow=config.narrow)


def _listed(routing: Routing, top_k: int) -> tuple[int, int, int]:
    """Pairs, tiles, and the experts of the model if one token's logits stand for the tiles."""
    if routing.order is None:
        return top_k, top_k, routing.tiles.shape[1]
    return routing.order.shape[0], routing.tiles.shape[0], 0


def gate_up(
    routing: Routing,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    hidden: int,
    top_k: int,
    activation: str,
    dtype: torch.dtype,
    levels: int,
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The intermediate of sorted pairs: codes [P, levels, IP] and their scales (None: 1/8)."""
    assert routing.codes is not None and routing.scale is not None
    pairs, tiles, chosen = _listed(routing, top_k)
    rows = w13.shape[1]
    width = rows // 2
    padded = -(-width // 128) * 128
    silu = activation == "silu"
    if silu:
        act = torch.empty(pairs, width, dtype=dtype, device=w13.device)
    else:
        shape = (pairs, levels, padded)
        act = torch.empty(shape, dtype=torch.float8_e4m3fn, device=w13.device)
    if config.sorted_codes:
        codes, weights = (routing.codes, routing.scale), (w13, w13_scale, w13_bias)
        _gluon_product(config)(*codes, *weights, act, routing, hidden, dtype, config.rows)
        return act, None
    tokens = routing.scale.shape[0]
    if takes_few_gate_up(config, tokens, hidden, w13.shape[0]):
        from oss_fused.kernels.moe.few import gate_up_few

        few = (routing, w13, w13_scale, w13_bias, act, (tokens, tiles, chosen), top_k)
        gate_up_few(*few, hidden, dtype)
        return act, None
    product = _product(routing, w13, hidden, config.gate_up, config, levels)
    _gate_up_kernel[(cdiv(rows // 64, product.groups), tiles)](
        routing.codes,
        routing.scale,
        w13,
        w13_scale,
        w13_bias,
        act,
        routing.order,
        routing.tiles,
        TOP_K=top_k,
        SILU=silu,
        DTYPE=_TRITON_DTYPES[dtype],
        P=product,
        EXPERTS=chosen,
        PREFETCHED=0 if chosen else w13.shape[0],
        WAVE=0 if chosen else config.next_wave,
        num_warps=4 * product.warpgroups,
        **pdl_options(w13.device),
    )
    if silu:
        # unbounded, so each row needs its own scale: known only when the row is complete
        return encode_rows(act, levels, tokens=routing.topk_weights.shape[0])
    return act, None


def down(
    routing: Routing,
    act: torch.Tensor,
    act_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    inter: int,
    y_dtype: torch.dtype,
    config: MoEConfig,
    prefetch_weights: bool,
) -> torch.Tensor:
    """w2 of sorted pairs plus bias, in shares to be added: [shares, P, H]."""
    pairs, levels, _ = act.shape
    _, tiles, chosen = _listed(routing, pairs)
    hidden = w2.shape[1]
    tokens = 0 if routing.scale is None else routing.scale.shape[0]
    if act_scale is None and takes_few(config, tokens, hidden, inter):
        from oss_fused.kernels.moe.few import SHARES, down_few

        y = torch.empty(SHARES, pairs, hidden, dtype=y_dtype, device=w2.device)
        down_few(
            routing.tiles,
            act,
            w2,
            w2_scale,
            w2_bias,
            y,
            (tokens, tiles, chosen),
            inter,
            prefetch_weights,
        )
        return y
    y = torch.empty(config.down.shares, pairs, hidden, dtype=y_dtype, device=w2.device)
    if config.sorted_codes:
        weights = (w2, w2_scale, w2_bias)
        _gluon_product(config)(act, None, *weights, y[0], routing, inter, y_dtype, config.rows)
        return y
    product = _product(routing, w2, inter, config.down, config, levels)
    grid = (cdiv(hidden // 64, product.groups), tiles, product.shares)
    _down_kernel[grid](
        act,
        act_scale,
        w2,
        w2_scale,
        w2_bias,
        y,
        routing.tiles,
        pairs,
        PREFETCH=prefetch_weights,
        P=product,
        EXPERTS=chosen,
        num_warps=4 * product.warpgroups,
        **pdl_options(w2.device),
    )
    return y
