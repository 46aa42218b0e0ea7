# SPDX-License-Identifier: MIT
"""The worker's half of bursts, with stubs for the device; test_burst_gpu.py runs it on one."""

import contextlib
import functools
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu_worker import Worker

from oss_fused.kernels.op import set_observer
from oss_fused.plugin import burst_runner as module
from oss_fused.plugin.burst import WORKER
from oss_fused.plugin.burst_runner import BurstRunner, BurstWorker, StepTimer

ROWS, PADDED, BLOCK = 3, 4, 16


class Timer:
    """Notes what a StepTimer would be told."""

    def __init__(self):
        self.told = []

    def start(self):
        self.told.append("start")

    def stop(self, requests):
        self.told.append(requests)

    def finished(self):
        return [(2, 0.5)]


class Graphs:
    """Stands for vLLM's manager of CUDA graphs."""


class Device:
    """Buffers of a runner, and a model whose state is a sum over what it was shown."""

    def __init__(self, monkeypatch, mode, burst):
        draw = torch.Generator().manual_seed(0)
        runner = self.runner = BurstRunner.__new__(BurstRunner)
        runner.device, runner.max_num_reqs, runner.burst = torch.device("cpu"), PADDED, burst
        runner._counts, runner.timer, runner.timed = {}, Timer(), True
        table = torch.randint(1, 99, (PADDED, 9), generator=draw, dtype=torch.int32)
        runner.input_buffers = SimpleNamespace(
            input_ids=torch.tensor([7, 8, 9, 5], dtype=torch.int32),
            positions=torch.tensor([14, 30, 2, 77]),
            seq_lens=torch.tensor([15, 31, 3, 0], dtype=torch.int32),
        )
        runner.block_tables = SimpleNamespace(
            slot_mappings=torch.full((1, 8), -1), input_block_tables=[table], block_sizes=[BLOCK]
        )
        runner.attn_groups, runner.kv_cache_config, runner.lora_config = "groups", "cache", None
        runner.vllm_config = None
        runner._desc = SimpleNamespace(cg_mode=mode, num_active_loras=0)
        runner._tables, runner._slots = "tables", "slots"
        self.asked, self.contexts, self.seen = [], [], []
        runner.model_state = SimpleNamespace(prepare_attn=self.prepare)
        runner.cudagraph_manager = Graphs()
        runner.cudagraph_manager.run_fullgraph = lambda desc: self.forward("graph")
        runner.cudagraph_manager.run_pw_graph = lambda model, inputs: self.forward(
            "pieces", **inputs
        )
        runner.model = lambda **inputs: self.forward("eager", **inputs)
        monkeypatch.setattr(GPUModelRunner, "sample", lambda runner, *args: self.sample(*args))
        monkeypatch.setattr(module, "set_forward_context", self.context)
        monkeypatch.setattr(module, "build_slot_mappings_by_layer", lambda *args: args)
        buffers = runner.input_buffers
        self.batch = SimpleNamespace(
            num_reqs=ROWS,
            num_tokens_after_padding=PADDED,
            has_prefill=False,
            seq_lens=buffers.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(np.array([15, 31, 3, 0], np.int32)),
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            is_padding=None,
        )

    def prepare(self, batch, *args):
        self.asked.append((batch.seq_lens_cpu_upper_bound.tolist(), *args))
        return "metadata"

    @contextlib.contextmanager
    def context(self, metadata, config, **options):
        self.contexts.append((metadata, options))
        yield

    def forward(self, how, **inputs):
        """Hidden states from all that a step's kernels read."""
        buffers, tables = self.runner.input_buffers, self.runner.block_tables
        self.seen.append(how)
        self.runner.timer.told.append(how)
        if inputs:
            assert inputs["input_ids"] is self.batch.input_ids
            assert inputs["positions"] is self.batch.positions
        slots = tables.slot_mappings[0, :PADDED]
        return buffers.input_ids * 31 + buffers.positions * 7 + buffers.seq_lens * 3 + slots

    def sample(self, hidden, batch, grammar):
        """As vLLM's, with a token that depends on hidden states and position."""
        tokens = (hidden[:ROWS] * 17 + batch.positions[:ROWS] * 13) % 1000
        self.grammar = grammar
        one = torch.ones(ROWS, dtype=torch.int32)
        return SamplerOutput(tokens.view(-1, 1).long(), None, None, one, one - 1), one, one - 1

    def single_steps(self, hidden, number):
        """What the same steps give one at a time, in plain Python: ids [requests, number]."""
        buffers = self.runner.input_buffers
        positions = buffers.positions.tolist()[:ROWS]
        lens = buffers.seq_lens.tolist()[:ROWS]
        table = self.runner.block_tables.input_block_tables[0]
        rows = []
        for row in range(ROWS):
            state, tokens = hidden[row].item(), []
            for _ in range(number):
                tokens.append((state * 17 + positions[row] * 13) % 1000)
                positions[row] += 1
                lens[row] += 1
                block = table[row, positions[row] // BLOCK].item()
                slot = block * BLOCK + positions[row] % BLOCK
                state = tokens[-1] * 31 + positions[row] * 7 + lens[row] * 3 + slot
            rows.append(tokens)
        return rows


MODES = [
    (CUDAGraphMode.FULL, "graph"),
    (CUDAGraphMode.PIECEWISE, "pieces"),
    (CUDAGraphMode.NONE, "eager"),
]


@pytest.mark.parametrize(("mode", "how"), MODES)
@pytest.mark.parametrize("burst", [2, 8])
def test_a_burst_is_single_steps_in_a_row(mode, how, burst, monkeypatch):
    device = Device(monkeypatch, mode, burst)
    hidden = torch.tensor([100, 200, 300, 400])
    expected = device.single_steps(hidden, burst)
    output, sampled, rejected = device.runner.sample(hidden, device.batch, None)
    assert output.sampled_token_ids.tolist() == expected
    assert sampled.tolist() == [burst] * ROWS and rejected.tolist() == [1 - burst] * ROWS
    assert output.num_sampled is sampled and output.num_rejected is rejected
    assert output.logprobs_tensors is None and output.num_nans is None
    assert device.seen == [how] * (burst - 1)
    # the row that pads the graph stays as it was
    buffers = device.runner.input_buffers
    assert (buffers.input_ids[3], buffers.positions[3], buffers.seq_lens[3]) == (5, 77, 0)
    # metadata is made for lengths that grow
    bounds = [[15 + i, 31 + i, 3 + i, 0] for i in range(1, burst)]
    assert [asked[0] for asked in device.asked] == bounds
    assert device.asked[0][1:] == (mode, "tables", "slots", "groups", "cache")
    assert len(device.contexts) == (0 if how == "graph" else burst - 1)
    for metadata, options in device.contexts:
        assert metadata == "metadata" and options["num_tokens"] == PADDED
        assert options["cudagraph_runtime_mode"] == mode
        assert options["slot_mapping"] == ("slots", "cache")
    # the last step alone is timed, from its forward pass on
    assert device.runner.timer.told == [how] * (burst - 2) + ["start", how, ROWS]


def test_a_single_step_is_vllms(monkeypatch):
    device = Device(monkeypatch, CUDAGraphMode.FULL, 1)
    output, sampled, _ = device.runner.sample(torch.arange(4), device.batch, "grammar")
    assert output.sampled_token_ids.shape == (ROWS, 1) and sampled.tolist() == [1] * ROWS
    assert device.grammar == "grammar" and not device.seen
    device.batch.has_prefill = True
    device.runner.sample(torch.arange(4), device.batch, None)
    # steps that read prompts are no measure of decode steps
    assert device.runner.timer.told == [ROWS]


def test_ids_that_are_being_copied_are_not_written_again(monkeypatch):
    device = Device(monkeypatch, CUDAGraphMode.FULL, 4)
    first, _, _ = device.runner.sample(torch.arange(4), device.batch, None)
    before = first.sampled_token_ids.clone()
    second, _, _ = device.runner.sample(torch.arange(4) + 9, device.batch, None)
    assert torch.equal(first.sampled_token_ids, before)
    assert not torch.equal(second.sampled_token_ids, before)


@pytest.mark.parametrize("timed", [True, False])
def test_what_a_step_remembers(timed, monkeypatch):
    runner = BurstRunner.__new__(BurstRunner)
    runner.timed = timed
    runner.timer, runner.model_state = Timer(), SimpleNamespace()
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda self, *args, **options: args)
    batch = SimpleNamespace(logits_indices=torch.arange(2), num_tokens=9, num_reqs=2)
    monkeypatch.setattr(GPUModelRunner, "prepare_inputs", lambda self, *args: batch)
    monkeypatch.setattr(GPUModelRunner, "prepare_attn", lambda self, batch: ("tables", "slots"))
    monkeypatch.setattr(module, "sampled_rows", lambda *arguments: arguments)
    runner.execute_model(SimpleNamespace(burst=5))
    assert runner.burst == 5
    # vLLM's warm-up schedules by itself
    runner.execute_model(SimpleNamespace())
    assert runner.burst == 1
    assert runner.model_state.decodes is False
    for uniform in (1, None, 4):
        graph = SimpleNamespace(uniform_token_count=uniform, cg_mode="mode")
        assert runner.prepare_inputs(1, 2, graph, 0) is batch and runner._desc is graph
        assert runner.model_state.decodes is (uniform is not None)
        assert runner.model_state.sampled == (runner, batch, "mode")
    # a step without inputs, as vLLM's warm-up runs
    runner.execute_model(SimpleNamespace())
    assert runner.model_state.sampled is None
    assert runner.prepare_attn(None) == (runner._tables, runner._slots) == ("tables", "slots")
    assert runner.timer.told == ["start"] * timed


@pytest.mark.parametrize(
    ("rows", "tokens", "requests", "copied"),
    [
        ([0, 1, 2], 3, 3, False),
        ([0], 1, 1, False),
        # a prompt's part; drafts; a model that samples nothing
        ([0, 4], 5, 2, True),
        ([0, 1, 2, 3], 4, 2, True),
        ([], 2, 2, True),
    ],
)
def test_hidden_states_of_single_tokens_are_not_copied(rows, tokens, requests, copied, monkeypatch):
    runner = BurstRunner.__new__(BurstRunner)
    runner.model_state = SimpleNamespace()
    batch = SimpleNamespace(logits_indices=torch.tensor(rows, dtype=torch.int64))
    batch.num_tokens, batch.num_reqs = tokens, requests
    monkeypatch.setattr(GPUModelRunner, "prepare_inputs", lambda self, *args: batch)
    asked = []
    monkeypatch.setattr(
        module, "sampled_rows", lambda runner, batch, mode: asked.append(batch.logits_indices)
    )
    graph = SimpleNamespace(uniform_token_count=1, cg_mode="mode")
    # with padding, as a graph has it
    hidden = torch.randn(8, 4)
    found = hidden[runner.prepare_inputs(1, 2, graph, 0).logits_indices]
    assert torch.equal(found, hidden[rows])
    assert (found.data_ptr() != hidden.data_ptr()) == copied
    # the last layer takes the rows as vLLM made them
    assert isinstance(asked[0], torch.Tensor)


@pytest.mark.parametrize(
    ("burst", "drafts", "timed"),
    # with drafts there are no bursts
    [("auto", None, True), ("auto", "eagle3", False), (1, None, False), (4, None, False)],
)
def test_only_auto_needs_times(burst, drafts, timed, monkeypatch):
    def init(self, config):
        self.vllm_config = config

    monkeypatch.setattr(GPUModelRunner, "__init__", init)
    options = {"oss_fused": {"burst": burst}}
    config = SimpleNamespace(additional_config=options, speculative_config=drafts)
    assert BurstRunner(config).timed is timed


def test_the_output_tells_the_times(monkeypatch):
    runner = BurstRunner.__new__(BurstRunner)
    runner.timer = Timer()
    output = SimpleNamespace(model_runner_output=SimpleNamespace())
    for result in (output, None):
        monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda self, _, r=result: r)
        assert runner.sample_tokens(None) is result
    assert output.model_runner_output.decode_times == [(2, 0.5)]


class Event:
    """A CUDA event on a clock of milliseconds that the test moves."""

    now, done = 0.0, 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def query(self):
        return self.at <= Event.done

    def elapsed_time(self, end):
        return end.at - self.at


def test_times_come_without_waiting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer()
    timer.stop(1)  # a step that did not begin here, as in vLLM's warm-up
    for begin, end in ((0.0, 8.0), (8.0, 12.0), (12.0, 30.0)):
        Event.now = begin
        timer.start()
        Event.now = end
        timer.stop(2)
    assert timer.finished() == []
    Event.done = 12.0
    assert timer.finished() == [(2, pytest.approx(0.008)), (2, pytest.approx(0.004))]
    assert timer.finished() == []


def test_the_worker_takes_bursts_where_vllm_takes_its_second_runner(monkeypatch):
    monkeypatch.setattr(module, "BurstRunner", lambda *args: ("bursts", *args))
    monkeypatch.setattr(Worker, "_make_model_runner", lambda self: "vLLM's")
    worker = BurstWorker.__new__(BurstWorker)
    assert f"{BurstWorker.__module__}.{BurstWorker.__name__}" == WORKER
    for second, encoder, expected in ((1, 0, "bursts"), (0, 0, "vLLM's"), (1, 1, "vLLM's")):
        worker.use_v2_model_runner, worker.device = bool(second), "device"
        worker.vllm_config = SimpleNamespace(is_mm_encoder_only=bool(encoder))
        made = worker._make_model_runner()
        assert made[0] == expected if second and not encoder else made == expected


def test_what_bursts_launch_is_compiled_before_serving(monkeypatch):
    device = Device(monkeypatch, CUDAGraphMode.FULL, 1)
    runner, updates, before = device.runner, [], device.runner.input_buffers
    runner.vocab_size, runner.dtype = 50, torch.bfloat16
    before.query_start_loc = torch.zeros(5, dtype=torch.int32)
    state = [t.clone() for t in (before.input_ids, before.positions, before.seq_lens)]
    asked = []
    monkeypatch.setattr(
        GPUModelRunner, "initialize_kv_cache", lambda self, config: asked.append(config)
    )
    monkeypatch.setattr(runner, "postprocess_sampled", lambda *args: updates.append(args))
    functions = ("use_whole_graphs", "pick_from_own_vocabulary", "shorten_verification")
    for name in ("adopt_head_attention", *functions, "draft_in_one_graph"):
        told = functools.partial(lambda name, given: asked.append((name, given)), name)
        monkeypatch.setattr(module, name, told)
    runner.speculator = object()
    launched = []
    set_observer(lambda operation, args: launched.append((operation, args[0].dtype)))
    try:
        runner.initialize_kv_cache("cache")
    finally:
        set_observer(None)
    # whose output the head's graphs read; vLLM drops the one that estimates memory
    assert runner.model_state.graphs() is runner.cudagraph_manager
    runner.cudagraph_manager = None
    gc.collect()
    assert runner.model_state.graphs() is None
    # the head's attention is chosen before vLLM asks it about its cache, the rest after
    assert asked[:2] == [("adopt_head_attention", runner), "cache"]
    assert sorted(asked[2:], key=str) == sorted(
        [
            ("use_whole_graphs", runner),
            ("pick_from_own_vocabulary", runner.speculator),
            ("draft_in_one_graph", runner),
            ("shorten_verification", runner),
        ],
        key=str,
    )
    assert ("greedy_tokens", torch.bfloat16) in launched
    assert [ids.shape for _, ids, *_ in updates] == [(1, 15), (1, 16)]
    assert all(index.tolist() == [-1] for index, *_ in updates)
    assert all(map(torch.equal, state, (before.input_ids, before.positions, before.seq_lens)))
