# SPDX-License-Identifier: MIT
"""Whole-model analysis: nodes, FLOPs, bytes, edges; bottlenecks; communication; advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from oss_fused.analysis.advice import RULES, advise
from oss_fused.analysis.graph import ComputationGraphAnalyzer, ring_bytes
from oss_fused.bench.roofline import Ceilings
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.op import operations

# ridge at 100 FLOPs per byte
ROOFS = Ceilings("test", 1000.0, {"float32": 100.0, "float8_e4m3fn": 200.0})


def analyzer(**options):
    return ComputationGraphAnalyzer(ROOFS, "float32", **options)


def built(model, sample):
    graph = analyzer().build_graph_from_model(model, sample)
    return graph, {(node.name, node.called): node for node in graph.nodes}


def test_nodes_flops_bytes_and_edges():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    graph, _ = built(model, torch.randn(3, 8))
    assert [(n.id, n.name, n.type) for n in graph.nodes] == [
        (0, "0", "Linear"),
        (1, "1", "ReLU"),
        (2, "2", "Linear"),
    ]
    first, relu, last = graph.nodes
    assert first.input_shapes == ((3, 8),) and first.output_shape == (3, 16)
    assert (first.flops, relu.flops, last.flops) == (2 * 3 * 8 * 16, 48, 2 * 3 * 16 * 4)
    assert first.weights == 4 * (8 * 16 + 16) and last.weights == 4 * 16 * 4
    assert first.memory == first.weights + 4 * (3 * 8 + 3 * 16)
    assert relu.memory == 4 * 2 * 48 and last.memory == last.weights + 4 * (48 + 12)
    assert graph.edges == {(0, 1), (1, 2)}
    assert graph.flops == sum(n.flops for n in graph.nodes)
    assert graph.memory == sum(n.memory for n in graph.nodes)


class Residual(nn.Module):
    """Work of its own around two calls of one child."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = x + self.lin(x)
        y = self.lin(y) * y
        return {"out": (y, y.sum(0)), "n": 3}


def test_repeated_modules_own_work_and_nested_outputs():
    graph, nodes = built(Residual(), torch.randn(4, 8))
    assert [(n.name, n.called) for n in graph.nodes] == [("lin", 0), ("", 0), ("lin", 1), ("", 1)]
    add, mul = nodes["", 0], nodes["", 1]
    assert add.type == "Residual"
    assert (add.flops, add.memory) == (32, 4 * 3 * 32)
    assert graph.edges == {(0, 1), (1, 2), (1, 3), (2, 3)}
    # reads two, writes the product and the sum; the operators one by one read the product again
    assert (mul.flops, mul.memory) == (64, 4 * (3 * 32 + 8))
    assert mul.eager_memory == mul.memory + 4 * 32


def test_tuples_of_outputs_and_keyword_arguments():
    model = nn.LSTM(4, 6, batch_first=True)
    graph, _ = built(model, (torch.randn(2, 5, 4),))
    (node,) = graph.nodes
    assert node.output_shape == ((2, 5, 6), (1, 2, 6), (1, 2, 6)) and node.flops > 0

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, *, x, scale=2.0):
            return self.act(x) * scale

    graph, nodes = built(Named(), {"x": torch.randn(3), "scale": 4.0})
    assert nodes["act", 0].output_shape == (3,)


def test_views_are_free_and_expanded_dimensions_count_once():
    class Broadcast(nn.Module):
        def forward(self, x):
            return x.view(2, 4).t()[1:] * x[:1].expand(3, 2)

    graph, _ = built(Broadcast(), torch.randn(8))
    (node,) = graph.nodes
    assert (node.flops, node.memory) == (6, 4 * (6 + 1 + 6))


def test_a_result_is_written_once_however_it_is_read():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = self.lin(x)
            return y.sum() + y.view(2, 16).max()

    _, nodes = built(Twice(), torch.randn(4, 8))
    assert nodes["lin", 0].memory == 4 * (64 + 32 + 32)


def test_attention_counts_in_its_container():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(q, k, v)

    _, nodes = built(Attention(), torch.randn(2, 10, 16))
    node = nodes["", 0]
    assert node.type == "Attention"
    assert 4 * 2 * 2 * 10 * 10 * 8 <= node.flops <= 1.5 * 4 * 2 * 2 * 10 * 10 * 8
    assert node.memory == node.eager_memory == 4 * 4 * 2 * 10 * 16


class Experts(nn.Module):
    """Weights of eight experts; the tokens' choice is read from ``ids``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, 10))

    def forward(self, x, ids):
        return torch.bmm(x[:, None], self.weight[ids])[:, 0]


def test_only_active_experts_count():
    expert = 6 * 10 * 4
    for tokens, read in ((1, 1), (3, 3), (50, 8)):
        sample = (torch.randn(tokens, 6), torch.arange(tokens) % 8)
        graph, _ = built(Experts(), sample)
        (node,) = graph.nodes
        assert node.weights == read * expert
        assert node.flops == 2 * tokens * 6 * 10
        on_meta = tuple(tensor.to("meta") for tensor in sample)
        (meta,) = built(Experts().to("meta"), on_meta)[0].nodes
        assert (meta.flops, meta.memory, meta.weights) == (node.flops, node.memory, node.weights)


def test_embedding_reads_rows_not_the_table():
    graph, _ = built(nn.Embedding(1000, 16), torch.tensor([[1, 2, 3]]))
    (node,) = graph.nodes
    assert (node.flops, node.weights) == (0, 3 * 16 * 4)
    assert node.memory == 2 * 3 * 16 * 4 + 3 * 8


def test_our_products_count_as_products():
    from oss_fused import FP8Linear

    linear = nn.Linear(32, 48, bias=False)
    (plain,) = built(linear, torch.randn(5, 32))[0].nodes
    (ours,) = built(FP8Linear.from_linear(linear), torch.randn(5, 32))[0].nodes
    assert plain.flops <= ours.flops < 1.2 * plain.flops
    assert ours.weights < plain.weights / 2


def test_hooks_go_and_no_gradient_is_kept():
    class Fails(nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.lin, self.fails = nn.Linear(4, 4), fails

        def forward(self, x):
            y = self.lin(x)
            assert not torch.is_grad_enabled() and not y.requires_grad
            if self.fails:
                raise KeyError("no such thing")
            return y

    for fails in (False, True):
        model, tool = Fails(fails), analyzer()
        if fails:
            with pytest.raises(KeyError, match="no such thing"):
                tool.build_graph_from_model(model, torch.randn(2, 4))
            assert tool.graph is None
        else:
            tool.build_graph_from_model(model, torch.randn(2, 4))
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert torch.is_grad_enabled() and (torch.ones(1) + 1).item() == 2


def test_bottlenecks_by_intensity_and_size():
    wide = [nn.Linear(1024, 1024, bias=False) for _ in range(7)]
    model = nn.Sequential(*wide, *(nn.ReLU() for _ in range(7))).to("meta")
    tool = analyzer()
    with pytest.raises(SchemeError, match="build_graph_from_model"):
        tool.identify_bottlenecks()
    tool.build_graph_from_model(model, torch.empty(2**15, 1024, device="meta"))
    found = tool.identify_bottlenecks()
    assert [len(found[k]) for k in ("compute_bound", "memory_bound", "large_memory")] == [5, 5, 14]
    assert {n.type for n in found["compute_bound"]} == {"Linear"}
    assert {n.type for n in found["memory_bound"]} == {"ReLU"}
    assert found["large_memory"][0].memory == max(n.memory for n in tool.graph.nodes)
    # a row at a time every product waits for its weights
    tool.build_graph_from_model(model, torch.empty(1, 1024, device="meta"))
    found = tool.identify_bottlenecks()
    assert not found["compute_bound"] and not found["large_memory"]
    assert tool.seconds(tool.graph.nodes[0]) == pytest.approx(tool.graph.nodes[0].memory / 1e12)


def test_communication_volumes():
    config = {"seq_len": 100, "hidden_dim": 64, "num_heads": 8}
    volume = 100 * 64 * 2
    found = analyzer(world_size=4).analyze_communication_overhead(config)
    assert found["all_reduce"] == 2 * 3 / 4 * volume
    assert found["all_gather"] == found["reduce_scatter"] == 3 / 4 * volume
    assert found["tensor_parallel"] == 2 * found["all_reduce"] == found["sequence_parallel"]
    assert found["pipeline_parallel"] == volume
    more = {**config, "num_layers": 3, "batch_size": 2, "element_bytes": 4}
    assert (
        analyzer(world_size=4).analyze_communication_overhead(more)["tensor_parallel"]
        == 3 * 2 * 2 * found["tensor_parallel"]
    )
    assert set(analyzer(world_size=1).analyze_communication_overhead(config).values()) == {0.0}
    for bad, words in (
        ({"seq_len": 1}, "hidden_dim"),
        ({**config, "colour": 1}, "colour"),
        ({**config, "num_heads": 6}, "num_heads=6"),
    ):
        with pytest.raises(SchemeError, match=words):
            analyzer(world_size=4).analyze_communication_overhead(bad)
    with pytest.raises(ShapeMismatchError, match="seq_len=0"):
        analyzer().analyze_communication_overhead({**config, "seq_len": 0})
    with pytest.raises(SchemeError, match="collective='gossip'"):
        ring_bytes("gossip", 8, 2)
    with pytest.raises(ShapeMismatchError, match="world_size=0"):
        analyzer(world_size=0)


class Branches(nn.Module):
    """o_proj's sum is waited for at once, down_proj's only after another product."""

    def __init__(self):
        super().__init__()
        self.o_proj, self.down_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.o_proj(x)
        z = self.down_proj(y)
        return self.last(z + self.other(y))


def test_schedule_hides_what_does_not_wait():
    tool = analyzer(world_size=2, link_gbps=1e-3)
    graph = tool.build_graph_from_model(Branches(), torch.randn(32, 64))
    steps = {step["comm_node"]: step for step in tool.optimize_communication_schedule(graph)}
    assert list(steps) == ["o_proj", "down_proj"]
    by_name = {node.name: node for node in graph.nodes}
    half = {name: tool.seconds(node) / 2 for name, node in by_name.items()}
    assert steps["o_proj"]["prev_overlap"] == pytest.approx(0.75 * half["o_proj"])
    assert steps["o_proj"]["next_overlap"] == 0
    assert steps["down_proj"]["next_overlap"] == pytest.approx(half["other"])
    for step in steps.values():
        total = step["prev_overlap"] + step["next_overlap"]
        assert step["estimated_savings"] == pytest.approx(total)
    # a link that is fast leaves little to hide
    wire = ring_bytes("all_reduce", 32 * 64 * 4, 2)
    quick = analyzer(world_size=2, link_gbps=1e9).optimize_communication_schedule(graph)
    assert quick[1]["estimated_savings"] == pytest.approx(wire / 1e18)


def test_advice_names_kernels_that_exist_and_counts_what_they_save():
    known = set(operations("torch"))
    assert {rule.kernel for rule in RULES} <= known

    class RMSNorm(nn.Module):
        def forward(self, x):
            return x * x.pow(2).mean(-1, keepdim=True).rsqrt()

    model = nn.Sequential(RMSNorm(), nn.Linear(512, 512, bias=False))
    tool = analyzer()
    graph = tool.build_graph_from_model(model, torch.randn(4, 512))
    norm, linear = graph.nodes
    found = {one.kernel: one for one in advise(tool, graph)}
    assert found.keys() == {"add_rms_norm_quant", "fp8_linear"}
    assert found["fp8_linear"].nodes == (linear,)
    assert found["fp8_linear"].bytes_saved == linear.weights / 2
    assert found["fp8_linear"].seconds_saved == pytest.approx(linear.weights / 2 / 1e12)
    assert found["add_rms_norm_quant"].bytes_saved == norm.eager_memory - norm.memory > 0
    saved = [one.seconds_saved for one in advise(tool, graph)]
    assert saved == sorted(saved, reverse=True)
