# SPDX-License-Identifier: MIT
"""Milliseconds per decode step, with engine steps of one token and of several."""

from types import SimpleNamespace

import pytest
from harness import decode_extension
from harness.decode_extension import WorkerExtension
from harness.decode_worker import SETTLE, WINDOW, Measure


class Engine:
    """Yields ``burst`` tokens of every request per step, which takes that many milliseconds."""

    def __init__(self, burst, clock):
        self.burst, self.clock, self.names, self.aborted = burst, clock, [], []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=512)
        self.engine_core = SimpleNamespace(
            get_output=lambda: SimpleNamespace(timestamp=self.clock[0])
        )

    def add_request(self, name, prompt, parameters):
        self.names.append(name)

    def abort_request(self, names):
        self.aborted += names

    def step(self):
        self.clock[0] += self.burst * 1e-3
        self.engine_core.get_output()
        ids = list(range(self.burst))
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)])
            for name in self.names
        ]


@pytest.mark.parametrize("burst", [1, 3, 16])
def test_a_step_is_a_token_of_each_sequence(burst):
    """Of the engine's clock: this process reads outputs whenever it can."""
    clock = [0.0]
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


class Runner:
    """A model runner whose methods take 2 and 3 ms, and which may draft in 1 ms of the latter."""

    def __init__(self, clock, drafts):
        self.clock, self.model_state = clock, SimpleNamespace()
        self.speculator = SimpleNamespace(propose=lambda: self.spend(1)) if drafts else None

    def spend(self, ms):
        self.clock[0] += ms * 1e-3

    def execute_model(self):
        self.spend(2)

    def sample_tokens(self):
        self.spend(2)
        if self.speculator:
            self.speculator.propose()


@pytest.mark.parametrize("drafts", [False, True])
def test_host_time_by_part(drafts, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(decode_extension.time, "perf_counter", lambda: clock[0])
    extension = WorkerExtension()
    runner = extension.model_runner = Runner(clock, drafts)

    class Hosted(Engine):
        """Its steps run the runner; the process beside it takes 1 ms."""

        def step(self):
            runner.execute_model()
            runner.sample_tokens()
            runner.spend(1)
            return super().step()

        def collective_rpc(self, name):
            return [getattr(extension, name)()]

    kind = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=None))
    vllm = SimpleNamespace(SamplingParams=lambda **options: options, sampling_params=kind)
    engine = Hosted(2, clock)
    found = Measure(vllm, engine).host(batch=3, context=16, steps=10, seed=0)
    # the engine's own step takes as many milliseconds as it has tokens
    assert found["ms"] == pytest.approx(2 + 2 + drafts + 1 + 2) and found["tokens"] == 2
    assert list(found["host_ms"].values()) == pytest.approx([2, 3, 1] if drafts else [2, 2])
    assert engine.aborted == engine.names
    # the methods are the class's again
    assert not {"execute_model", "sample_tokens"} & vars(runner).keys()
