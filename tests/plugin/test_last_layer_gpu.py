# SPDX-License-Identifier: MIT
"""The last decoder layer of prompts on a GPU: sampled rows alone, in a compiled model."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from oss_fused.layers.vllm import attention, sampled_rows
from oss_fused.layers.vllm.experts import mxfp4
from oss_fused.plugin import last_layer
from tests.plugin.conftest import GRAPHS, PROMPT, build, to_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.usefixtures("compiled")]

LENGTHS = (50, 3, 31)
# rows of the step that reads the prompts -> its graphs: none, as only decode steps have them; or
# pieces with padding, of which the last one is left out
MODES = {
    sum(LENGTHS): {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
    128: {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 128]},
}


@pytest.mark.parametrize("rows_of_step", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_last_layer_of_sampled_rows(family, rows_of_step, tmp_path, engine, monkeypatch):
    """First tokens are those of all rows, which a prompt's log-probabilities ask for."""
    monkeypatch.setattr(last_layer, "_PIECE_TOKENS", 0)
    taken = []

    def take(x, rows):
        taken.append((x.shape[0], len(rows)))
        return sampled_rows.take_rows(x, rows)

    for module in (attention, mxfp4):
        monkeypatch.setattr(module, "take_rows", take)
    folder = build(tmp_path, family, head_dim=64)
    served = engine(
        to_mxfp4(folder) if family == "gpt_oss" else folder,
        quantization="oss_fp8",
        enable_prefix_caching=False,
        **(GRAPHS | {"compilation_config": MODES[rows_of_step]}),
    )
    prompts = [{"prompt_token_ids": (PROMPT * 5)[:length]} for length in LENGTHS]
    first = []
    for all_rows in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False,
            prompt_logprobs=0 if all_rows else None,
        )  # fmt: skip
        found = served.llm.generate(prompts, params, use_tqdm=False)
        first.append(
            [max(p.logprob for p in each.outputs[0].logprobs[0].values()) for each in found]
        )
        if all_rows:
            assert not taken
            continue
        # attention, and in gpt-oss the experts' input and their logits
        tensors = 3 if family == "gpt_oss" else 1
        assert sum(rows for rows, _ in taken) == rows_of_step * tensors
        taken.clear()
    # another kernel's attention; a code that flips moves a log-probability by about 0.1
    assert first[0] == pytest.approx(first[1], abs=0.15)
