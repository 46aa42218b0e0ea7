# SPDX-License-Identifier: MIT
"""Speculative decoding leaves the greedy text as it is: n-grams, draft heads in bf16 and FP8.

How decode attention verifies drafts: test_attention_impl.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.draft_factory import LAYOUTS, make_draft
from harness.model_factory import get_shape, make_model
from torch import nn

pytest.importorskip("vllm")

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.plugin import config
from tests.plugin.conftest import SHARED_GPU, Engine, few_tokens

pytestmark = pytest.mark.serve

SHAPE = replace(get_shape("gpt-oss", "tiny"), vocab=512)
# one that repeats itself, which n-grams draft, and one that does not
PROMPTS = ([9, 10, 11, 12] * 5, list(range(5, 30)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts")
    make_model(path / "model", SHAPE)
    few_tokens(path / "model")
    for layout in LAYOUTS:
        make_draft(path / layout, SHAPE, layout)
    return path


def served(folder, drafts=None, **options):
    """The greedy tokens of PROMPTS, the draft model's methods by module, drafts that were right."""
    from vllm import SamplingParams

    serving = {"quantization": "oss_fp8", "max_model_len": 96, "disable_log_stats": False}
    options = SHARED_GPU | serving | options
    engine = Engine(folder / "model", speculative_config=drafts, **options)
    try:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        out = engine.llm.generate(prompts, params, use_tqdm=False)
        runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        drafter = getattr(getattr(runner, "drafter", None), "model", None)
        modules = dict(drafter.named_modules()) if isinstance(drafter, nn.Module) else {}
        methods = {
            name: type(m.quant_method).__name__
            for name, m in modules.items()
            if hasattr(m, "quant_method")
        }
        name = "vllm:spec_decode_num_accepted_tokens"
        right = sum(m.value for m in engine.llm.get_metrics() if m.name == name)
        return [list(one.outputs[0].token_ids) for one in out], methods, right
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain(folder):
    return served(folder)[0]


def eagle(folder, name, **options):
    return {"method": "eagle3", "model": str(folder / name), "num_speculative_tokens": 3} | options


def test_ngram_drafts(folder, plain):
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafts = {"method": "ngram", "num_speculative_tokens": 3} | lookup
    text, _, right = served(folder, drafts)
    assert text == plain and right > 0


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("specforge", {}),
        ("peagle", {"parallel_drafting": True}),
        ("dflash", {"method": "dflash"}),
    ],
)
def test_a_head_that_is_not_quantised_is_left_alone(layout, options, folder, plain):
    text, methods, _ = served(folder, eagle(folder, layout, **options))
    assert text == plain and methods
    ours = {name for name, method in methods.items() if method.startswith("Oss")}
    # DFlash has no head of its own: the target's takes the place
    assert ours == ({"lm_head"} if layout == "dflash" else set()), methods


def test_a_head_in_fp8(folder, plain):
    text, methods, _ = served(folder, eagle(folder, "speculators", quantization="oss_fp8"))
    assert text == plain
    assert {methods[name] for name in ("lm_head", "model.fc")} == {"OssFp8LinearMethod"}
    assert methods["model.layers.0.self_attn.qkv_proj"] == "OssFp8LinearMethod"


@pytest.mark.parametrize("drafts", [False, True])
def test_options_are_the_served_models(drafts, monkeypatch):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    ours = config.OssFp8Config()
    shared = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=dict, model_type="gpt_oss"),
            runner_type="generate",
            trust_remote_code=False,
        ),
        speculative_config=object(),
        # vLLM makes another configuration for each layer of a head that drafts
        quant_config=config.OssFp8Config() if drafts else ours,
        additional_config={"oss_fused": {"ignore": ["fc"], "lm_head": False}},
        load_config=SimpleNamespace(load_format="auto"),
    )
    monkeypatch.setattr(config, "get_current_vllm_config", lambda: shared)
    monkeypatch.setattr(config.fingerprint, "record", lambda _: None)
    ours._read_options()
    assert (ours.scheme_of("fc") is not None) is drafts
    head = ours.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head")
    assert isinstance(head, OssFp8LinearMethod) is drafts
    assert getattr(head, "may_be_absent", False) is drafts


def test_the_served_models_head_takes_the_place_of_an_absent_one():
    scheme = config.OssFp8Config().scheme_of("lm_head")
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.full((2, 16), float("nan")))
    layer.logical_widths = [2]
    method = OssFp8LinearMethod(scheme, False, "lm_head")
    with pytest.raises(CheckpointError, match="missing"):
        method.process_weights_after_loading(layer)
    method.may_be_absent = True
    method.process_weights_after_loading(layer)
    assert layer.weight.isnan().all()
    # a part that is missing is an error all the same
    layer.weight.data[0] = 1.0
    with pytest.raises(CheckpointError, match="missing"):
        method.process_weights_after_loading(layer)
