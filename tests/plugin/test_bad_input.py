# SPDX-License-Identifier: MIT
"""Checkpoints and options that are refused while a model loads."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import CheckpointError, SchemeError
from tests.plugin.conftest import build, calibrate, edit, tensors_of, to_mxfp4
from tests.plugin.cpu_kind import tell_vllm

pytestmark = pytest.mark.serve

SCALE = "model.layers.1.self_attn.k_proj.weight_scale"
KV = "model.layers.1.self_attn.v_scale"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A calibrated Llama and its tensors; each test edits a copy of the file."""
    folder = calibrate(build(tmp_path_factory.mktemp("dense"), "llama"), kv=True)
    return folder, tensors_of(folder)


def refuse(engine, folder, tensors, match, drop=(), error=CheckpointError, **options):
    edit(folder, tensors, drop)
    with pytest.raises(error, match=match):
        engine(folder, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (SCALE, 0.0),
        (KV, float("nan")),
        ("model.layers.0.mlp.up_proj.weight", float("nan")),
    ],
)
def test_bad_value(name, value, dense, engine):
    folder, tensors = dense
    bad = tensors[name].clone()
    bad.view(-1)[0] = value
    refuse(engine, folder, tensors | {name: bad}, f"'{name}'")


@pytest.mark.parametrize("name", [SCALE, KV, "model.norm.weight"])
def test_missing_tensor(name, dense, engine):
    folder, tensors = dense
    # found in the headers while vLLM makes its configuration, which wraps errors
    refuse(engine, folder, tensors, f"'{name}'", drop=(name,), error=ValueError)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.bfloat16),
        ("model.layers.0.self_attn.k_proj.weight", torch.float32),
        (SCALE, torch.bfloat16),
        ("lm_head.weight", torch.float8_e4m3fn),
        ("model.embed_tokens.weight", torch.float8_e4m3fn),
        (KV, torch.float16),
    ],
)
def test_wrong_dtype_where_no_check_came_before(name, dtype, dense, engine, monkeypatch):
    monkeypatch.setattr("oss_fused.plugin.config.check_before_load", lambda *_: None)
    folder, tensors = dense
    bad = tensors | {name: tensors[name].to(dtype)}
    refuse(engine, folder, bad, f"'{name}' is {dtype}; expected")


def test_scale_of_the_wrong_shape(dense, engine):
    folder, tensors = dense
    bad = tensors | {SCALE: torch.ones(3, 1)}
    refuse(engine, folder, bad, r"shape \[3, 1\]", error=ValueError)


@pytest.mark.parametrize(
    ("ignore", "match"),
    [(["*.k_proj"], "one matrix"), (["model.layers.9.*"], "matches no"), (["re:("], "regular")],
)
def test_bad_ignore(ignore, match, tmp_path, engine):
    folder = build(tmp_path, "llama")
    options = {"additional_config": {"oss_fused": {"ignore": ignore}}}
    refuse(engine, folder, {}, match, error=SchemeError, quantization="oss_fp8", **options)


def test_missing_expert_scale(tmp_path, engine):
    folder = calibrate(build(tmp_path, "gpt_oss"), experts="fp8", ignore=())
    name = "model.layers.1.mlp.experts.2.w2_weight_scale"
    refuse(engine, folder, {}, f"'{name}' is missing", drop=(name,), error=ValueError)


# who runs the layer makes no difference to what is checked
@pytest.mark.parametrize(("kind", "choice"), [(False, "auto"), (True, "auto"), (True, "vllm")])
def test_mxfp4_scale_that_is_nan(kind, choice, tmp_path, engine, monkeypatch):
    tell_vllm(monkeypatch, amx=kind)
    folder = to_mxfp4(build(tmp_path, "gpt_oss"))
    name = "model.layers.0.mlp.experts.down_proj_scales"
    bad = tensors_of(folder)[name].clone()
    bad[1, 2, 3] = 255
    options = {"additional_config": {"oss_fused": {"expert_kernels": choice}}}
    refuse(engine, folder, {name: bad}, f"'{name}'", quantization="oss_fp8", **options)


def test_missing_experts(tmp_path, engine):
    folder = to_mxfp4(build(tmp_path, "gpt_oss"))
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    match = f"'{name}' is missing"
    refuse(engine, folder, {}, match, drop=(name,), error=ValueError, quantization="oss_fp8")


def test_checkpoint_of_another_quantisation(tmp_path, engine):
    from tests.plugin.conftest import set_quantization

    folder = build(tmp_path, "llama")
    set_quantization(folder, {"quant_method": "gptq", "bits": 4})
    refuse(engine, folder, {}, "gptq", error=Exception, quantization="oss_fp8")
