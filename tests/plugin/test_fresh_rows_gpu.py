# SPDX-License-Identifier: MIT
"""Steps in which all sequences begin, on a GPU: attention of rows, in a compiled model."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from oss_fused.layers.vllm.attention import OssAttentionImpl
from tests.plugin.conftest import GRAPHS, PROMPT, build, to_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.usefixtures("compiled")]

# a decode step has a graph, and steps with prompts have none
MODE = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
OPTIONS = GRAPHS | {"compilation_config": MODE}


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prompts_attend_to_their_rows(family, tmp_path, engine, monkeypatch):
    """Answers are those of attention over the cache; what is cached is read from it."""
    attended, attend = [], OssAttentionImpl._attend_rows

    def record(impl, query, key, value, metadata, output):
        attended.append(metadata.num_actual_tokens)
        attend(impl, query, key, value, metadata, output)

    monkeypatch.setattr(OssAttentionImpl, "_attend_rows", record)
    # the last layer computes sampled rows, of the cache
    layers = {"num_hidden_layers": 4}
    if family == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    folder = build(tmp_path, family, head_dim=64, **layers)
    served = engine(
        to_mxfp4(folder) if family == "gpt_oss" else folder,
        quantization="oss_fp8",
        enable_prefix_caching=True,
        max_model_len=192,
        **OPTIONS,
    )
    long = (PROMPT * 50)[:150]
    prompts = [{"prompt_token_ids": ids} for ids in (long, long[:3], long[20:120])]
    params = SamplingParams(
        temperature=0, max_tokens=2, logprobs=0, ignore_eos=True, detokenize=False
    )

    def answer():
        found = served.llm.generate(prompts, params, use_tqdm=False)
        return [max(p.logprob for p in each.outputs[0].logprobs[0].values()) for each in found]

    from_rows = answer()
    assert attended and set(attended) == {sum(len(p["prompt_token_ids"]) for p in prompts)}
    attended.clear()
    # all but a prompt's last block comes from the prefix cache
    from_cache = answer()
    assert not attended
    assert served.llm.reset_prefix_cache()
    monkeypatch.setattr(OssAttentionImpl, "reads_rows", lambda impl, metadata: False)
    without = answer()
    assert not attended
    # a code that flips moves a log-probability by about 0.1
    assert from_rows == pytest.approx(from_cache, abs=0.15)
    assert from_rows == pytest.approx(without, abs=0.15)
