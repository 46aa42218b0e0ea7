# SPDX-License-Identifier: MIT
"""Models with SiLU-gated experts, in FP8, against a fake-quantised transformers model."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from tests.plugin.conftest import (
    FP8,
    assert_agrees,
    build,
    calibrate,
    edit,
    quantize_rows,
    tensors_of,
)

pytestmark = pytest.mark.serve

CHANGES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
}
FP8_EXPERTS = {"additional_config": {"oss_fused": {"experts": "fp8"}}}


def build_sharp(folder, family):
    """A random model whose router decides clearly: rounding must not change who is chosen."""
    build(folder, family, **CHANGES[family])
    gates = {n: t for n, t in tensors_of(folder).items() if n.endswith(".gate.weight")}
    edit(folder, {name: torch.randn_like(gate) for name, gate in gates.items()})
    return folder


def is_expert(name):
    return ".experts." in name and name.endswith(".weight")


def with_rounded_experts(folder):
    """Round the experts of a saved model to FP8 per row: what the reference then computes with."""
    rounded = {}
    for name, weight in tensors_of(folder).items():
        if is_expert(name):
            codes, scale = quantize_rows(weight)
            rounded[name] = (codes.float() * scale).bfloat16()
    edit(folder, rounded)
    return folder


def in_fp8(folder):
    """The checkpoint that calibration writes: codes and scale of every expert's linears."""
    calibrate(folder, experts="linears")
    new = {}
    for name, weight in tensors_of(folder).items():
        # Mixtral's are not named *_proj
        if is_expert(name) and weight.dtype != FP8:
            new[name], new[f"{name}_scale"] = quantize_rows(weight)
    edit(folder, new)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"experts": "linears"', '"experts": "fp8"'))
    return folder


@pytest.mark.parametrize("family", list(CHANGES))
def test_online_and_reload(family, tmp_path, engine):
    torch.manual_seed(3)
    folder = build_sharp(tmp_path, family)
    served = engine(folder, quantization="oss_fp8", **FP8_EXPERTS)
    result = served.generate()
    layer = served.model.model.layers[0]
    mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    method = mlp.experts.routed_experts.quant_method
    assert type(method).__name__ == "OssFp8MoEMethod" and method.is_monolithic
    assert type(mlp.gate.quant_method).__name__.endswith("UnquantizedLinearMethod")
    served.llm.collective_rpc("reload_weights")
    assert served.generate() == result
    # the reference rounds no activations of the experts
    assert_agrees(result, with_rounded_experts(folder), tolerance=0.3)


@pytest.mark.parametrize("family", list(CHANGES))
def test_calibrated(family, tmp_path, engine):
    torch.manual_seed(3)
    folder = build_sharp(tmp_path / "bf16", family)
    Run(make_recipe({"experts": "fp8"}), RunOptions(folder, tmp_path / "fp8")).execute()
    served = engine(tmp_path / "fp8")
    assert_agrees(served.generate(), with_rounded_experts(folder), tolerance=0.3)


def test_a_bad_scale_is_named(tmp_path, engine):
    torch.manual_seed(3)
    folder = in_fp8(build_sharp(tmp_path, "mixtral"))
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight_scale"
    scale = tensors_of(folder)[name]
    scale[5] = 0
    edit(folder, {name: scale})
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.weight_scale' holds 0"):
        engine(folder)
