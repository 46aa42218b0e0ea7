# SPDX-License-Identifier: MIT
"""Verification of greedy drafts, and what stays with vLLM; vLLM's kernels need a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from oss_fused.kernels.op import set_observer
from oss_fused.plugin.model_state import OssSampler
from oss_fused.plugin.rejection import OssRejectionSampler, shorten_verification

DRAFTS = 3


def _runner(kind=OssSampler, method="standard", adaptive=False):
    """Two requests with temperature 0 and prompts of 5 tokens, and one that draws."""
    sampler = kind.__new__(kind)
    sampler.max_num_reqs = 4
    sampler.compute_nans = sampler.return_sampling_mask = False
    sampler.trace_replay_state = None
    sampler.sampling_states = SimpleNamespace(
        temperature=SimpleNamespace(np=np.array([0.0, 0.0, 0.7, 0.0])),
        seeds=SimpleNamespace(gpu=torch.arange(4)),
    )
    sampler.needs_logits_processing = np.zeros(4, dtype=bool)
    sampler.get_logprobs_dims = lambda _: None
    prompts = SimpleNamespace(gpu=torch.full((4,), 5, dtype=torch.int32))
    sampler.req_states = SimpleNamespace(prefill_len=prompts)
    rejection = RejectionSampler.__new__(RejectionSampler)
    rejection.sampler, rejection.num_speculative_steps = sampler, DRAFTS
    rates = torch.tensor([1.0, 1.0, 0.0]) if method == "synthetic" else None
    rejection.synthetic_conditional_rates = rates
    drafts = SimpleNamespace(rejection_sample_method=method, enable_adaptive_verification=adaptive)
    return SimpleNamespace(
        sampler=sampler,
        rejection_sampler=rejection,
        vllm_config=SimpleNamespace(speculative_config=drafts),
        device=torch.device("cpu"),
    )


def _batch(rows=(0, 1)):
    """Request 0 has drafts 4 and 6, request 1 drafts 2, 2 and 2."""
    return SimpleNamespace(
        idx_mapping_np=np.array(rows),
        idx_mapping=torch.tensor(rows),
        input_ids=torch.tensor([1, 4, 6, 3, 2, 2, 2, 0], dtype=torch.int32),
        positions=torch.tensor([9, 10, 11, 5, 6, 7, 8, 0]),
        logits_indices=torch.arange(7),
        cu_num_logits=torch.tensor([0, 3, 7], dtype=torch.int32),
        seq_lens=torch.tensor([12, 9, 0], dtype=torch.int32),
    )


def _logits():
    return torch.nn.functional.one_hot(torch.tensor([4, 5, 7, 2, 2, 2, 6]), 8).bfloat16()


def test_right_drafts_and_a_token_more():
    runner = _runner()
    shorten_verification(runner)
    rejection = runner.rejection_sampler
    assert type(rejection) is OssRejectionSampler and rejection.arrivals is None
    launched = []
    set_observer(lambda operation, _: launched.append(operation))
    try:
        for _ in range(2):
            output = rejection(_logits(), _batch())
    finally:
        set_observer(None)
    assert launched == ["greedy_tokens", "verify_drafts"] * 2
    assert rejection.arrivals.shape == (4 * (1 + DRAFTS),)
    ids, taken = output.sampled_token_ids.tolist(), output.num_sampled.tolist()
    assert [row[:n] for row, n in zip(ids, taken)] == [[4, 5], [2, 2, 2, 6]]
    assert output.num_rejected.tolist() == [1, 0] and output.logprobs_tensors is None


def test_synthetic_acceptance():
    """Rates decide which drafts are right: the first two always, the third never."""
    runner = _runner(method="synthetic")
    shorten_verification(runner)
    output = runner.rejection_sampler(_logits(), _batch())
    ids, taken = output.sampled_token_ids.tolist(), output.num_sampled.tolist()
    assert [row[:n] for row, n in zip(ids, taken)] == [[4, 6, 7], [2, 2, 2]]
    assert output.num_rejected.tolist() == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (0, 2)},
        {"invalid": torch.zeros(7, dtype=torch.bool)},
        {"compute_nans": True},
        {"return_sampling_mask": True},
        {"trace_replay_state": 1},
        {"get_logprobs_dims": lambda _: (1, 0)},
        {"needs_logits_processing": np.array([False, True, False, False])},
    ],
)
def test_other_batches_are_vllms(change, monkeypatch):
    runner = _runner()
    shorten_verification(runner)
    monkeypatch.setattr(RejectionSampler, "__call__", lambda *_: "vLLM's")
    batch, invalid = _batch(change.pop("rows", (0, 1))), change.pop("invalid", None)
    vars(runner.sampler).update(change)
    assert runner.rejection_sampler(_logits(), batch, None, invalid) == "vLLM's"


@pytest.mark.parametrize("changes", [{"kind": Sampler}, {"method": "fly"}, {"adaptive": True}])
def test_other_methods_are_vllms(changes):
    runner = _runner(**changes)
    shorten_verification(runner)
    assert type(runner.rejection_sampler) is RejectionSampler


def test_without_drafts():
    shorten_verification(
        SimpleNamespace(
            rejection_sampler=None, vllm_config=SimpleNamespace(speculative_config=None)
        )
    )
