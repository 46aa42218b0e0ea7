# SPDX-License-Identifier: MIT
"""Steps in which all sequences begin, on a GPU: attention of rows, in a compiled model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from oss_fused.layers.vllm import attention
from oss_fused.layers.vllm.attention import OssAttentionImpl
from tests.plugin.conftest import GRAPHS, PROMPT, build, to_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.usefixtures("compiled")]

# a prompt, and what of it the prefix cache has; the rest is more than few tokens
WHOLE = (PROMPT * 20)[:210]
BEGIN = WHOLE[:64]


class Prompts:
    """The first token behind a prompt, as vLLM's engine sees it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, detokenize=False
        )

    def first(self, ids: list[int]) -> dict[int, float]:
        """The likeliest tokens behind ``ids`` and their log-probabilities."""
        (found,) = self.llm.generate({"prompt_token_ids": ids}, self.params, use_tqdm=False)
        return {token: each.logprob for token, each in found.outputs[0].logprobs[0].items()}

    def behind_a_cached_part(self) -> dict[int, float]:
        """Of WHOLE, whose beginning alone is cached."""
        assert self.llm.reset_prefix_cache()
        self.first(BEGIN)
        return self.first(WHOLE)


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of a token that both have."""
    both = one.keys() & other.keys()
    assert len(both) >= 10
    return max(abs(one[token] - other[token]) for token in both)


@pytest.mark.parametrize("graphs", ["decode steps", "all steps"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prompts_attend_to_their_rows(family, graphs, tmp_path, engine, monkeypatch):
    """What lies before a step's rows, and what a graph replays, is read from the cache."""
    attended, attend = [], OssAttentionImpl._attend_rows

    def record(impl, query, key, value, metadata, output):
        attended.append(metadata.num_actual_tokens)
        attend(impl, query, key, value, metadata, output)

    monkeypatch.setattr(OssAttentionImpl, "_attend_rows", record)
    # the last layer computes sampled rows, of the cache
    layers: dict[str, Any] = {"num_hidden_layers": 4}
    if family == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    folder = build(tmp_path, family, head_dim=64, **layers)
    eager = graphs == "decode steps"
    mode = "FULL_DECODE_ONLY" if eager else "FULL_AND_PIECEWISE"
    sizes = [1, 2, 4] if eager else [1, 2, 4, 256]
    served = engine(
        to_mxfp4(folder) if family == "gpt_oss" else folder,
        quantization="oss_fp8",
        enable_prefix_caching=True,
        **GRAPHS
        | {
            "max_model_len": 256,
            "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
        },
    )
    attended.clear()
    prompts = Prompts(served.llm)
    alone = prompts.first(WHOLE)
    assert set(attended) == ({len(WHOLE)} if eager else set())
    attended.clear()
    cached = prompts.behind_a_cached_part()
    assert not attended
    # codes that flip
    assert distance(alone, cached) < 0.2
    if not eager:
        return
    with monkeypatch.context() as patch:
        patch.setattr(OssAttentionImpl, "reads_rows", lambda impl, metadata: False)
        assert served.llm.reset_prefix_cache()
        assert distance(alone, prompts.first(WHOLE)) < 0.2
    if family == "gpt_oss":
        # one of its layers reads rows here: without the cached part it gives nearly the same
        return
    # what the bound above would tell: the same without the cached part
    monkeypatch.setattr(attention, "is_fresh", lambda metadata: True)
    missing = prompts.behind_a_cached_part()
    assert attended and distance(alone, missing) > 0.2
