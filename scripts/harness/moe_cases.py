# SPDX-License-Identifier: MIT
"""The expert layer of gpt-oss on one GPU: checked against the reference, then timed by parts.

Times are CUDA-graph replays over several layers' distinct weights, so that no weight is read from
L2, with the routing of random logits. The native kernels use programmatic dependent launch:
replays of one kernel overlap at their ends, as they do in a model.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.bench.timing import copy_bandwidth, time_graph
from oss_fused.environment import fingerprint
from oss_fused.kernels.op import get_kernel

HIDDEN = 2880
TOP_K = 4
NAMED_EXPERTS = 32
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256, 1024, 8192)
# above this the layer is bound by arithmetic: FP8 activations are measured as well
FP8_FROM = 256
# relative errors: bfloat16 outputs and intermediate, for many tokens each expert's share as well;
# FP8 activations moved by a code
BF16_ERROR = 4e-3
FP8_ERROR = 1e-2

# x, router logits -> output, one for each layer
Baseline = Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class ExpertWeights:
    """One layer as a checkpoint holds it, and repacked."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_bias: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_bias: torch.Tensor
    packed13: tuple[torch.Tensor, torch.Tensor]
    packed2: tuple[torch.Tensor, torch.Tensor]

    def arguments(self) -> tuple[Any, ...]:
        """Weights in the order of moe_mxfp4, then top_k and renormalize."""
        return (*self.packed13, self.w13_bias, *self.packed2, self.w2_bias, TOP_K, True)


def random_layer(experts: int, seed: int, hidden: int = HIDDEN) -> ExpertWeights:
    """Random codes and exponents that keep activations near one; I = H as in gpt-oss."""
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)

    def weight(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (experts, rows, hidden // 2)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
        shape = (experts, rows, hidden // 32)
        exponents = torch.randint(
            117, 121, shape, dtype=torch.uint8, device="cuda", generator=generator
        )
        return codes, exponents

    def bias(rows: int) -> torch.Tensor:
        return torch.randn(experts, rows, device="cuda", generator=generator).bfloat16()

    repack = get_kernel("triton", "moe_repack_mxfp4")
    w13, w2 = weight(2 * hidden), weight(hidden)
    return ExpertWeights(
        *w13, bias(2 * hidden), *w2, bias(hidden), repack(*w13, True), repack(*w2, False)
    )


def inputs(tokens: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] and router logits [T, E], bfloat16."""
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1000 * tokens + seed)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator)
    logits = torch.randn(tokens, experts, device="cuda", generator=generator)
    return x.bfloat16(), logits.bfloat16()


def compile_batch(job: tuple[int, int, bool]) -> None:
    """Run one (batch, experts, fp8) once, so that Triton's cache holds its kernels."""
    tokens, experts, fp8 = job
    device = torch.device("cuda")
    w13 = torch.zeros(experts, 2 * HIDDEN, HIDDEN // 2, dtype=torch.uint8, device=device)
    w2 = torch.zeros(experts, HIDDEN, HIDDEN // 2, dtype=torch.uint8, device=device)
    chunks = -(-HIDDEN // 128)

    def scale(rows: int) -> torch.Tensor:
        return torch.zeros(experts, rows // 64, chunks, 64, dtype=torch.int32, device="cuda")

    def bias(rows: int) -> torch.Tensor:
        return torch.zeros(experts, rows, dtype=torch.bfloat16, device="cuda")

    get_kernel("triton", "moe_mxfp4")(
        *inputs(tokens, experts, 0), w13, scale(2 * HIDDEN), bias(2 * HIDDEN),
        w2, scale(HIDDEN), bias(HIDDEN), TOP_K, True, None, "swigluoai", 0 if fp8 else -1, True,
    )  # fmt: skip
    torch.cuda.synchronize()


def variants(batches: Sequence[int]) -> list[tuple[int, bool]]:
    """(batch, FP8 activations) to measure."""
    bf16 = [(tokens, False) for tokens in batches]
    return bf16 + [(tokens, True) for tokens in batches if tokens >= FP8_FROM]


def run(
    batches: Sequence[int],
    experts: int,
    layers: int,
    jobs: int,
    make_baselines: Callable[[Sequence[ExpertWeights]], dict[str, Baseline]],
    report_line: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Check and time every batch.

    Args:
        batches: tokens.
        experts: E.
        layers: how many layers' weights are rotated.
        jobs: processes that compile.
        make_baselines: layers -> name -> callables to compare with.
        report_line: takes a line of text per result.
        keep: takes the report so far, after every result.

    Returns:
        The report: "environment", "copy_bandwidth", "experts", "results", "figures".
    """
    start = time.monotonic()
    if jobs > 1:
        work = [(tokens, experts, fp8) for tokens, fp8 in variants(batches)]
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.map(compile_batch, work, chunksize=1)
    report_line(f"compiled in {time.monotonic() - start:.0f} s")
    bandwidth = copy_bandwidth()
    weights = [random_layer(experts, seed) for seed in range(layers)]
    baselines = make_baselines(weights)
    report_line(f"ready after {time.monotonic() - start:.0f} s")
    head = {"environment": fingerprint(), "copy_bandwidth": bandwidth}
    report: dict[str, Any] = {**head, "experts": experts, "layers": layers}
    results: list[dict[str, Any]] = []
    for tokens, fp8 in variants(batches):
        row = measure(tokens, experts, fp8, weights, baselines, bandwidth)
        results.append(row)
        report_line(line(row))
        report |= {"results": results, "figures": figures(results, experts)}
        keep(report)
    return report


def measure(
    tokens: int,
    experts: int,
    fp8: bool,
    weights: Sequence[ExpertWeights],
    baselines: dict[str, Baseline],
    bandwidth: float,
) -> dict[str, Any]:
    """One batch: error against the reference, microseconds by part, baselines."""
    native = get_kernel("triton", "moe_mxfp4")
    # w2 is prefetched, as the served layers ask for it
    options = (None, "swigluoai", 0 if fp8 else -1, True)
    sets = [inputs(tokens, experts, seed) for seed in range(len(weights))]
    expected = get_kernel("torch", "moe_mxfp4")(*sets[0], *weights[0].arguments(), *options)
    error = _relative(native(*sets[0], *weights[0].arguments(), *options), expected)
    row: dict[str, Any] = {
        "batch": tokens,
        "fp8_activations": fp8,
        "error": error,
        "passed": error <= (FP8_ERROR if fp8 else BF16_ERROR),
    }
    parts, touched = _parts(sets, weights, options, experts, fp8)
    row["touched_experts"] = touched
    repeats = max(1, min(6, 512 // tokens))
    row["us"] = {name: _time(part, len(weights), repeats) for name, part in parts.items()}
    nbytes = {
        "gate_up": touched * 2 * HIDDEN * (HIDDEN // 2 + HIDDEN // 32),
        "down": touched * HIDDEN * (HIDDEN // 2 + HIDDEN // 32),
    }
    nbytes["experts"] = nbytes["gate_up"] + nbytes["down"]
    row["us"]["experts"] = row["us"]["gate_up"] + row["us"]["down"]
    row["tbps"] = {name: n / row["us"][name] / 1e6 for name, n in nbytes.items()}
    row["of_copy"] = {name: tbps * 1e12 / bandwidth for name, tbps in row["tbps"].items()}
    row["baselines"] = {}
    for name, callables in baselines.items():
        try:
            row["baselines"][name] = {
                "us": _time(_bound(callables, sets), len(weights), repeats),
                "error": _relative(callables[0](*sets[0]), expected),
            }
        except Exception as failure:
            row["baselines"][name] = {"failure": f"{type(failure).__name__}: {failure}"[:200]}
    times = [cell["us"] for cell in row["baselines"].values() if "us" in cell]
    row["speedup"] = min(times) / row["us"]["layer"] if times else None
    return row


def _parts(
    sets: Sequence[tuple[torch.Tensor, ...]],
    weights: Sequence[ExpertWeights],
    options: tuple[Any, ...],
    experts: int,
    fp8: bool,
) -> tuple[dict[str, Callable[[int], Any]], float]:
    """The layer's launches as calls of the number of a layer, and the experts that tokens reach."""
    from oss_fused.kernels.launch import runs_gluon
    from oss_fused.kernels.moe import triton as moe

    tokens = sets[0][0].shape[0]
    shape = moe.ExpertShape(TOP_K, experts, experts, HIDDEN, HIDDEN)
    config = moe.choose_config(tokens, shape, fp8, runs_gluon(torch.device("cuda")))
    levels = 1 if fp8 else 2
    y_dtype = torch.bfloat16 if fp8 or config.large else torch.float32

    def routed(i: int) -> Any:
        x, logits = sets[i]
        if moe.is_unrouted(tokens, experts):
            return moe.unrouted(logits, *moe.encode_rows(x, levels))
        return moe.encode(x, logits, TOP_K, True, None, experts, levels, config)

    def gate_up(i: int) -> torch.Tensor:
        packed, bias = weights[i].packed13, weights[i].w13_bias
        return moe.gate_up(
            routings[i], *packed, bias, HIDDEN, TOP_K, "swigluoai", torch.bfloat16, levels, config
        )[0]

    def down(i: int) -> torch.Tensor:
        packed, bias = weights[i].packed2, weights[i].w2_bias
        return moe.down(routings[i], acts[i], None, *packed, bias, HIDDEN, y_dtype, config, True)

    def layer(i: int) -> torch.Tensor:
        return get_kernel("triton", "moe_mxfp4")(*sets[i], *weights[i].arguments(), *options)

    routings = [routed(i) for i in range(len(weights))]
    acts = [gate_up(i) for i in range(len(weights))]
    y, out = down(0), torch.empty_like(sets[0][0])
    summands = moe.Summands(y, routings[0].topk_weights, routings[0].place)
    parts: dict[str, Callable[[int], Any]] = {
        "route": routed,
        "gate_up": gate_up,
        "down": down,
        "combine": lambda i: moe.combine(summands, TOP_K, True, out, True),
        "layer": layer,
    }
    chosen = [logits.topk(TOP_K).indices.unique().numel() for _, logits in sets]
    return parts, sum(chosen) / len(chosen)


def figures(results: Sequence[dict[str, Any]], experts: int) -> dict[str, float]:
    """Named figures: fraction of copy bandwidth of both expert kernels together.

    Layers of other than gpt-oss-20b's experts have names of their own.
    """
    layer = "" if experts == NAMED_EXPERTS else f"e{experts}."
    return {
        f"moe.{layer}b{row['batch']}.bandwidth": round(row["of_copy"]["experts"], 4)
        for row in results
        if row["batch"] in (1, 32, 128) and not row["fp8_activations"] and row["passed"]
    }


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    us, share = row["us"], row["of_copy"]
    text = (
        f"T={row['batch']:<5}{'fp8 ' if row['fp8_activations'] else 'bf16'} "
        f"experts {row['touched_experts']:5.1f} error {row['error']:.1e} "
        f"{'ok   ' if row['passed'] else 'WRONG'} route {us['route']:6.1f} "
        f"w13 {us['gate_up']:7.1f} ({share['gate_up']:4.0%}) w2 {us['down']:7.1f} "
        f"({share['down']:4.0%}) combine {us['combine']:5.1f} layer {us['layer']:7.1f} us"
    )
    for name, cell in row["baselines"].items():
        if "us" in cell:
            text += f" | {name} {cell['us']:.1f} ({cell['error']:.1e})"
        else:
            text += f" | {name}: {cell['failure'][:80]}"
    return text + (f" | x{row['speedup']:.2f}" if row["speedup"] else "")


def _bound(callables: Baseline, sets: Sequence[tuple[torch.Tensor, ...]]) -> Callable[[int], Any]:
    return lambda i: callables[i](*sets[i])


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def _time(part: Callable[[int], Any], layers: int, repeats: int) -> float:
    part(0)
    calls = [lambda i=i: part(i) for _ in range(repeats) for i in range(layers)]
    return time_graph(calls, replays=7).median
