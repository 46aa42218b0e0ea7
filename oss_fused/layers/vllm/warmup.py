# SPDX-License-Identifier: MIT
"""Compile every kernel that a layer can need while the model loads: no request waits for it.

A kernel is compiled once per bucket of rows (``kernels.tiles.ROW_BUCKETS``) and shape; layers of
equal shape share it. A CPU compiles nothing.

While vLLM loads a model, what layers ask for is collected, and compiled on several cores when all
layers are ready (``collect``, ``finish``).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEConfig
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.tiles import ROW_BUCKETS

# of a temporary output: a head with a large vocabulary never sees that many rows
_MAX_BYTES = 1 << 30

_THREADS = 8

_done: set[Hashable] = set()
# what waits for the end of loading; None: nothing waits
_collected: list[Callable[[], None]] | None = None

# vLLM shows what its own loggers say; of others it shows warnings
logger = init_logger(f"vllm.{__name__}")


def collect() -> None:
    """Let warm-ups wait for ``finish``, if they are the first of this process."""
    global _collected
    if _collected is not None:
        # a load that failed: none of it ran, and its layers would stay in memory
        _done.clear()
    if not _done:
        _collected = []


def is_new(key: Hashable) -> bool:
    """Whether ``key`` was not warmed up yet; from now on it counts as warm."""
    if key in _done:
        return False
    _done.add(key)
    return True


def when_ready(run: Callable[[], None]) -> None:
    """Call ``run``, which launches kernels and reads no result of theirs; or let it wait."""
    if _collected is None:
        run()
    else:
        _collected.append(run)


def finish() -> None:
    """Compile the kernels of all that waits on several cores, then run it."""
    global _collected
    waiting, _collected = _collected or [], None
    if not waiting:
        return
    begin = time.monotonic()
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    try:
        # late: only a GPU needs Triton
        from oss_fused.kernels.ahead import compiling_only

        with compiling_only(threads):
            for run in waiting:
                run()
    except Exception as error:
        # slower, not wrong: each kernel is compiled when it is launched
        logger.warning("oss_fused: kernels are compiled one after the other: %s", error)
    compiled = time.monotonic() - begin
    for run in waiting:
        run()
    logger.info(
        "oss_fused: compiled kernels in %.1f s on %d threads, warmed up in %.1f s",
        compiled,
        threads,
        time.monotonic() - begin - compiled,
    )


def max_tokens() -> int:
    """Most tokens of one step; call it while vLLM builds the model."""
    return get_current_vllm_config().scheduler_config.max_num_batched_tokens


def max_routed_tokens(moe: FusedMoEConfig) -> int:
    """Most tokens of one step that a rank's experts see: data-parallel ranks gather theirs."""
    return max_tokens() * moe.dp_size


def row_counts(limit: int, row_bytes: int) -> Iterator[int]:
    """A row count of every bucket that a step of at most ``limit`` tokens can fall into."""
    below = 0
    for bucket in ROW_BUCKETS:
        rows = min(bucket, limit)
        if rows <= below or rows * row_bytes > _MAX_BYTES:
            return
        yield rows
        below = bucket


def warm_linear(
    layer: Any,
    apply: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    weight_only: bool,
    bf16_rows: int = 0,
) -> None:
    """Run a loaded FP8 linear layer, and what quantises its input, once per bucket.

    Args:
        layer: with weight [N, K] and, if a norm may quantise for it, ``_input_quant_key``.
        apply: the method's ``apply``.
        dtype: of the model.
        weight_only: its input is not quantised.
        bf16_rows: rows up to which its input has two levels (kernels/levels.py).
    """
    weight = layer.weight
    if not weight.is_cuda:
        return
    n, k = weight.shape
    static = getattr(layer, "input_scale", None)
    by_rows = isinstance(layer, RowParallelLinear)
    kind = (n, k, bias_of(layer) is None, static is None, weight_only, bf16_rows, by_rows)
    if is_new(("linear", *kind, dtype, weight.device, layer.oss_max_tokens)):
        when_ready(functools.partial(_run_linear, layer, apply, dtype, weight_only, bf16_rows))


def bias_of(layer: Any) -> torch.Tensor | None:
    """The bias that the layer's ``forward`` gives its method: the first rank's adds it for all."""
    of_first = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
    if of_first or getattr(layer, "skip_bias_add", False):
        return None
    return getattr(layer, "bias", None)


def _run_linear(
    layer: Any,
    apply: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    weight_only: bool,
    bf16_rows: int,
) -> None:
    weight, bias = layer.weight, bias_of(layer)
    n, k = weight.shape
    static = getattr(layer, "input_scale", None)
    gain = torch.ones(k, dtype=dtype, device=weight.device)
    after_norm = (QKVParallelLinear, MergedColumnParallelLinear)
    from_norm = hasattr(layer, "_input_quant_key") and isinstance(layer, after_norm)
    counts = [*row_counts(layer.oss_max_tokens, n * dtype.itemsize)]
    if bf16_rows and counts:
        # the last that has two levels is no bucket's last
        counts = sorted({*counts, min(bf16_rows, counts[-1])})
    for rows in counts:
        x = torch.zeros(rows, k, dtype=dtype, device=weight.device)
        apply(layer, x, bias)
        if weight_only:
            continue
        # codes from a norm or an activation: at few rows another kernel than apply's
        codes, token = torch.ops.oss_fused.quantize_fp8(x, static, "token")
        torch.ops.oss_fused.fp8_gemm(codes, weight, token, layer.weight_scale, bias, dtype, True)
        if isinstance(layer, MergedColumnParallelLinear) and static is None and bias is None:
            operands = (codes, weight, token, layer.weight_scale)
            torch.ops.oss_fused.gate_up_quant(*operands, dtype, "silu", True)
        if from_norm:
            options = (gain, 1e-5, static, False, True, bf16_rows)
            for residual in (None, x):
                normed = torch.ops.oss_fused.add_rms_norm_quant(x, residual, *options)
            if has_two_levels(rows, bf16_rows):
                codes, token, _, _, levels = normed
                of_weight = (token, layer.weight_scale, bias, dtype, True)
                torch.ops.oss_fused.fp8_gemm(codes, weight, *of_weight, levels)
        if isinstance(layer, RowParallelLinear) and static is None:
            torch.ops.oss_fused.act_mul_quant(x.repeat(1, 2), "silu", None)
            if rows == 1:
                # a dense MLP's down projection of one token quantises with one level
                weights = (weight, layer.weight_scale, None, bias)
                torch.ops.oss_fused.fp8_linear(x, *weights, True)


def first_of_each(limit: int, variant: Callable[[int], Hashable]) -> list[int]:
    """The smallest of the counts 1 .. ``limit`` of each ``variant``, in order."""
    first: dict[Hashable, int] = {}
    for count in range(1, limit + 1):
        first.setdefault(variant(count), count)
    return list(first.values())


def warm_batches(
    key: Hashable, limit: int, variant: Callable[[int], Hashable], run: Callable[[int], Any]
) -> None:
    """Call ``run(tokens)`` for a batch of each variant up to ``limit`` tokens, once per ``key``.

    While vLLM loads a model the calls wait for ``finish``.

    Args:
        key: what the kernels are compiled for beside the batch.
        limit: most tokens of one step.
        variant: what they are compiled for in a batch of so many tokens.
        run: runs the layer on that many tokens.
    """

    def run_all() -> None:
        for tokens in first_of_each(limit, variant):
            run(tokens)

    if is_new((key, limit)):
        when_ready(run_all)


def warm_routed(method: Any, layer: Any, dtype: torch.dtype, limit: int) -> None:
    """``warm_batches`` of a loaded layer of experts whose method routes by itself.

    Args:
        method: its ``apply_monolithic`` runs the layer, its ``variant`` tells batches apart.
        layer: vLLM's RoutedExperts, with w13_weight and w2_weight [E, H, ...].
        dtype: of the model.
        limit: most tokens of one step.
    """
    weight = layer.w13_weight
    if not weight.is_cuda:
        return
    hidden, experts = layer.w2_weight.shape[1], layer.global_num_experts

    def run(tokens: int) -> None:
        x = torch.zeros(tokens, hidden, dtype=dtype, device=weight.device)
        logits = torch.randn(tokens, experts, dtype=dtype, device=weight.device)
        method.apply_monolithic(layer, x, logits)

    shape, kind = tuple(weight.shape), type(method)
    # a layer that monitor_policy keeps in 16 bits differs from others in large batches
    large = method.variant(layer, limit)
    key = (kind, shape, experts, layer.top_k, layer.activation, dtype, weight.device, large)
    warm_batches(key, limit, functools.partial(method.variant, layer), run)
