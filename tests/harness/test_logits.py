# SPDX-License-Identifier: MIT
"""The streamed reference against transformers' whole model; KL of logits; rows of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.logits_reference import hidden_states
from harness.logits_worker import Recorder, compare, read_head
from torch import nn

from tests.plugin.conftest import build, to_mxfp4

TOKENS = torch.tensor([[3, 17, 42, 99, 5], [77, 23, 54, 61, 8]])


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_streamed_layers_equal_the_whole_model(family, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = build(tmp_path, family)
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = whole.model(input_ids=TOKENS, use_cache=False).last_hidden_state
        logits = whole(input_ids=TOKENS, use_cache=False).logits
    actual = hidden_states(str(folder), TOKENS, torch.bfloat16)
    assert torch.equal(actual, expected.float())
    again = actual @ read_head(str(folder), TOKENS.device).T
    torch.testing.assert_close(again, logits.float(), atol=2e-2, rtol=1e-2)


def test_mxfp4_experts_are_dequantised(tmp_path):
    dense, packed = build(tmp_path / "bf16", "gpt_oss"), build(tmp_path / "mxfp4", "gpt_oss")
    to_mxfp4(packed)
    exact = hidden_states(str(dense), TOKENS, torch.float32)
    rounded = hidden_states(str(packed), TOKENS, torch.float32)
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.5


def test_kl_of_equal_logits_is_zero_and_of_others_positive():
    reference = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]])
    result = compare(reference, other)
    assert result[0].tolist() == [0.0, 1.0]
    p, q = reference[1].softmax(0), other[1].softmax(0)
    assert result[1, 0].item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    assert result[1, 1].item() == 0.0


class Echo(nn.Module):
    """A model whose states are its input's, in whatever order and number rows come."""

    def __init__(self, states: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        self.states, self.head = states, head

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = [int((TOKENS[:, p] == t).nonzero()[0]) for t, p in zip(input_ids, positions)]
        return self.states[torch.tensor(rows), positions]

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(states @ self.head.T, (0, 2))  # a padded vocabulary


def test_rows_are_matched_by_position_and_token():
    torch.manual_seed(0)
    states, head = torch.randn(2, 5, 8), torch.randn(11, 8)
    model = Echo(states, head)
    recorder = Recorder(model, TOKENS.numpy(), head)
    model(input_ids=TOKENS[0, :2], positions=torch.arange(2))  # before start: ignored
    recorder.start(states)
    order = np.random.default_rng(0).permutation(10)
    ids, positions = TOKENS.flatten()[order], torch.arange(10)[order] % 5
    model(input_ids=ids[:7], positions=positions[:7])
    with pytest.raises(ValueError, match="7 of 10"):
        recorder.figures()
    model(input_ids=ids[5:], positions=positions[5:])
    figures = recorder.figures()
    assert figures["positions"] == 10 and figures["top1_agreement"] == 1.0
    assert figures["kl"] == pytest.approx(0.0, abs=1e-6)
