# SPDX-License-Identifier: MIT
"""Which of the package's kernels would help which nodes of a model, and by how much at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oss_fused.analysis.graph import ComputationGraphAnalyzer, Graph
from oss_fused.analysis.trace import GraphNode

# bytes of a weight in MXFP4 and in FP8, of one in bf16: 4 bits and a scale of 8 for 32 of them
_MXFP4, _FP8 = 4.25 / 16, 0.5


@dataclass(frozen=True)
class _Rule:
    """Nodes that ``matches`` holds for; bytes after = keep * (memory - (1 - weights) * weights)."""

    kernel: str
    effect: str
    matches: Callable[[GraphNode], bool]
    weights: float = 1.0
    keep: float = 1.0
    # a product is one kernel already, and its operators' copies are not what a server would run
    product: bool = False
    fp8: bool = False


def _type_ends(*ends: str) -> Callable[[GraphNode], bool]:
    return lambda node: node.type.endswith(ends)


# the first rule that matches a node counts
RULES = (
    _Rule(
        "moe_mxfp4",
        "expert weights in MXFP4: 4.25 bits instead of 16",
        _type_ends("Experts"),
        weights=_MXFP4,
        product=True,
    ),
    _Rule("moe_route", "scores, top-k and softmax in one kernel", _type_ends("Router")),
    _Rule(
        "fp8_linear",
        "FP8 weights and activations: half the bytes, twice the FLOP/s",
        _type_ends("Linear"),
        weights=_FP8,
        product=True,
        fp8=True,
    ),
    _Rule(
        "add_rms_norm_quant",
        "residual, norm and quantisation in one pass over the row",
        _type_ends("RMSNorm"),
    ),
    _Rule(
        "flash_attention",
        "no matrix of scores in memory; qkv_rope_kv and decode_attention when serving",
        _type_ends("Attention"),
    ),
    _Rule(
        "gated_mlp",
        "activation and product inside the projections' kernel",
        lambda node: node.type.endswith("Activation") or node.type in ("SiLU", "GELU"),
        keep=0.0,
    ),
    # gate and up stay in registers: of three tensors the result is left
    _Rule(
        "gated_mlp",
        "activation and product inside the projections' kernel",
        _type_ends("MLP"),
        keep=1 / 3,
    ),
    _Rule("layer_norm", "one pass over the row", _type_ends("LayerNorm")),
    _Rule("softmax", "one pass over the row", _type_ends("Softmax")),
    _Rule("conv2d", "no buffer of expanded windows", _type_ends("Conv2d"), product=True),
)


@dataclass(frozen=True)
class KernelAdvice:
    """One kernel and the nodes it would replace; times in seconds, at the device's roofs.

    The saving is the most there is to gain: a kernel below its roof saves less, launches that go
    away save more.
    """

    kernel: str
    effect: str
    nodes: tuple[GraphNode, ...]
    bytes_saved: float
    seconds_before: float
    seconds_saved: float


def advise(analyzer: ComputationGraphAnalyzer, graph: Graph) -> list[KernelAdvice]:
    """What each kernel would save, the largest saving of time first.

    Args:
        analyzer: whose roofs and dtype count.
        graph: of the model as it is.
    """
    found: dict[str, list[tuple[GraphNode, _Rule]]] = {}
    for node in graph.nodes:
        rule = next((rule for rule in RULES if rule.matches(node)), None)
        if rule is not None:
            found.setdefault(rule.kernel, []).append((node, rule))
    advice = [_sum(analyzer, kernel, pairs) for kernel, pairs in found.items()]
    return sorted(advice, key=lambda one: -one.seconds_saved)


def _sum(
    analyzer: ComputationGraphAnalyzer, kernel: str, pairs: list[tuple[GraphNode, _Rule]]
) -> KernelAdvice:
    roofs = analyzer.ceilings
    peak = roofs.tflops.get(analyzer.dtype, max(roofs.tflops.values()))
    fast = roofs.tflops.get("float8_e4m3fn", peak)
    before = after = saved = 0.0
    for node, rule in pairs:
        now = node.memory if rule.product else max(node.eager_memory, node.memory)
        then = rule.keep * (node.memory - (1 - rule.weights) * node.weights)
        saved += now - then
        before += _seconds(node.flops, now, peak, roofs.bandwidth_gbps)
        after += _seconds(node.flops, then, fast if rule.fp8 else peak, roofs.bandwidth_gbps)
    nodes = tuple(node for node, _ in pairs)
    return KernelAdvice(kernel, pairs[0][1].effect, nodes, saved, before, before - after)


def _seconds(flops: float, num_bytes: float, tflops: float, gbps: float) -> float:
    return max(flops / (tflops * 1e12), num_bytes / (gbps * 1e9))
