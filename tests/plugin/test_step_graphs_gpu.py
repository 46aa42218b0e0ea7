# SPDX-License-Identifier: MIT
"""Steps with prompts on a GPU, as one CUDA graph: every token is, or nearly is, the best one."""

from __future__ import annotations

from typing import Any

import pytest
from harness.tokenizer import save_tokenizer
from vllm.config.compilation import CUDAGraphMode

from tests.plugin.conftest import build
from tests.plugin.test_burst_gpu import NEAR, Served, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.serve]

# steps read up to 128 tokens: the prompts of 150 and of 90 tokens come in pieces
OPTIONS = {
    "enforce_eager": False,
    "max_num_batched_tokens": 128,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 16, 32, 64, 128]},
}
LENGTHS = (5, 30, 61, 90, 150)


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def answers(request: Any, tmp_path_factory: Any) -> dict[str, Any]:
    """Answers from graphs, the graphs that gave them, and each token's miss without graphs."""
    folder = tmp_path_factory.mktemp(request.param)
    build(folder, request.param, head_dim=64, vocab_size=600)
    save_tokenizer(folder, "gpt-oss", 600, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        graphs = Served(folder, "auto", **OPTIONS)
    runner = graphs.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    manager, replayed = runner.cudagraph_manager, []
    replay = manager.run_fullgraph

    def noting(desc: Any) -> Any:
        replayed.append(desc)
        return replay(desc)

    manager.run_fullgraph = noting
    asked = [prompt(i, length) for i, length in enumerate(LENGTHS)]
    try:
        alone = [graphs.ask([each], {"max_tokens": 20})[0] for each in asked]
        together = graphs.ask(asked, {"max_tokens": 30})
    finally:
        graphs.close()
    eager = Served(folder, 1, enforce_eager=True)
    try:
        misses = [
            eager.near_best(begin, list(out.outputs[0].token_ids))
            for begin, out in zip(asked * 2, [*alone, *together])
        ]
    finally:
        eager.close()
    return {"replayed": replayed, "misses": misses, "pieces": manager._capture_descs}


def test_steps_with_prompts_are_one_graph(answers: dict[str, Any]) -> None:
    sizes = {desc.num_tokens for desc in answers["replayed"] if desc.uniform_token_count is None}
    # alone: 5, 30, 61, 90 and 128 + 22 tokens
    assert {16, 32, 64, 128} <= sizes
    assert not answers["pieces"].get(CUDAGraphMode.PIECEWISE)


def test_tokens_are_those_without_graphs(answers: dict[str, Any]) -> None:
    assert max(answers["misses"]) < NEAR, answers["misses"]
