# SPDX-License-Identifier: MIT
"""Perplexity, KL divergence and agreement from log-probabilities; the scoring process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness import evaluate as harness_evaluate
from harness import vllm_logprobs
from harness.arms import Arm
from harness.evaluate import Scorer, Task, evaluate, kl_divergence, perplexity
from harness.needle import build_prompt, found, make_needles
from harness.vllm_logprobs import split, window_logprobs

from oss_fused.errors import ServerError

WORKER = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))


def top(probabilities: np.ndarray, count: int) -> dict[str, np.ndarray]:
    ids = np.argsort(-probabilities, axis=1)[:, :count].astype(np.int32)
    values = np.log(np.take_along_axis(probabilities, ids, axis=1)).astype(np.float32)
    return {"top_ids": ids, "top_logprobs": values}


def test_perplexity_of_a_coin() -> None:
    assert perplexity(np.log(np.full(7, 0.5))) == pytest.approx(2.0)


def test_kl_is_exact_with_all_tokens_and_a_bound_below_otherwise() -> None:
    generator = np.random.default_rng(0)
    p = 0.99 * generator.dirichlet(np.full(50, 0.2), 8) + 0.01 / 50
    q = p * np.exp(0.3 * generator.standard_normal(p.shape))
    q /= q.sum(axis=1, keepdims=True)
    exact = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(kl_divergence(top(p, 50), top(q, 50)), exact, rtol=1e-4)
    bound = kl_divergence(top(p, 30), top(q, 30))
    assert (bound <= exact * (1 + 1e-4)).all() and (bound > 0.7 * exact).all()
    assert kl_divergence(top(p, 10), top(p, 10)).max() < 1e-6


def test_windows_cover_the_text_and_keep_bos() -> None:
    plain = SimpleNamespace(encode=lambda text: list(range(10, 20)), bos_token_id=None)
    assert split(plain, "", 4, 100) == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert split(plain, "", 3, 7) == [[10, 11, 12], [13, 14, 15]]  # one token predicts nothing
    bos = SimpleNamespace(encode=lambda text: [1, 5, 6, 7], bos_token_id=1)
    assert split(bos, "", 3, 100) == [[1, 5, 6], [1, 7]]


def test_window_logprobs_ranks_and_takes_the_token_itself() -> None:
    def entry(logprob: float, rank: int) -> SimpleNamespace:
        return SimpleNamespace(logprob=logprob, rank=rank)

    # vLLM: the token itself first (here ranked 9th), then the likeliest ones
    logprobs = [None, {7: entry(-9.0, 9), 2: entry(-0.1, 1), 3: entry(-2.0, 2)}]
    ids, own, top_ids, top_values = window_logprobs([5, 7], logprobs, 2)
    assert ids.tolist() == [7] and own.tolist() == [-9.0]
    assert top_ids.tolist() == [[2, 3]]
    np.testing.assert_allclose(top_values, [[-0.1, -2.0]])


def test_a_small_vocabulary_is_ranked_whole(tmp_path, monkeypatch) -> None:
    vocabulary, asked = 7, []

    class Engine:
        llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary)
        )

        def get_tokenizer(self):
            return SimpleNamespace(encode=lambda text: [1, 2, 3, 4], bos_token_id=None)

        def generate(self, prompts, parameters):
            asked.append(parameters.get("prompt_logprobs"))
            # vLLM's engine dies where more are asked for than there are
            assert (parameters.get("prompt_logprobs") or 0) <= vocabulary
            ranks = {
                token: SimpleNamespace(logprob=-1.0 - token, rank=token + 1)
                for token in range(vocabulary)
            }
            lists = [[None] + [ranks] * (len(p["prompt_token_ids"]) - 1) for p in prompts]
            return [SimpleNamespace(prompt_logprobs=each) for each in lists]

    (tmp_path / "a.txt").write_text("text")
    job = {"model": "m", "flags": [], "texts": [str(tmp_path / "a.txt")], "window": 4}
    job |= {"max_tokens": 9, "top": 300, "needles": [], "output": str(tmp_path / "out.npz")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    module = SimpleNamespace(SamplingParams=lambda **settings: settings)
    monkeypatch.setattr(vllm_logprobs.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(vllm_logprobs, "make_engine", lambda *_: Engine())
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
    assert vllm_logprobs.main() == 0
    written = dict(np.load(tmp_path / "out.npz"))
    assert asked[0] == 7 and written["top_ids"].tolist() == [list(range(7))] * 3
    assert kl_divergence(written, written).max() < 1e-6


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("text")
    return Scorer(Task(paths), worker=WORKER)


def test_evaluate_compares_per_text(scorer: Scorer) -> None:
    results = evaluate(scorer, [Arm("base", "good"), Arm("worse", "worse"), Arm("same", "good")])
    assert [text["tokens"] for text in results["texts"]] == [3, 3]
    text = results["texts"][1]
    assert text["baseline"]["perplexity"] == pytest.approx(2.0)
    worse, same = text["candidates"]
    assert worse["perplexity_factor"] == pytest.approx(np.exp(0.1))
    assert worse["kl_divergence"] > 0 and worse["top1_agreement"] == 1.0
    assert same["kl_divergence"] == 0 and same["perplexity_factor"] == 1.0


def test_needles_are_counted_per_length(scorer: Scorer) -> None:
    scorer.task = replace(scorer.task, needles=make_needles([256, 512]))
    good, bad = evaluate(scorer, [Arm("base", "good"), Arm("worse", "worse")])["needles"]
    assert good == {
        "name": "base",
        "rate": 1.0,
        "by_length": {"256": 1.0, "512": 1.0},
        "missed": [],
    }
    assert bad["by_length"] == {"256": 0.2, "512": 0.2}
    assert bad["missed"][0]["answer"] == "?" and bad["missed"][0]["depth"] == 0.0


@pytest.mark.parametrize("bos", [None, 1])
def test_needle_prompt_has_its_length_and_the_key_at_its_depth(bos: int | None) -> None:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return ([bos] if bos and add_special_tokens else []) + [ord(c) for c in text]

    tokenizer = SimpleNamespace(encode=encode, bos_token_id=bos)
    for needle in make_needles([300]):
        ids = build_prompt(tokenizer, "hay ", needle)
        assert len(ids) == 300
        assert (ids[0] == bos) == (bos is not None)
        text = "".join(map(chr, ids))
        room = text.rindex("Question") - len(f"The pass key is {needle['key']}")
        assert text.index("The pass key is") / room == pytest.approx(needle["depth"], abs=0.35)
        assert text.endswith("Answer: The pass key is")
    with pytest.raises(ValueError, match="needle of 20 tokens: expected at least"):
        build_prompt(tokenizer, "hay ", {"length": 20, "depth": 0.5, "key": "1"})


def test_answer_must_begin_with_the_key() -> None:
    assert found(' "12345".', "12345") and found(" **12345**", "12345")
    assert not found(" 54321 or 12345", "12345")


def test_broken_model_is_named_with_its_log(scorer: Scorer) -> None:
    with pytest.raises(ServerError, match=r"model b .*status 5(\n.*)*upside down"):
        evaluate(scorer, [Arm("a", "good"), Arm("b", "broken")])


def test_other_tokenizer_is_refused(scorer: Scorer) -> None:
    with pytest.raises(ValueError, match="must share one tokenizer"):
        evaluate(scorer, [Arm("a", "good"), Arm("b", "foreign")])


def test_cache_is_used_until_text_or_settings_change(
    scorer: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer.cache = tmp_path / "cache"
    evaluate(scorer, [Arm("a", "good")])
    scorer.worker = ("false",)
    evaluate(scorer, [Arm("a", "good")])
    # nor is what another device, another kernel or another setting computed this run's
    changes = (
        lambda patch: patch.setenv("OSS_FUSED_BACKEND", "torch"),
        lambda patch: patch.setattr(harness_evaluate, "_sources", lambda: "changed"),
        lambda patch: patch.setattr(scorer, "gpu", not scorer.gpu),
        lambda patch: patch.setattr(
            harness_evaluate, "gpus", lambda: [{"name": "H9", "driver_version": "1"}]
        ),
    )
    for change in changes:
        with monkeypatch.context() as patch, pytest.raises(ServerError):
            change(patch)
            evaluate(scorer, [Arm("a", "good")])
    evaluate(scorer, [Arm("a", "good")])
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(ServerError):
        evaluate(scorer, [Arm("a", "good")])
