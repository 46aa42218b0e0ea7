# SPDX-License-Identifier: MIT
"""The last decoder layer of steps that read some rows only, with stand-ins for vLLM's objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from oss_fused.layers.vllm import last_block, rope_attention
from oss_fused.layers.vllm.attention import FP8, OssAttentionImpl
from oss_fused.layers.vllm.decoder import OssLlamaDecoderLayer
from oss_fused.layers.vllm.last_block import LastBlock, finish_block, mark_last, take_rows
from oss_fused.plugin.burst_runner import BurstRunner
from oss_fused.plugin.read_rows import reads_last_rows, sampled_rows
from oss_fused.quant.settings import ServingOptions

HEADS, KV_HEADS, SIZE, PAGE, HIDDEN = 4, 2, 16, 16, 24
# tokens of each sequence in the step, and those before it
NEW, BEFORE = (20, 1, 13), (0, 30, 7)
ROWS = torch.tensor([19, 20, 33])


class Block:
    """A block whose finish is a product of each row, and notes how many it got."""

    def __init__(self):
        self.weight = torch.randn(HEADS * SIZE, HIDDEN)
        self.seen = []

    def finish(self, output, residual):
        self.seen.append(len(output))
        added = residual + output.float() @ self.weight
        return added.sin(), added


@pytest.fixture
def layer(monkeypatch):
    """An attention layer in vLLM's forward context, with three sequences in a paged cache."""
    torch.manual_seed(0)
    impl = OssAttentionImpl.__new__(OssAttentionImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size = HEADS, KV_HEADS, SIZE
    impl.scale, impl.sliding_window, impl.kv_cache_dtype = 0.3, (-1, -1), "auto"
    impl.sinks = torch.randn(HEADS)
    impl.arrivals = torch.zeros(64 * KV_HEADS, dtype=torch.int32)
    lengths = [a + b for a, b in zip(NEW, BEFORE)]
    metadata = SimpleNamespace(
        block_table=torch.arange(9, dtype=torch.int32).view(3, 3),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )
    attention = SimpleNamespace(impl=impl, num_kv_heads=KV_HEADS, _q_scale=None)
    cache = torch.randn(9, KV_HEADS, PAGE, 2 * SIZE).bfloat16()
    impl.rope = lambda layer, projected, positions, cache, slots: projected[0][:, : HEADS * SIZE]
    context = (metadata, attention, cache, torch.arange(sum(NEW)))
    for module in (rope_attention, last_block):
        monkeypatch.setattr(module, "get_attention_context", lambda name: context)

    def attend_all(query, keys, values, output, name):
        # each token is a sequence of its own, which ends with it
        table, lens = [], []
        for sequence, (new, before) in enumerate(zip(NEW, BEFORE)):
            lens += range(before + 1, before + new + 1)
            table += [metadata.block_table[sequence]] * new
        each = SimpleNamespace(
            block_table=torch.stack(table), seq_lens=torch.tensor(lens, dtype=torch.int32)
        )
        impl.decode(attention, query, cache, each, output)

    monkeypatch.setattr(rope_attention, "unified_attention_with_output", attend_all)
    impl.last = LastBlock(Block(), SimpleNamespace(attn=SimpleNamespace(layer_name="layer")))
    return attention


def run(layer, rows):
    torch.manual_seed(1)
    tokens = sum(NEW)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16()
    output = torch.full((tokens, HEADS, SIZE), torch.nan, dtype=torch.bfloat16)
    layer.impl.last.rows = rows
    name = _encode_layer_name("layer")
    torch.ops.oss_fused.rope_attention(qkv, torch.arange(tokens), output, name)
    return output, layer.impl.last(output, torch.randn(tokens, HIDDEN))


def test_rows_that_are_read_are_those_of_the_whole_step(layer):
    output, finished = run(layer, None)
    few, part = run(layer, ROWS)
    assert torch.equal(few[: len(ROWS)], output[ROWS])
    assert few[len(ROWS) :].isnan().all()
    for whole, some in zip(finished, part):
        assert some.shape == whole.shape
        assert torch.allclose(some[ROWS], whole[ROWS], atol=1e-5)
    assert layer.impl.last.block.seen == [sum(NEW), len(ROWS)]


def test_finish_block_has_the_shapes_of_its_fake(layer):
    output, residual = torch.randn(sum(NEW), HEADS, SIZE), torch.randn(sum(NEW), HIDDEN)
    layer.impl.last.rows = ROWS
    found = finish_block(output, residual, _encode_layer_name("layer"))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = map(mode.from_tensor, (output, residual))
        wanted = torch.ops.oss_fused.finish_block(*fakes, _encode_layer_name("layer"))
    for real, fake in zip(found, wanted):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


class Tail(torch.nn.Module):
    """What a model's last layer does behind attention, and the final norm."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def forward(self, output, residual):
        hidden, added = self.last(output * 1.0, residual)
        return (hidden + added).cos()


def test_a_compiled_model_hands_over_and_chooses_at_each_step(layer):
    output, residual = torch.randn(sum(NEW), HEADS, SIZE), torch.randn(sum(NEW), HIDDEN)
    compiled = torch.compile(Tail(layer.impl.last), fullgraph=True, backend="aot_eager")
    whole = compiled(output, residual)
    compact = torch.cat([output[ROWS], output[: sum(NEW) - len(ROWS)]])
    layer.impl.last.rows = ROWS
    some = compiled(compact, residual)
    assert layer.impl.last.block.seen == [sum(NEW), len(ROWS)]
    assert torch.allclose(some[ROWS], whole[ROWS], atol=1e-5)


def test_takes_rows_of_fp8_queries():
    x = torch.randn(7, 2, 4).to(FP8)
    taken = take_rows(x, torch.tensor([5, 0]))
    assert taken.dtype == FP8
    assert torch.equal(taken.float(), x.float()[[5, 0]])


def make_config(**changed):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, use_ubatching=False),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            runner_type="generate", rswa_window=None, is_mm_prefix_lm=False
        ),
    )
    for path, value in changed.items():
        *owners, name = path.split("__")
        owner = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return config


def make_block(rope=True):
    impl = SimpleNamespace(rope=object() if rope else None)
    return SimpleNamespace(finish=None, self_attn=SimpleNamespace(attn=SimpleNamespace(impl=impl)))


def test_marks_a_last_layer_with_the_joined_kernel():
    block = make_block()
    last = mark_last(block, make_config(), ServingOptions())
    assert block.last is block.self_attn.attn.impl.last is last
    assert (last.block, last.attention, last.rows) == (block, block.self_attn, None)


@pytest.mark.parametrize(
    ("changed", "options", "block"),
    [
        ({"parallel_config__world_size": 2}, {}, make_block()),
        ({"parallel_config__data_parallel_size": 2}, {}, make_block()),
        ({"lora_config": object()}, {}, make_block()),
        ({"model_config__enable_return_routed_experts": True}, {}, make_block()),
        ({}, {"monitor_every": 5}, make_block()),
        ({}, {}, make_block(rope=False)),
        ({}, {}, torch.nn.Linear(2, 2)),
    ],
)
def test_marks_no_layer_whose_other_rows_are_needed(changed, options, block):
    assert mark_last(block, make_config(**changed), ServingOptions(**options)) is None
    assert not hasattr(block, "last")


def make_runner(**changed):
    aux = changed.pop("aux_output_connector", None)
    hidden = changed.pop("use_aux_hidden_state_outputs", False)
    last = changed.pop("last_block", object())
    return SimpleNamespace(
        vllm_config=make_config(**changed),
        model=SimpleNamespace(last_block=last),
        aux_output_connector=aux,
        use_aux_hidden_state_outputs=hidden,
    )


def test_a_plain_runner_reads_the_last_rows():
    assert reads_last_rows(make_runner())


@pytest.mark.parametrize(
    "changed",
    [
        {"last_block": None},
        {"speculative_config": object()},
        {"kv_transfer_config": object()},
        {"parallel_config__use_ubatching": True},
        {"model_config__runner_type": "pooling"},
        {"model_config__rswa_window": 4},
        {"model_config__is_mm_prefix_lm": True},
        {"aux_output_connector": object()},
        {"use_aux_hidden_state_outputs": True},
    ],
)
def test_other_runners_read_all_rows(changed):
    assert not reads_last_rows(make_runner(**changed))


def make_batch(**changed):
    return SimpleNamespace(
        **{
            "logits_indices": ROWS,
            "has_prefill": True,
            "num_draft_tokens": 0,
            "num_reqs": 3,
            "num_tokens": 34,
            **changed,
        }
    )


def logprobs(progress=(), scores=()):
    return SimpleNamespace(
        prompt_logprobs_worker=SimpleNamespace(
            in_progress_prompt_logprobs=dict.fromkeys(progress),
            token_id_scores=dict.fromkeys(scores),
        )
    )


def test_sampled_rows_of_a_step_with_prompts():
    assert sampled_rows(logprobs(), make_batch(), CUDAGraphMode.NONE) is ROWS
    assert sampled_rows(logprobs(), make_batch(num_tokens=17), CUDAGraphMode.NONE) is ROWS


@pytest.mark.parametrize(
    ("runner", "changed", "mode"),
    [
        (logprobs(), {}, CUDAGraphMode.PIECEWISE),
        (logprobs(), {}, CUDAGraphMode.FULL),
        (logprobs(), {"has_prefill": False}, CUDAGraphMode.NONE),
        (logprobs(), {"num_draft_tokens": 1}, CUDAGraphMode.NONE),
        # a sequence is sampled from twice
        (logprobs(), {"num_reqs": 2}, CUDAGraphMode.NONE),
        # the projection of so few tokens is part of the kernel that rotates
        (logprobs(), {"num_tokens": 16}, CUDAGraphMode.NONE),
        (
            logprobs(),
            {"num_reqs": 9, "num_tokens": 17, "logits_indices": torch.arange(9)},
            CUDAGraphMode.NONE,
        ),
        (logprobs(progress=["a"]), {}, CUDAGraphMode.NONE),
        (logprobs(scores=["a"]), {}, CUDAGraphMode.NONE),
        (SimpleNamespace(prompt_logprobs_worker=None), {}, CUDAGraphMode.NONE),
    ],
)
def test_all_rows_of_other_steps(runner, changed, mode):
    assert sampled_rows(runner, make_batch(**changed), mode) is None


@pytest.mark.parametrize("fails", [False, True])
def test_rows_hold_for_one_step(fails, monkeypatch):
    runner = BurstRunner.__new__(BurstRunner)
    runner.model_state = SimpleNamespace(decodes=True)
    runner.prompt_logprobs_worker = logprobs().prompt_logprobs_worker
    runner.last_block = SimpleNamespace(rows=None)
    desc = SimpleNamespace(uniform_token_count=None, cg_mode=CUDAGraphMode.NONE)
    seen = []

    def execute(self, *args):
        self.prepare_inputs(None, None, desc, 0)
        seen.append(self.last_block.rows)
        if fails:
            raise RuntimeError("the step fails")

    monkeypatch.setattr(GPUModelRunner, "prepare_inputs", lambda *args: make_batch())
    monkeypatch.setattr(GPUModelRunner, "execute_model", execute)
    if fails:
        with pytest.raises(RuntimeError):
            runner.execute_model(SimpleNamespace())
    else:
        runner.execute_model(SimpleNamespace())
    assert seen == [ROWS]
    assert runner.last_block.rows is None


@pytest.mark.parametrize("codes", [True, False])
def test_a_llama_layer_hands_its_attention_to_the_last_block(codes, monkeypatch):
    """Only where a norm that keeps its residual comes before the MLP."""
    layer = OssLlamaDecoderLayer.__new__(OssLlamaDecoderLayer)
    torch.nn.Module.__init__(layer)
    module = "oss_fused.layers.vllm.decoder"
    layer.input_layernorm = layer.post_attention_layernorm = None
    heads = torch.randn(5, 2, 4)
    layer.self_attn = torch.nn.Identity()
    layer.self_attn.qkv_proj = layer.self_attn.o_proj = None
    layer.self_attn.forward = lambda positions, hidden_states: "attended"
    layer.mlp = SimpleNamespace(gate_up_proj="reader")
    monkeypatch.setattr(f"{module}.takes_codes", lambda reader: codes and reader == "reader")
    monkeypatch.setattr(f"{module}.attend_heads", lambda *args: heads)
    monkeypatch.setattr(f"{module}.norm_for", lambda norm, reader, x, residual: (x, residual))
    monkeypatch.setattr(f"{module}.gated_mlp", lambda mlp, x: ("mlp", x))
    layer.last = lambda output, residual: ("last", output, residual)
    found = layer(None, "x", "residual")
    assert found == (("last", heads, "residual") if codes else (("mlp", "attended"), "residual"))
