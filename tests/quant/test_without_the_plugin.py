# SPDX-License-Identifier: MIT
"""Compressed-tensors and MXFP4 outputs in a vLLM that does not know this package."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.model_factory import get_shape, make_model

from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from tests.plugin.conftest import SHARED_GPU, Engine
from tests.quant.runs import Models, calibrate, config_of, tensors, whole_model

pytestmark = pytest.mark.serve


def scores_of(llm):
    """Log-probabilities of the tokens of fixed prompts."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(range(5 * i, 5 * i + 20))} for i in range(1, 9)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    return [
        [step[token].logprob for token, step in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])]
        for o in llm.generate(prompts, params)
    ]


_SCORE = f"""
import gc, json, sys, vllm
from vllm.distributed import cleanup_dist_env_and_memory

{inspect.getsource(scores_of)}

options = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    llm = vllm.LLM(folder, max_model_len=64, enforce_eager=True, max_num_seqs=8, **options)
    with open(folder + "/scores.json", "w") as file:
        json.dump(scores_of(llm), file)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
"""


# as vLLM alone has it
PLUGIN = {"max_num_seqs": 8} | (SHARED_GPU if torch.cuda.is_available() else {})


def score_alone(*folders: Path) -> list[torch.Tensor]:
    """Log-probabilities [8, 19] that vLLM without plugins gives, of each model.

    One process loads them in turn: it imports vLLM, most of the time, once.
    """
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # vLLM compiles parts of its sampler even with enforce_eager, which takes most of the time
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    options = SHARED_GPU if torch.cuda.is_available() else {}
    command = [sys.executable, "-c", _SCORE, json.dumps(options), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.tensor(json.loads((each / "scores.json").read_text())) for each in folders]


def test_vllm_alone_reads_the_same_model(tmp_path: Path) -> None:
    make_model(tmp_path / "m", get_shape("llama", "tiny"))
    for form in ("compressed-tensors", "oss-fp8"):
        Run(make_recipe({"format": form}), RunOptions(tmp_path / "m", tmp_path / form)).execute()
    bf16, alone = score_alone(tmp_path / "m", tmp_path / "compressed-tensors")
    served = Engine(tmp_path / "oss-fp8", **PLUGIN)
    plugin = torch.tensor(scores_of(served.llm))
    served.close()
    quantisation = (alone - bf16).abs().mean()
    # how a processor's kernels round activations and order sums differs; what they compute is as
    # near to each other as either is to bf16, which a wrong scale or weight would not leave so
    difference = (alone - plugin).abs().mean()
    assert difference < quantisation, (difference, quantisation)


def test_vllm_maps_every_tensor_of_plain_mxfp4_to_a_parameter(
    models: Models, tmp_path: Path
) -> None:
    """Names by vLLM's own mapper, shapes by what its MXFP4 loader takes them for."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    calibrate(models("gpt-oss"), tmp_path / "out", format="mxfp4")
    after, config = tensors(tmp_path / "out"), config_of(tmp_path / "out")
    mapper = GptOssForCausalLM.hf_to_vllm_mapper
    found = {mapper.apply_list([name])[0]: tensor for name, tensor in after.items()}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        assert found[f"{experts}.w13_weight"].view(4, 2 * inner, -1).shape[-1] == hidden // 2
        assert found[f"{experts}.w2_weight"].view(4, -1, inner // 2).shape[1] == hidden
        assert found[f"{experts}.w13_weight_scale"].shape == (4, 2 * inner, hidden // 32)
        assert found[f"{experts}.w2_weight_scale"].shape == (4, hidden, inner // 32)
        assert {found[f"{experts}.{part}_bias"].dtype for part in ("w13", "w2")} == {torch.bfloat16}
        assert f"model.layers.{layer}.attn.sinks" in found
    assert not any(name.endswith(("_blocks", "_scales", "_proj")) for name in found)


@pytest.mark.gpu
def test_vllm_alone_serves_plain_mxfp4(tmp_path: Path) -> None:
    make_model(tmp_path / "m", get_shape("gpt-oss", "tiny"))
    calibrate(tmp_path / "m", tmp_path / "out", format="mxfp4")
    model = whole_model(tmp_path / "out")
    (found,) = score_alone(tmp_path / "out")
    for row, number in zip(found, range(1, 9)):
        ids = torch.arange(5 * number, 5 * number + 20)
        with torch.no_grad():
            expected = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, ids[1:, None])[:, 0]
        assert (row - expected).abs().mean() < 0.1
