# SPDX-License-Identifier: MIT
"""What bench_operators measures: softmax, LayerNorm, attention, each checked before it is timed."""

from __future__ import annotations

import functools
import importlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from oss_fused.attention import flash_attention
from oss_fused.bench.accuracy import check_accuracy, measure_error
from oss_fused.bench.problems import LayerNormInput, SoftmaxInput
from oss_fused.bench.timing import copies_for, time_graphs
from oss_fused.kernels.flash_attention import backward, forward
from oss_fused.kernels.flash_attention.tile import Tiles
from oss_fused.normalization import layer_norm, softmax

BF16 = torch.bfloat16
SIZES = (1024, 2048, 4096, 8192)
PROBLEMS = {"softmax": SoftmaxInput, "layer_norm": LayerNormInput}
LENGTHS = (512, 1024, 2048, 4096, 16384)
HEAD_DIMS = (64, 128)
# tokens and width of the hidden state, as the published comparisons have them
TOKENS, WIDTH = 16384, 2048
SWEEP_LENGTH = 4096
_CHECKED_LENGTH = 1000
# forward; dQ; dK and dV
FORWARD_TILES = (
    Tiles(128, 128, 8, 2),
    Tiles(128, 128, 8, 3),
    Tiles(128, 64, 8, 3),
    Tiles(128, 64, 4, 3),
    Tiles(64, 128, 4, 2),
    Tiles(64, 64, 4, 3),
)
DQ_TILES = (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 1), Tiles(64, 64, 4, 2))
DKV_TILES = (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 1), Tiles(128, 128, 8, 1), Tiles(64, 64, 4, 2))
_REPLAYS = 15
# of softmax and LayerNorm, whose rows have percentiles
_ROW_REPLAYS = 60

# called with unpacked arguments
_attention: Callable[..., Any] = flash_attention
_pytorch: Callable[..., Any] = F.scaled_dot_product_attention
_forward: Callable[..., Any] = forward.flash_attention
_backward: Callable[..., Any] = backward.flash_attention_backward


def row_operations(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Softmax and LayerNorm over squares; ``share`` is of a copy's bytes per second."""
    for size in SIZES:
        nbytes = 2 * size * size * BF16.itemsize
        sets = [
            torch.randn(size, size, device="cuda", dtype=BF16) for _ in range(copies_for(nbytes))
        ]
        weight, bias = (torch.randn(size, device="cuda", dtype=BF16) for _ in "wb")
        ours: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
            "softmax": {
                "oss_fused": softmax,
                "online": functools.partial(softmax, method="online"),
                "pytorch": functools.partial(torch.softmax, dim=-1),
            },
            "layer_norm": {
                "oss_fused": functools.partial(layer_norm, weight=weight, bias=bias),
                "welford": functools.partial(
                    layer_norm, weight=weight, bias=bias, method="welford"
                ),
                "pytorch": functools.partial(
                    F.layer_norm, normalized_shape=(size,), weight=weight, bias=bias
                ),
            },
        }
        for operation, functions in ours.items():
            wide = torch.softmax(sets[0].double(), -1)
            if operation == "layer_norm":
                pair = (weight.double(), bias.double())
                wide = F.layer_norm(sets[0].double(), (size,), *pair)
            checked = {name: check_accuracy(f(sets[0]), wide) for name, f in functions.items()}
            # what a copy of these sizes reaches, launch included, is the ceiling of both
            functions["copy"] = torch.clone
            checked["copy"] = check_accuracy(torch.clone(sets[0]), sets[0].double())
            calls = {name: [functools.partial(f, x) for x in sets] for name, f in functions.items()}
            times = time_graphs(calls, _ROW_REPLAYS)
            problem = PROBLEMS[operation](size, size, BF16)
            for name, timing in times.items():
                yield {
                    "operation": operation,
                    "implementation": name,
                    "size": size,
                    "us": timing.median,
                    "p90_us": timing.p90,
                    "p95_us": timing.p95,
                    "p99_us": timing.p99,
                    "intensity": 0.0 if name == "copy" else problem.flops / problem.num_bytes,
                    "gbps": nbytes / timing.median * 1e-3,
                    "share": nbytes / (timing.median * 1e-6) / bandwidth,
                    "speedup": times["pytorch"].median / timing.median,
                    "error": "" if checked[name].passed else checked[name].reason,
                }


def _operands(length: int, dim: int, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    shape = (max(1, tokens // length), WIDTH // dim, length, dim)
    return tuple(torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4))


def _flops(length: int, dim: int, causal: bool, passes: float) -> float:
    batch = max(1, TOKENS // length)
    return passes * 4 * batch * (WIDTH // dim) * length**2 * dim * (0.5 if causal else 1)


def _flash3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], Any]:
    """FlashAttention 3 as vLLM ships it, on tensors of its own layout.

    Raises:
        ImportError: vLLM for CUDA is not installed.
    """
    module = importlib.import_module("vllm.vllm_flash_attn")
    batch, _, length, _ = q.shape
    packed = [t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]).contiguous() for t in (q, k, v)]
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    return functools.partial(
        module.flash_attn_varlen_func,
        *packed,
        max_seqlen_q=length,
        cu_seqlens_q=starts,
        max_seqlen_k=length,
        cu_seqlens_k=starts,
        causal=causal,
        fa_version=3,
    )


def _gradient_error(dim: int, causal: bool) -> str:
    """Empty, or which of out, dq, dk, dv is further from float32 than twice PyTorch's bfloat16."""
    *inputs, grad = _operands(_CHECKED_LENGTH, dim, _CHECKED_LENGTH)
    results = []
    for dtype, function in (
        (torch.float32, _pytorch),
        (BF16, _pytorch),
        (BF16, _attention),
    ):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        causal_name = "causal" if function is _attention else "is_causal"
        out = function(*leaves, **{causal_name: causal})
        found = torch.autograd.grad(out, leaves, grad.to(dtype))
        results.append([t.float() for t in (out, *found)])
    exact, theirs, ours = results
    bad = []
    for name, want, baseline, got in zip(("out", "dq", "dk", "dv"), exact, theirs, ours):
        allowed = 2 * measure_error(baseline, want).relative_l2 + 1e-3
        error = measure_error(got, want).relative_l2
        if not error <= allowed:
            bad.append(f"{name}: relative error {error:.1e}, allowed {allowed:.1e}")
    return "; ".join(bad)


def attention_rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Forward and backward at every length and head size, causal and not."""
    for dim in HEAD_DIMS:
        for causal in (False, True):
            error = _gradient_error(dim, causal)
            for length in lengths:
                q, k, v, grad = _operands(length, dim)
                for direction, times in (
                    ("forward", _forward_times(q, k, v, causal)),
                    ("backward", _backward_times(q, k, v, grad, causal)),
                ):
                    flops = _flops(length, dim, causal, 1 if direction == "forward" else 2.5)
                    for name, us in times.items():
                        yield {
                            "operation": f"flash {direction}",
                            "implementation": name,
                            "length": length,
                            "dim": dim,
                            "causal": causal,
                            "us": us,
                            "tflops": flops / us * 1e-6,
                            "speedup": times["pytorch"] / us,
                            "error": error if name == "oss_fused" else "",
                        }


def _forward_times(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, float]:
    calls: dict[str, list[Callable[[], Any]]] = {
        "oss_fused": [functools.partial(_attention, q, k, v, causal)],
        "pytorch": [functools.partial(_pytorch, q, k, v, is_causal=causal)],
    }
    try:
        flash3 = _flash3(q, k, v, causal)
        flash3()
        calls["flash_attention_3"] = [flash3]
    except Exception as failure:
        # a baseline that this machine lacks
        print(f"FlashAttention 3: {type(failure).__name__}: {failure}"[:200])
    return {name: timing.median for name, timing in time_graphs(calls, _REPLAYS).items()}


def _backward_times(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool
) -> dict[str, float]:
    options = (q.shape[-1] ** -0.5, causal, -1, -1, 0.0, 0)
    results = torch.ops.oss_fused.flash_attention(q, k, v, *[None] * 7, *options)
    ours = functools.partial(
        torch.ops.oss_fused.flash_attention_backward,
        *(grad, q, k, v, *results, None, None, None, *options),
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = _pytorch(*leaves, is_causal=causal)

    def theirs() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    times = {}
    for name, call in (("oss_fused", ours), ("pytorch", theirs)):
        for _ in range(2):
            call()
        # autograd's own threads cannot be captured: events around calls of milliseconds
        times[name] = _event_time(call)
    return times


def _event_time(call: Callable[[], Any], repeats: int = 7) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    found = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 1e3 * found[repeats // 2]


def _tile_call(
    direction: str, tiles: Tiles, tensors: Sequence[torch.Tensor], causal: bool
) -> Callable[[], Any]:
    q, k, v, grad = tensors
    options = (q.shape[-1] ** -0.5, causal, -1, -1, 0.0, 0)
    if direction == "forward":
        return functools.partial(_forward, q, k, v, *[None] * 7, *options, config=tiles)
    results = torch.ops.oss_fused.flash_attention(q, k, v, *[None] * 7, *options)
    arguments = (grad, q, k, v, *results, None, None, None, *options)
    pair = (tiles, DKV_TILES[0]) if direction == "dq" else (DQ_TILES[0], tiles)
    return functools.partial(_backward, *arguments, config=pair)


def _sweep_cases() -> Iterator[tuple[str, Tiles, int, bool]]:
    sets = {"forward": FORWARD_TILES, "dq": DQ_TILES, "dkv": DKV_TILES}
    for direction, candidates in sets.items():
        for tiles in candidates:
            for dim in HEAD_DIMS:
                yield direction, tiles, dim, False
                if direction == "forward":
                    yield direction, tiles, dim, True


def sweep_rows() -> Iterator[dict[str, Any]]:
    """Other tiles of attention; dQ's and dK's rows hold the time of the whole backward."""
    for direction, tiles, dim, causal in _sweep_cases():
        row: dict[str, Any] = {
            "operation": f"sweep {direction}",
            "implementation": "/".join(map(str, tiles)),
        }
        row |= {"length": SWEEP_LENGTH, "dim": dim, "causal": causal, "error": ""}
        try:
            call = _tile_call(direction, tiles, _operands(SWEEP_LENGTH, dim), causal)
            call()
            us = _event_time(call)
        except Exception as failure:
            # a tile beyond shared memory
            yield row | {"error": f"{type(failure).__name__}: {failure}"[:60]}
            continue
        passes = 1 if direction == "forward" else 2.5
        yield row | {"us": us, "tflops": _flops(SWEEP_LENGTH, dim, causal, passes) / us * 1e-6}


def _compile(case: tuple[str, Tiles | None, int, bool, int]) -> None:
    direction, tiles, dim, causal, length = case
    *tensors, grad = _operands(length, dim, length)
    try:
        if tiles is not None:
            _tile_call(direction, tiles, (*tensors, grad), causal)()
        else:
            leaves = [t.requires_grad_() for t in tensors]
            _attention(*leaves, causal=causal).backward(grad)
    except Exception as failure:
        # reported in the row that needs it
        print(f"{case}: {type(failure).__name__}"[:100])


def compile_attention(sweep: bool, processes: int = 12) -> None:
    """Fill Triton's cache from several processes: one after the other takes minutes."""
    cases: list[tuple[str, Tiles | None, int, bool, int]] = [
        ("both", None, dim, causal, length)
        for dim in HEAD_DIMS
        for causal in (False, True)
        # of timing and of checking: lengths that blocks divide, and not
        for length in (512, _CHECKED_LENGTH)
    ]
    cases += [(*case, 512) for case in _sweep_cases()] if sweep else []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(cases)), mp_context=context) as pool:
        list(pool.map(_compile, cases))


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Named figures of summary.json; those whose rows were not measured are left out."""
    rows = [row for row in rows if not row["error"]]
    found: dict[str, float] = {}
    for operation in ("softmax", "layer_norm"):
        ours = [
            r for r in rows if r["operation"] == operation and r["implementation"] == "oss_fused"
        ]
        large = [r["share"] for r in ours if r["size"] >= 4096]
        if large:
            found[f"operators.{operation}.bandwidth_min"] = min(large)
            found[f"operators.{operation}.speedup_eager_min"] = min(r["speedup"] for r in ours)
    for row in rows:
        longest = row.get("length") == max(LENGTHS) and not row.get("causal")
        if row["operation"] == "flash forward" and row["implementation"] == "oss_fused" and longest:
            found[f"operators.flash.fwd_tflops_d{row['dim']}"] = row["tflops"]
    shares = []
    for row in rows:
        if row["operation"] == "flash forward" and row["implementation"] == "flash_attention_3":
            own = next(
                r["tflops"]
                for r in rows
                if r["implementation"] == "oss_fused"
                and all(r.get(k) == row[k] for k in ("operation", "length", "dim", "causal"))
            )
            shares.append(own / row["tflops"])
    if shares:
        found["operators.flash.vs_fa3_fwd_min"] = min(shares)
    # FlashAttention 3 as vLLM ships it has no backward: PyTorch's stands for it
    gradients = [
        r["speedup"]
        for r in rows
        if r["operation"] == "flash backward" and r["implementation"] == "oss_fused"
    ]
    if gradients:
        found["operators.flash.vs_fa3_bwd_min"] = min(gradients)
    return found


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as text, one per line, with failures."""
    lines = []
    for row in rows:
        if "size" in row:
            shape = f"{row['size']}^2"
            value = f"{row['gbps']:7.0f} GB/s {row['share']:6.1%} of copy"
        elif "problem" in row:
            shape, value = row["problem"], row["value"]
        else:
            shape = f"D{row['dim']} N{row['length']}{' causal' if row['causal'] else ''}"
            value = f"{row.get('tflops', 0):7.1f} TFLOPS"
        line = f"{row['operation']:<15} {shape:<18} {row['implementation']:<18} "
        line += f"{row.get('us', 0):10.1f} us {value}"
        if "speedup" in row:
            line += f" {row['speedup']:5.2f}x baseline"
        lines.append(line + (f"  WRONG {row['error']}" if row["error"] else ""))
    return "\n".join(lines)
