# SPDX-License-Identifier: MIT
"""Experts over two processes, by tensor and by expert: the summed shares are the whole layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from tests.plugin.conftest import quantize_rows

EXPERTS, HIDDEN, INNER, TOP_K = 4, 128, 96, 2


class Layer(GptOssRoutedExperts):
    """What a method sees of vLLM's layer, on rank ``rank`` of ``ranks``."""

    def __init__(self, rank, ranks, by_expert):
        torch.nn.Module.__init__(self)
        tp = 1 if by_expert else ranks
        self.moe_config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(tp_rank=rank % tp, tp_size=tp),
            hidden_dim_unpadded=HIDDEN,
            intermediate_size_per_partition_unpadded=INNER // tp,
        )
        self.local = EXPERTS // ranks if by_expert else EXPERTS
        self.first = rank * self.local if by_expert else 0
        self.global_num_experts, self.top_k, self.renormalize = EXPERTS, TOP_K, True
        self.activation = MoEActivation.SWIGLUOAI
        self.inner = INNER // tp
        ids = torch.arange(EXPERTS, dtype=torch.int32) - self.first
        ids[(ids < 0) | (ids >= self.local)] = -1
        self._expert_map = ids if by_expert else None

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert if self._expert_map is None else int(self._expert_map[expert])


def checkpoint(layout):
    """(name, expert or None, tensor) as a checkpoint of gpt-oss holds them."""
    torch.manual_seed(5)
    tensors = [
        ("w13_bias", None, torch.randn(EXPERTS, 2 * INNER).bfloat16()),
        ("w2_bias", None, torch.randn(EXPERTS, HIDDEN).bfloat16()),
    ]
    for name, n, k in (("w13", 2 * INNER, HIDDEN), ("w2", HIDDEN, INNER)):
        if layout == "mxfp4":
            blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 122, (EXPERTS, n, k // 32), dtype=torch.uint8)
            tensors += [(f"{name}_weight", None, blocks), (f"{name}_weight_scale", None, scales)]
            continue
        for expert in range(EXPERTS):
            codes, scale = quantize_rows(torch.randn(n, k) / k**0.5)
            tensors.append((f"{name}_weight", expert, codes))
            tensors.append((f"{name}_weight_scale", expert, scale))
    return tensors


def make_method(layout):
    from oss_fused.layers.vllm.experts import fp8 as experts
    from oss_fused.layers.vllm.experts import mxfp4 as experts_mxfp4

    moe = SimpleNamespace(
        has_bias=True, in_dtype=torch.bfloat16, moe_parallel_config=None, is_lora_enabled=False
    )
    for module in (experts, experts_mxfp4):
        module.max_routed_tokens = lambda moe: 16
    if layout == "mxfp4":
        return experts_mxfp4.OssMxfp4MoEMethod(moe, "experts")
    return experts.OssFp8MoEMethod(moe, "experts")


def run_rank(layout, rank, ranks, by_expert):
    layer, method = Layer(rank, ranks, by_expert), make_method(layout)
    layer.quant_method = method
    inner = layer.inner if layout == "fp8" else -(-layer.inner // 32) * 32
    method.create_weights(layer, layer.local, HIDDEN, inner, torch.bfloat16)
    for name, expert, tensor in checkpoint(layout):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, weight_name=f"experts.{name}", expert_id=expert)
    method.process_weights_after_loading(layer)
    torch.manual_seed(9)
    x = torch.randn(7, HIDDEN).bfloat16()
    logits = 3 * torch.randn(7, EXPERTS).bfloat16()
    return method.apply_monolithic(layer, x, logits).float()


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for layout in ("mxfp4", "fp8"):
        whole = run_rank(layout, 0, 1, False)
        for by_expert in (False, True):
            total = run_rank(layout, rank, 2, by_expert)
            dist.all_reduce(total)
            # FP8: a rank quantises its own columns of the intermediate; else rounding to bf16
            limit = 0.05 if layout == "fp8" and not by_expert else 0.01
            error = ((total - whole).norm() / whole.norm()).item()
            assert error < limit, (layout, by_expert, error)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(work, (tmp_path / "store",), nprocs=2)
