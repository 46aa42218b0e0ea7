# SPDX-License-Identifier: MIT
"""Drafts on a GPU, in CUDA graphs: every token is the greedy one, whoever drafted.

A step that verifies drafts multiplies other shapes than one of single tokens, and so rounds
otherwise. Each token must therefore be, or nearly be, the best after those before it, by the
log-probabilities of a prefill, which FlashAttention computes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.draft_factory import make_draft
from harness.model_factory import get_shape, make_model

from tests.plugin.conftest import SHARED_GPU, Engine, few_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.serve]

SHAPE = replace(get_shape("gpt-oss", "tiny"), vocab=512)
PLACES, NEW = 4, 40
# as in test_burst_gpu.py: a token read from a wrong place misses by several
NEAR = 0.75


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts")
    make_model(path / "model", SHAPE)
    few_tokens(path / "model")
    return path


class Drafting(Engine):
    """An engine with drafts, in one graph for each number of sequences."""

    def __init__(self, model: Any, drafts: dict[str, Any], **options: Any) -> None:
        queries = drafts["num_speculative_tokens"] + 1
        sizes = [queries, PLACES * queries]
        graphs = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
        }  # fmt: skip
        serving = {
            "quantization": "oss_fp8", "max_model_len": 256, "max_num_seqs": PLACES,
            # long prompts are read in pieces beside sequences that decode
            "max_num_batched_tokens": 64, "enable_prefix_caching": True,
            "enforce_eager": False, "disable_log_stats": False, "compilation_config": graphs,
        }  # fmt: skip
        super().__init__(model, **(SHARED_GPU | serving | options), speculative_config=drafts)

    def ask(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        from vllm import SamplingParams

        lengths = options.pop("lengths", [1] * len(prompts))
        params = [
            SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **options)
            for most in lengths
        ]
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(tokens, params, use_tqdm=False)

    def misses(self, prompts: list[list[int]], lengths: list[int]) -> list[float]:
        """How far each answer's worst token is from the best one, in log-probability."""
        answers = [list(out.outputs[0].token_ids) for out in self.ask(prompts, lengths=lengths)]
        assert [len(answer) for answer in answers] == lengths
        whole = [prompt + answer for prompt, answer in zip(prompts, answers)]
        read = self.ask(whole, prompt_logprobs=1)
        misses = []
        for prompt, tokens, out in zip(prompts, whole, read):
            steps = list(zip(tokens, out.prompt_logprobs))[len(prompt) :]
            best = [max(entry.logprob for entry in step.values()) for _, step in steps]
            misses.append(max(b - step[t].logprob for b, (t, step) in zip(best, steps)))
        return misses

    def counted(self, name: str) -> int:
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")


def ngram(number):
    return {
        "method": "ngram", "num_speculative_tokens": number,
        "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    }  # fmt: skip


def check(engine):
    # text that repeats itself and text that does not, short and behind a window of 128; more
    # requests than places, which end one after another
    long = [(7 * i * i + 3 * i) % 32 for i in range(140)]
    prompts = [[9, 10, 11, 12] * 5, list(range(5, 30)), [7, 8, 9] * 50, long, [3]]
    lengths = [NEW, 7, NEW, 13, NEW]
    try:
        for _ in range(2):  # the second time from the prefix cache
            misses = engine.misses(prompts, lengths)
            assert max(misses) < NEAR, misses
        assert engine.counted("num_draft_tokens") > 0
        return engine.counted("num_accepted_tokens")
    finally:
        engine.close()


# 8 drafts: FlashAttention verifies them, in the same graph
@pytest.mark.parametrize("number", [3, 7, 8])
def test_ngram_drafts(number, folder):
    assert check(Drafting(folder / "model", ngram(number))) > 0


def test_ngram_drafts_with_an_fp8_cache(folder):
    assert check(Drafting(folder / "model", ngram(3), kv_cache_dtype="fp8")) > 0


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("specforge", {"num_speculative_tokens": 3}),
        ("speculators", {"num_speculative_tokens": 7, "quantization": "oss_fp8"}),
        ("peagle", {"num_speculative_tokens": 3, "parallel_drafting": True}),
        ("dflash", {"num_speculative_tokens": 3, "method": "dflash"}),
    ],
)
def test_draft_models(layout, options, folder, tmp_path):
    make_draft(tmp_path / layout, SHAPE, layout)
    drafts = {"method": "eagle3", "model": str(tmp_path / layout)} | options
    check(Drafting(folder / "model", drafts))


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_all_passes_in_one_graph(method, folder, tmp_path):
    """Drafts, and tokens, are those of vLLM's graphs and its rejection sampler."""
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from oss_fused.plugin.draft_graphs import OssEagleSpeculator
    from oss_fused.plugin.rejection import OssRejectionSampler

    make_draft(tmp_path / "head", SHAPE, "specforge")
    drafts = {
        "method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3,
        "rejection_sample_method": method,
    }  # fmt: skip
    if method == "synthetic":
        drafts["synthetic_acceptance_length"] = 2.5
    engine = Drafting(folder / "model", drafts, enable_prefix_caching=False)
    runner = engine.runner
    noted: list[Any] = []
    replayed: list[Any] = []
    keep, replay = runner.draft_tokens_handler.set_draft_tokens, runner.speculator.passes
    run = replay.run_fullgraph

    def note(batch: Any, tokens: Any) -> None:
        noted.append((batch.num_reqs, tokens.tolist()))
        keep(batch, tokens)

    def watch(desc: Any) -> None:
        replayed.append(desc.num_reqs)
        run(desc)

    runner.draft_tokens_handler.set_draft_tokens, replay.run_fullgraph = note, watch
    # three requests: a graph for four has padding; at the end one is left, however drafts fare
    prompts, lengths = [[9, 10, 11, 12] * 5, list(range(5, 30)), [3]], [NEW, 7, NEW // 2]
    try:
        assert type(runner.speculator) is OssEagleSpeculator
        assert type(runner.rejection_sampler) is OssRejectionSampler
        found = []
        for _ in range(2):
            noted.clear()
            answers = engine.ask(prompts, lengths=lengths, seed=7)
            found.append(([list(a.outputs[0].token_ids) for a in answers], list(noted)))
            runner.speculator.__class__ = EagleSpeculator
            runner.rejection_sampler.__class__ = RejectionSampler
        assert found[0] == found[1]
        assert {1, PLACES} <= set(replayed) and len(replayed) > NEW // 4
    finally:
        engine.close()
