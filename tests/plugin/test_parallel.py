# SPDX-License-Identifier: MIT
"""Two ranks continue a text as one does: learned gpt-oss with MXFP4 experts, Llama with FP8 scales.

What vLLM's CPU build lacks for data and pipeline parallelism is in tests/deploy/cpu_parallel.py.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file

from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from tests.deploy.parallel import LAYOUTS, PROMPTS, ROOT, TEXTS, from_one_rank, run, token_ids
from tests.deploy.parallel_child import OPTIONS, complete
from tests.plugin.conftest import build, calibrate, to_mxfp4

pytestmark = pytest.mark.serve


def make(family, folder):
    if family == "gpt_oss":
        return to_mxfp4(shutil.copytree(ROOT / "tests/data/tiny_gpt_oss", folder))
    # the static scale of an input is one number, which every rank must get whole
    return calibrate(build(folder, family), inputs="tensor", input_scale=0.05)


long_test = pytest.mark.skipif(
    "OSS_FUSED_LONG_TESTS" not in os.environ,
    reason="some minutes, which CI's twenty lack; OSS_FUSED_LONG_TESTS=1 runs it",
)


@long_test
@pytest.mark.parametrize(
    "family,layouts", [("gpt_oss", ("tp2", "ep2", "dp2_ep")), ("llama", ("tp2", "pp2"))]
)
def test_two_ranks_answer_as_one(family, layouts, tmp_path, engine):
    options = {"quantization": "oss_fp8"}
    folder = make(family, tmp_path / family)
    # what the learned model has learned, it is sure of; of anything else it is not
    prompts = token_ids(folder, TEXTS) if family == "gpt_oss" else PROMPTS
    with ThreadPoolExecutor(len(layouts)) as pool:
        results = [
            pool.submit(run, folder, options | LAYOUTS[layout], prompts, 600) for layout in layouts
        ]
        single = complete(engine(folder, **(OPTIONS | options)).llm, prompts)
    for layout, result in zip(layouts, results):
        answers = result.result()
        assert isinstance(answers, list), (layout, answers)
        distance = from_one_rank(answers, single)
        assert distance["agrees"], (layout, distance)


@long_test
@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_two_ranks_reload_as_they_load(family, tmp_path):
    """Two ranks that reload answer bit for bit as two ranks that start with the new weights."""
    folders = [tmp_path / name for name in "ab"]
    for folder, spread in zip(folders, (0.06, 0.04)):
        build(folder, family, initializer_range=spread)
        to_mxfp4(folder) if family == "gpt_oss" else calibrate(folder)
    options = {"quantization": "oss_fp8", **LAYOUTS["tp2"]}
    old, fresh = (run(folder, options, PROMPTS, 600) for folder in folders)
    reloaded = run(folders[0], options | {"reload": str(folders[1])}, PROMPTS, 600)
    assert isinstance(reloaded, list), reloaded
    assert reloaded == fresh != old


@long_test
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_ranks_check_themselves(layout, tmp_path):
    folder = tmp_path / "model"
    recipe = make_recipe({"experts": "mxfp4", "self_check": "on"})
    Run(recipe, RunOptions(ROOT / "tests/data/tiny_gpt_oss", folder)).execute()
    options = {"additional_config": {"oss_fused": {"self_check": True}}, **LAYOUTS[layout]}
    answers = run(folder, options, PROMPTS, 600)
    assert isinstance(answers, list), answers
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.self_attn.v_proj.weight_scale"] *= 8
    save_file(state, folder / "model.safetensors")
    log = tmp_path / "log"
    assert isinstance(run(folder, options, PROMPTS, 600, log), str)
    assert "CheckpointError: self_check: " in log.read_text()


def test_distance_is_seen():
    single = [([1, 2, 3], [{"1": -0.1}, {"2": -0.5, "9": -0.75}, {"3": -0.1}])]
    other = [([1, 9, 4], [{"1": -0.15}, {"9": -0.6, "2": -0.7}, {"4": -0.1}])]
    distance = from_one_rank(other, single)
    assert not distance["same_text"] and distance["same_tokens"] == "1 of 3"
    assert distance["largest_logprob_difference"] == 0.05 and distance["largest_regret"] == 0.25
    assert distance["agrees"]
    assert not from_one_rank([([1], [{"1": -1.1}])], single)["agrees"]
