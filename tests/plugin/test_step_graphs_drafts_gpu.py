# SPDX-License-Identifier: MIT
"""Steps with prompts as one CUDA graph, with drafts, on a GPU.

Prompts arrive while others verify drafts. Every token is, or nearly is, the best one by the
log-probabilities of the model without graphs; a draft model drafts the same tokens in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from harness.draft_factory import make_draft
from harness.model_factory import make_model
from vllm.config.compilation import CUDAGraphMode

from tests.plugin.conftest import few_tokens
from tests.plugin.test_drafts_gpu import NEAR, PLACES, SHAPE, Drafting, ngram

pytestmark = [pytest.mark.gpu, pytest.mark.serve]

QUERIES = 4
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "compilation_config": {
        "cudagraph_capture_sizes": [QUERIES, PLACES * QUERIES, 32, 64, 128],
    },
}
# tokens of prompts and of answers; more than PLACES, which end one after another
LENGTHS = ((5, 40), (30, 9), (61, 25), (90, 40), (150, 13), (12, 30), (47, 7), (100, 20))


@dataclass
class Step:
    """What a step held, and which graph replayed it."""

    graph: Any
    reads: bool
    verifies: bool


class Watched(Drafting):
    """An engine that notes its steps and the first draft of each, and can leave its graphs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, **OPTIONS)
        self.steps: list[Step] = []
        self.drafted: list[int] = []
        prepare, propose = self.runner.prepare_inputs, self.runner.speculator.propose

        def preparing(scheduled: Any, requests: Any, graph: Any, loras: int) -> Any:
            batch = prepare(scheduled, requests, graph, loras)
            self.steps.append(Step(graph, batch.has_prefill, batch.num_draft_tokens > 0))
            return batch

        def proposing(*args: Any, **options: Any) -> Any:
            drafts = propose(*args, **options)
            self.drafted.append(int(drafts[0, 0]))
            return drafts

        self.runner.prepare_inputs = preparing
        self.runner.speculator.propose = proposing

    def use_graphs(self, use: bool) -> None:
        drafter = self.runner.speculator
        for manager in (
            self.runner.cudagraph_manager,
            getattr(drafter, "prefill_cudagraph_manager", None),
            getattr(drafter, "decode_cudagraph_manager", None),
            getattr(drafter, "passes", None),
        ):
            if manager is not None:
                manager._graphs_captured = use

    def first_drafts(self, prompts: list[list[int]]) -> list[int]:
        """The first draft after each prompt, read alone."""
        first = []
        for each in prompts:
            self.drafted.clear()
            self.ask([each], lengths=[QUERIES])
            # the last part of a long prompt is the second step
            first.append(self.drafted[-(-len(each) // 128) - 1])
        return first

    def worst(self, prompt: list[int], answer: list[int]) -> float:
        """How far the worst token is from the best one, in log-probability."""
        (out,) = self.ask([prompt + answer], prompt_logprobs=1)
        rows = zip(answer, out.prompt_logprobs[len(prompt) :], strict=True)
        return max(max(p.logprob for p in row.values()) - row[t].logprob for t, row in rows)


@pytest.fixture(scope="module", params=["eagle3", "ngram"])
def seen(request: Any, tmp_path_factory: Any) -> dict[str, Any]:
    """Steps with graphs, each answer's worst miss, and first drafts with and without graphs."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder / "model", SHAPE)
    few_tokens(folder / "model")
    drafts = ngram(QUERIES - 1)
    if request.param == "eagle3":
        make_draft(folder / "head", SHAPE, "specforge")
        drafts = {
            "method": "eagle3", "model": str(folder / "head"),
            "num_speculative_tokens": QUERIES - 1,
        }  # fmt: skip
    # every second one repeats itself, which n-grams draft
    prompts = [
        [9 + i % 4 if n % 2 else (7 * i * i + 3 * i + n) % 32 for i in range(size)]
        for n, (size, _) in enumerate(LENGTHS)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        engine = Watched(folder / "model", drafts)
    try:
        together = engine.ask(prompts, lengths=[new for _, new in LENGTHS])
        steps, engine.steps = engine.steps, []
        with_graphs = engine.first_drafts(prompts)
        engine.use_graphs(False)
        answers = [list(out.outputs[0].token_ids) for out in together]
        misses = [engine.worst(*each) for each in zip(prompts, answers)]
        return {
            "steps": steps,
            "lengths": [len(answer) for answer in answers],
            "misses": misses,
            "drafted": engine.counted("num_draft_tokens"),
            "first": list(zip(with_graphs, engine.first_drafts(prompts))),
        }
    finally:
        engine.close()


def test_steps_with_prompts_and_drafts_are_one_graph(seen: dict[str, Any]) -> None:
    steps = seen["steps"]
    assert all(step.graph.cg_mode == CUDAGraphMode.FULL for step in steps)
    mixed = [step.graph for step in steps if step.reads and step.verifies]
    assert mixed and all(graph.uniform_token_count is None for graph in mixed)
    # a step that only verifies takes the graph of decode attention
    decodes = [step.graph for step in steps if not step.reads and step.verifies]
    assert any(graph.uniform_token_count == QUERIES for graph in decodes)
    assert seen["drafted"] > 0


def test_tokens_are_those_without_graphs(seen: dict[str, Any]) -> None:
    assert seen["lengths"] == [new for _, new in LENGTHS]
    assert max(seen["misses"]) < NEAR, seen["misses"]


def test_drafts_are_those_without_graphs(seen: dict[str, Any]) -> None:
    # rounding of padded batches may turn one
    same = [draft == other for draft, other in seen["first"]]
    assert sum(same) >= len(same) - 2, seen["first"]
