# SPDX-License-Identifier: MIT
"""Greedy drafts are picked from the draft model's own vocabulary, and stay the same drafts.

Which heads get the decode attention of this package stands here, too.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from oss_fused.layers.vllm.attention import OssAttentionImpl
from oss_fused.plugin import drafts
from oss_fused.plugin.drafts import adopt_head_attention, pick_from_own_vocabulary
from tests.plugin.test_attention_impl import Layer, implementation

HIDDEN, KNOWN, ALL = 8, 5, 12


def _speculator(kind=EagleSpeculator, known=KNOWN, scale=1.0, ranks=1, **changes):
    """A speculator of an EAGLE-3 head that knows ``known`` of the target's tokens."""
    generator = torch.Generator().manual_seed(0)
    model = Eagle3LlamaForCausalLM.__new__(Eagle3LlamaForCausalLM)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vocab_size=ALL, draft_vocab_size=known)
    weight = torch.randn(known, HIDDEN, generator=generator)
    model.lm_head = torch.nn.Identity()
    model.lm_head.tp_size = ranks
    model.lm_head.shard_indices = SimpleNamespace(num_org_vocab_padding=0, org_vocab_start_index=0)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, changes.get("padding", 0)), value=9.0)
    model.lm_head.quant_method = SimpleNamespace(apply=lambda _, x, bias=None: x @ weight.T)
    processor = model.logits_processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.scale, processor.soft_cap, processor.head_dtype = scale, None, None
    processor.logits_as_input, processor.org_vocab_size = False, known
    ids = torch.tensor([1, 4, 5, 9, 11])
    offsets = ids - torch.arange(KNOWN) if known < ALL else None
    model.draft_id_to_target_id = offsets
    speculator = kind.__new__(kind)
    speculator.model, speculator.use_local_argmax_reduction = model, False
    speculator.max_num_reqs = 8
    speculator.draft_logits = changes.get("logits")
    speculator.acceptance_estimator = changes.get("estimator")
    return speculator


def _drafts(speculator):
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    none = [None] * 5
    return speculator.sample_draft(hidden, *none, speculator.draft_logits)


@pytest.mark.parametrize("padding", [0, 3])
def test_the_same_drafts(padding, monkeypatch):
    before = _drafts(_speculator())
    speculator = _speculator(padding=padding)
    pick_from_own_vocabulary(speculator)
    assert speculator.use_local_argmax_reduction
    monkeypatch.setattr(Eagle3LlamaForCausalLM, "compute_logits", None)
    for _ in range(2):
        assert torch.equal(_drafts(speculator), before)
    assert len(before.unique()) > 1 and set(before.tolist()) <= {1, 4, 5, 9, 11}


def test_ranks_that_share_the_head_compare_as_in_vllm():
    speculator = _speculator(ranks=2)
    pick_from_own_vocabulary(speculator)
    assert speculator.use_local_argmax_reduction
    assert "get_top_tokens" not in vars(speculator.model)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": NgramGPUSpeculator},
        # as many tokens as the target
        {"known": ALL},
        {"scale": -1.0},
        # sampled drafts, and predicted acceptance, need all logits
        {"logits": torch.zeros(1)},
        {"estimator": object()},
    ],
)
def test_all_logits_where_they_are_needed(changes):
    speculator = _speculator(**changes)
    pick_from_own_vocabulary(speculator)
    assert not speculator.use_local_argmax_reduction


def test_no_drafts():
    pick_from_own_vocabulary(None)


def _runner(speculator, **options):
    return SimpleNamespace(
        speculator=speculator,
        vllm_config=SimpleNamespace(
            additional_config={"oss_fused": options},
            parallel_config=SimpleNamespace(),
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        ),
    )


def test_a_heads_attention_is_compiled_before_it_serves(monkeypatch):
    prepared = []
    monkeypatch.setattr(
        OssAttentionImpl, "process_weights_after_loading", lambda *args: prepared.append(args)
    )
    speculator = _speculator()
    speculator.model.attention = Layer(implementation())
    for times in (1, 2):
        # caches are set up twice
        adopt_head_attention(_runner(speculator))
        impl = speculator.model.attention.impl
        assert type(impl) is OssAttentionImpl and impl.max_queries == 4
        assert prepared == [(impl, torch.bfloat16)] * times


@pytest.mark.parametrize(
    ("speculator", "options"),
    [
        (None, {}),
        (NgramGPUSpeculator.__new__(NgramGPUSpeculator), {}),
        (EagleSpeculator.__new__(EagleSpeculator), {"attention_kernels": "vllm"}),
    ],
)
def test_other_attention_is_left_alone(speculator, options, monkeypatch):
    monkeypatch.setattr(drafts, "adopt_attention", None)
    adopt_head_attention(_runner(speculator, **options))
