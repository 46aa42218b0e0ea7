# SPDX-License-Identifier: MIT
"""Which positions are compared and in which steps they are read, with a stand-in engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import kv_cache_worker
from harness.kv_cache_worker import Reader, measure
from torch import nn

VOCAB, HIDDEN, BLOCK = 23, 8, 4


class Model(nn.Module):
    """States depend on the token, and by ``noise`` on what the cache is."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.noise = noise
        self.steps: list[int] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.steps.append(len(input_ids))
        return self.table[input_ids] + self.noise * torch.sin(positions.float())[:, None]

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.head


class Engine:
    """An engine that keeps whole blocks of prompts, until they are reset."""

    def __init__(self, noise: float, keeps: bool = True) -> None:
        self.net, self.keeps, self.cached = Model(noise), keeps, 0
        config = SimpleNamespace(long_prefill_token_threshold=0)
        self.config = config
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=SimpleNamespace(scheduler_config=config))
        )
        runner = SimpleNamespace(model=self.net)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.left: list[int] = []

    def reset_prefix_cache(self) -> None:
        self.cached = 0

    def add_request(self, name: str, prompt: dict, parameters: object) -> None:
        ids = prompt["prompt_token_ids"]
        self.at = min(self.cached, len(ids) - 1)
        self.left = ids[self.at :]
        self.cached = len(ids) // BLOCK * BLOCK if self.keeps else 0

    def abort_request(self, names: list[str]) -> None:
        self.left = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> None:
        count = self.config.long_prefill_token_threshold or 16
        ids, self.left = self.left[:count], self.left[count:]
        # a step is padded as in a CUDA graph
        padding = [0] * (len(ids) % 2)
        positions = [*range(self.at, self.at + len(ids)), *padding]
        self.net(input_ids=torch.tensor(ids + padding), positions=torch.tensor(positions))
        self.at += len(ids)


VLLM = SimpleNamespace(SamplingParams=lambda **options: options)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_cache_worker, "TAILS", {"prefill": 9, "decode": 5})
    prompts = [np.arange(length) % VOCAB for length in (40, 61)]
    np.savez(tmp_path / "prompts.npz", *prompts)
    return {"prompts": str(tmp_path / "prompts.npz"), "states": str(tmp_path / "states.pt")}


def test_the_last_tokens_are_read_one_a_step(job):
    engine = Engine(0.0)
    states = Reader(VLLM, engine).states(list(range(20)), 5, one_a_step=True)
    # 15 tokens in a step, 12 of them are kept; then 8 single ones
    assert engine.net.steps[:1] == [16] and len(engine.net.steps) == 1 + 8
    assert torch.equal(states, engine.net.table[15:20])


def test_a_cache_that_keeps_nothing_is_an_error(job, monkeypatch):
    engine = Engine(0.0, keeps=False)
    with pytest.raises(RuntimeError, match="700 tokens in 1 a step: over 522 steps"):
        Reader(VLLM, engine).states([1] * 700, 5, one_a_step=True)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_divergence_from_the_reference(job, noise):
    reference = measure(Reader(VLLM, Engine(0.0)), job | {"is_reference": True})
    assert [row["context"] for row in reference] == [40, 61]
    assert reference[0]["prefill_from_decode"]["kl"] == pytest.approx(0.0, abs=1e-6)
    rows = measure(Reader(VLLM, Engine(noise)), job | {"is_reference": False})
    for row in rows:
        assert row["prefill"]["positions"] == 9 and row["decode"]["positions"] == 5
        for kind in ("prefill", "decode"):
            assert (row[kind]["kl"] > 0.01) == (noise > 0)
            assert row[kind]["kl"] >= -1e-6


def test_positions_that_are_missing_or_read_twice_are_an_error(job):
    tail = kv_cache_worker.Tail(model := Model(0.0))
    tail.start(3)
    model(input_ids=torch.arange(5), positions=torch.arange(5))
    assert len(tail.take(2)) == 2
    with pytest.raises(ValueError, match="2 positions from 3 on: expected 3"):
        tail.take(3)
    tail.start(3)
    model(input_ids=torch.arange(3), positions=torch.tensor([3, 4, 3]))
    with pytest.raises(ValueError, match="3 positions from 3 on: expected 3"):
        tail.take(3)
