# SPDX-License-Identifier: MIT
"""Milliseconds per decode step, with engine steps of one token and of several."""

from types import SimpleNamespace

import pytest
from harness import decode_worker
from harness.decode_worker import SETTLE, WINDOW, Measure


class Engine:
    """Yields ``burst`` tokens of every request per step, which takes that many milliseconds."""

    def __init__(self, burst, clock):
        self.burst, self.clock, self.names, self.aborted = burst, clock, [], []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=512)

    def add_request(self, name, prompt, parameters):
        self.names.append(name)

    def abort_request(self, names):
        self.aborted += names

    def step(self):
        self.clock[0] += self.burst * 1e-3
        ids = list(range(self.burst))
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)])
            for name in self.names
        ]


@pytest.mark.parametrize("burst", [1, 3, 16])
def test_a_step_is_a_token_of_each_sequence(burst, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(decode_worker.time, "perf_counter", lambda: clock[0])
    kind = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=None))
    vllm = SimpleNamespace(SamplingParams=lambda **options: options, sampling_params=kind)
    engine = Engine(burst, clock)
    result = Measure(vllm, engine).decode(batch=2, context=16, steps=48, seed=0)
    assert result["ms"] == pytest.approx([1.0] * len(result["ms"]))
    assert len(result["ms"]) == 48 // max(WINDOW, burst) or burst == 3
    # one step for the first tokens
    steps = clock[0] * 1e3 / burst - 1 - SETTLE
    assert 48 <= steps * burst < 48 + burst
    assert engine.aborted == engine.names
