# SPDX-License-Identifier: MIT
"""The computation graph of a model: FLOPs, bytes, bottlenecks, communication and its overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn

from oss_fused.analysis.trace import GraphNode, Trace
from oss_fused.bench.roofline import Ceilings, measure_ceilings
from oss_fused.errors import SchemeError
from oss_fused.kernels.checks import check_sizes

LARGE_BYTES = 100 * 10**6
_LISTED = 5
# layers whose outputs tensor parallelism adds up over the ranks, by the end of their name
REDUCED = ("o_proj", "out_proj", "down_proj", "experts")
# pieces in which a result can be sent while the rest of it is computed
_PIECES = 4


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they ran, and edges (from id, to id) of data dependencies."""

    nodes: tuple[GraphNode, ...]
    edges: frozenset[tuple[int, int]]

    @property
    def flops(self) -> int:
        """FLOPs of all nodes."""
        return sum(node.flops for node in self.nodes)

    @property
    def memory(self) -> int:
        """Bytes moved by all nodes."""
        return sum(node.memory for node in self.nodes)


class CommunicationStep(TypedDict):
    """A node with a collective behind it; times in seconds.

    ``prev_overlap`` is what pieces of the node's own result can hide, sent while the rest is
    computed; ``next_overlap`` what later nodes that do not wait for the result can hide;
    ``estimated_savings`` both, at most the collective's time.
    """

    comm_node: str
    prev_overlap: float
    next_overlap: float
    estimated_savings: float


class ComputationGraphAnalyzer:
    """Runs a model once and says where its FLOPs, bytes and messages are.

    Args:
        ceilings: roofs of the device to judge by; default: measured on this machine at first use.
        dtype: which of the roofs' FLOP/s counts.
        world_size: ranks that share the model.
        link_gbps: bytes per second * 1e9 that a rank sends, for the schedule.

    Raises:
        ShapeMismatchError: ``world_size`` below 1.
    """

    def __init__(
        self,
        ceilings: Ceilings | None = None,
        dtype: str = "bfloat16",
        world_size: int = 2,
        link_gbps: float = 450.0,
    ) -> None:
        """Keep the settings; there is no graph yet."""
        check_sizes(1, world_size=world_size)
        self._ceilings = ceilings
        self.dtype, self.world_size, self.link_gbps = dtype, world_size, link_gbps
        self.graph: Graph | None = None

    @property
    def ceilings(self) -> Ceilings:
        """The roofs, measured on first use."""
        if self._ceilings is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._ceilings = measure_ceilings(device, (getattr(torch, self.dtype),))
        return self._ceilings

    def build_graph_from_model(self, model: nn.Module, sample: Any) -> Graph:
        """Run ``model`` on ``sample`` without gradients and record its nodes and edges.

        Meta tensors give shapes, FLOPs and bytes without weights or arithmetic.

        Args:
            model: any module.
            sample: its argument; a tuple of arguments; or a dict of keyword arguments.

        Returns:
            The graph, also kept as ``graph``. What the model raises passes through; its hooks are
            gone then, too.
        """
        args = () if isinstance(sample, Mapping) else sample
        args = args if isinstance(args, tuple) else (args,)
        kwargs = dict(sample) if isinstance(sample, Mapping) else {}
        trace = Trace(model)
        with trace.running():
            output = model(*args, **kwargs)
        trace.finish(output)
        self.graph = Graph(tuple(trace.nodes), frozenset(trace.edges))
        return self.graph

    def seconds(self, node: GraphNode) -> float:
        """Time of a node at its roof."""
        roofs = self.ceilings
        peak = roofs.tflops.get(self.dtype, max(roofs.tflops.values()))
        return max(node.flops / (peak * 1e12), node.memory / (roofs.bandwidth_gbps * 1e9))

    def identify_bottlenecks(self) -> dict[str, list[GraphNode]]:
        """Nodes that matter, by their FLOPs per byte against the roofs' ridge.

        Returns:
            "compute_bound": the five of the highest intensity above the ridge; "memory_bound": the
            five of the lowest below it, without nodes that compute nothing; "large_memory": nodes
            that move over 100 MB, largest first.

        Raises:
            SchemeError: no graph was built.
        """
        roofs = self.ceilings
        peak = roofs.tflops.get(self.dtype, max(roofs.tflops.values()))
        ridge = peak * 1e3 / roofs.bandwidth_gbps
        busy = sorted(
            (node for node in self._built().nodes if node.flops and node.memory),
            key=lambda node: node.intensity,
        )
        large = [node for node in self._built().nodes if node.memory > LARGE_BYTES]
        return {
            "compute_bound": [n for n in reversed(busy) if n.intensity >= ridge][:_LISTED],
            "memory_bound": [n for n in busy if n.intensity < ridge][:_LISTED],
            "large_memory": sorted(large, key=lambda node: -node.memory),
        }

    def analyze_communication_overhead(self, config: Mapping[str, int]) -> dict[str, float]:
        """Bytes that each rank sends for one pass of a model split over ``world_size`` ranks.

        Args:
            config: "seq_len", "hidden_dim", "num_heads"; optional "num_layers" (1), "batch_size"
                (1), "element_bytes" (2).

        Returns:
            "all_reduce", "all_gather", "reduce_scatter": one collective over an activation.
            "tensor_parallel": two ring all-reduces a layer. "sequence_parallel": each of them as a
            reduce-scatter and an all-gather, norms and residuals split over tokens (Korthikanti et
            al. 2022): the same bytes. "pipeline_parallel": one activation to the next stage.

        Raises:
            SchemeError: a size is missing or unknown, or heads do not divide among the ranks.
            ShapeMismatchError: a size below 1.
        """
        needed = {"seq_len", "hidden_dim", "num_heads"}
        optional = {"num_layers": 1, "batch_size": 1, "element_bytes": 2}
        if not needed <= config.keys() <= needed | optional.keys():
            raise SchemeError(
                f"config={sorted(config)}: expected {sorted(needed)} and of {sorted(optional)}"
            )
        sizes = {**optional, **config}
        check_sizes(1, **sizes)
        ranks = self.world_size
        if sizes["num_heads"] % ranks:
            raise SchemeError(
                f"num_heads={sizes['num_heads']}: expected a multiple of world_size={ranks}"
            )
        volume = sizes["batch_size"] * sizes["seq_len"] * sizes["hidden_dim"]
        volume *= sizes["element_bytes"]
        reduce = ring_bytes("all_reduce", volume, ranks)
        half = ring_bytes("all_gather", volume, ranks)
        return {
            "all_reduce": reduce,
            "all_gather": half,
            "reduce_scatter": ring_bytes("reduce_scatter", volume, ranks),
            "tensor_parallel": 2 * sizes["num_layers"] * reduce,
            "sequence_parallel": 4 * sizes["num_layers"] * half,
            "pipeline_parallel": float(volume) if ranks > 1 else 0.0,
        }

    def optimize_communication_schedule(
        self, graph: Graph, reduced: Sequence[str] = REDUCED
    ) -> list[CommunicationStep]:
        """How much of each all-reduce can overlap with computation, at the roofs of the device.

        Args:
            graph: of the whole model; its nodes' work is divided by ``world_size``.
            reduced: ends of the names of nodes with an all-reduce behind them.
        """
        steps = []
        readers: dict[int, set[int]] = {}
        for source, target in graph.edges:
            readers.setdefault(source, set()).add(target)
        for node in graph.nodes:
            if not node.name.endswith(tuple(reduced)):
                continue
            volume = torch.Size(_first(node.output_shape)).numel()
            volume *= getattr(torch, self.dtype).itemsize
            wire = ring_bytes("all_reduce", volume, self.world_size) / (self.link_gbps * 1e9)
            before = min(wire, self.seconds(node) / self.world_size) * (1 - 1 / _PIECES)
            waiting = readers.get(node.id, set())
            free = 0.0
            for later in graph.nodes[node.id + 1 :]:
                if later.id in waiting:
                    break
                free += self.seconds(later) / self.world_size
            after = min(wire - before, free)
            steps.append(
                CommunicationStep(
                    comm_node=node.name,
                    prev_overlap=before,
                    next_overlap=after,
                    estimated_savings=before + after,
                )
            )
        return steps

    def _built(self) -> Graph:
        if self.graph is None:
            raise SchemeError("graph=None: expected build_graph_from_model to be called before")
        return self.graph


def _first(output_shape: Any) -> tuple[int, ...]:
    """The shape of a node's first output."""
    several = bool(output_shape) and not isinstance(output_shape[0], int)
    return output_shape[0] if several else output_shape


def ring_bytes(collective: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each rank sends in a ring collective over a tensor of ``num_bytes``.

    ``num_bytes`` is the whole tensor: of an all-gather its result, of a reduce-scatter its input.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".

    Raises:
        SchemeError: another collective than all_reduce, all_gather, reduce_scatter.
    """
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    if collective not in rounds:
        raise SchemeError(f"collective={collective!r}: expected one of {', '.join(rounds)}")
    return rounds[collective] * (ranks - 1) / ranks * num_bytes
