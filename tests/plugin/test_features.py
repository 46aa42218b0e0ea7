# SPDX-License-Identifier: MIT
"""vLLM's features with oss_fp8: one gpt-oss engine with chunked prefill, prefix caching and n-gram
speculation on, held against the fake-quantised reference; and, on a GPU, sleep. LoRA:
test_runtime.py.
"""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from harness.tokenizer import save_tokenizer

from tests.plugin.conftest import SHARED_GPU, Engine, assert_agrees, build, reference_logprobs

pytestmark = pytest.mark.serve

# longer than the window of 32, than a chunk of 48 and than three blocks; ids of plain text
TEXT = [70 + (7 * i * i + 3 * i) % 150 for i in range(100)]
REPEATED = [90, 91, 92, 93, 94, 95] * 8
TOLERANCE = 0.15
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("features"), "gpt_oss", vocab_size=600)
    save_tokenizer(folder, "gpt-oss", 600, 256)
    engine = Engine(
        folder,
        quantization="oss_fp8",
        skip_tokenizer_init=False,
        max_model_len=160,
        block_size=32,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        speculative_config=SPECULATION,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        disable_log_stats=False,
    )
    engine.folder = folder
    yield engine
    engine.close()


def ask(served, prompt, **options):
    from vllm import SamplingParams

    params = SamplingParams(**({"temperature": 0, "max_tokens": 8, "ignore_eos": True} | options))
    return served.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def assert_most_agree(errors: list[float]) -> None:
    """Unlikely tokens move more than greedy ones. The order of a processor's sums may decide a
    router's near tie otherwise: a few tokens move far (1.3 was seen).
    """
    assert statistics.median(errors) < TOLERANCE / 2
    assert statistics.quantiles(errors, n=8)[-1] < 2 * TOLERANCE


def counter(served, name):
    return sum(m.value for m in served.llm.get_metrics() if m.name == name)


def test_chunked_prefill_sliding_window_and_prefix_caching(served):
    first = served.generate(TEXT)
    assert_agrees(first, served.folder, TOLERANCE, prompt=TEXT, ignore=())
    again = ask(served, TEXT, max_tokens=4)
    assert again.num_cached_tokens >= 32
    assert list(again.outputs[0].token_ids) == first[0]


def test_speculation_keeps_the_greedy_text(served):
    before = counter(served, "vllm:spec_decode_num_draft_tokens")
    out = ask(served, REPEATED, max_tokens=12, logprobs=0).outputs[0]
    assert counter(served, "vllm:spec_decode_num_draft_tokens") > before
    tokens = list(out.token_ids)
    logprobs = [step[t].logprob for step, t in zip(out.logprobs, tokens)]
    assert_agrees((tokens, logprobs), served.folder, TOLERANCE, prompt=REPEATED, ignore=())


def test_prompt_logprobs(served):
    prompt = TEXT[::-1][:60]
    out = ask(served, prompt, max_tokens=1, prompt_logprobs=2)
    reference = reference_logprobs(served.folder, prompt, ignore=())
    assert out.prompt_logprobs[0] is None
    errors = [
        abs(entries[token].logprob - reference[place][token].item())
        for place, (token, entries) in enumerate(zip(prompt[1:], out.prompt_logprobs[1:]))
    ]
    assert_most_agree(errors)
    assert all(len(entries) >= 2 for entries in out.prompt_logprobs[1:])


def test_several_samples_of_a_prompt(served):
    prompt = TEXT[:20]
    # vLLM's own seed per request needs a GPU
    torch.manual_seed(0)
    outputs = ask(served, prompt, n=3, temperature=1.0, logprobs=0).outputs
    assert len(outputs) == 3
    assert len({tuple(out.token_ids) for out in outputs}) > 1
    errors = []
    for out in outputs:
        tokens = list(out.token_ids)
        reference = reference_logprobs(served.folder, prompt + tokens, ignore=())
        for step, token in enumerate(tokens):
            expected = reference[len(prompt) - 1 + step][token].item()
            errors.append(abs(out.logprobs[step][token].logprob - expected))
    assert_most_agree(errors)


def test_guided_json(served):
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    guide = StructuredOutputsParams(json=schema)
    out = ask(served, TEXT[:10], max_tokens=60, ignore_eos=False, structured_outputs=guide)
    answer = json.loads(out.outputs[0].text)
    assert answer.keys() == {"ok", "kind"} and answer["kind"] in ("a", "b")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_sleep(tmp_path, engine, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs a GPU for each rank")
    folder = build(tmp_path, "gpt_oss", head_dim=64)
    options = {"enable_sleep_mode": True, "tensor_parallel_size": ranks, **SHARED_GPU}
    served = engine(folder, quantization="oss_fp8", **options)
    before, tokens = served.generate(), tokens_alone(served)
    # one after the other: vLLM's allocator allows one engine that sleeps a process
    for level in (1, 2):
        served.llm.sleep(level=level)
        served.llm.wake_up(tags=["weights"])
        if level == 2:
            served.llm.collective_rpc("reload_weights")
        served.llm.wake_up(tags=["kv_cache"])
        # before generate(): a request without logprobs is the sampler's short path
        assert tokens_alone(served) == tokens, level
        assert served.generate() == before, level


@pytest.mark.gpu
def test_either_kernel_of_ranks_gives_the_same_answers(tmp_path, engine):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for each rank")
    folder = build(tmp_path, "gpt_oss", head_dim=64)
    found = []
    for kernels in ("auto", "vllm"):
        config = {"oss_fused": {"all_reduce_kernels": kernels}}
        options = {"tensor_parallel_size": 2, "additional_config": config, **SHARED_GPU}
        served = engine(folder, quantization="oss_fp8", **options)
        found.append((served.generate(), tokens_alone(served)))
    assert found[0] == found[1]


def tokens_alone(served):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": TEXT[:count]} for count in (5, 9, 14)]
    outputs = served.llm.generate(prompts, params, use_tqdm=False)
    assert all(len(out.outputs[0].token_ids) == 12 for out in outputs)
    return [list(out.outputs[0].token_ids) for out in outputs]
