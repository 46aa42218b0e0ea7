# SPDX-License-Identifier: MIT
"""Every public name of the requirements imports from ``oss_fused`` and works as the docs show."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
import torch

import oss_fused

REQUIRED = [
    "fused_rmsnorm_rope",
    "fused_gated_mlp",
    "fp8_gemm",
    "quantize_fp8",
    "dequantize_fp8",
    "flash_attention",
    "FlashAttentionFunction",
    "AttentionFP8",
    "save_per_channel_state",
    "load_per_channel_state",
    "conv2d",
    "conv2d_bias_relu",
    "conv2d_direct",
    "conv2d_im2col",
    "im2col",
    "softmax",
    "layer_norm",
    "layer_norm_stats",
    "layer_norm_dropout",
    "FusedRMSNormRoPE",
    "FusedGatedMLP",
    "FP8Linear",
    "TritonAutoTuner",
    "TuningResult",
    "KernelMetrics",
    "get_cached_config",
    "RMSNORM_ROPE_CONFIGS",
    "GATED_MLP_CONFIGS",
    "FP8_GEMM_CONFIGS",
    "BenchmarkSuite",
    "TensorSpec",
    "RMSNormRoPEInput",
    "GatedMLPInput",
    "FP8GEMMInput",
    "FP8Format",
    "TritonKernelError",
    "ShapeMismatchError",
    "UnsupportedDtypeError",
    "NumericalOverflowError",
    "validate_rmsnorm_rope_inputs",
    "validate_gated_mlp_inputs",
    "validate_fp8_gemm_inputs",
    "patch_model",
    "PatchPolicy",
]
DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", REQUIRED)
def test_name_is_public_and_documented(name):
    assert name in oss_fused.__all__
    value = getattr(oss_fused, name)
    assert inspect.getdoc(value)


@pytest.mark.parametrize("name", oss_fused.__all__)
def test_every_listed_name_resolves(name):
    assert getattr(oss_fused, name) is not None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fused_rmsnorm_rope", "x weight cos sin"),
        ("fused_gated_mlp", "x gate_weight up_weight activation"),
        ("fp8_gemm", "a b"),
        (
            "flash_attention",
            "q k v causal window_left window_right mask dropout_p seed fp8 fp8_group_size",
        ),
        ("FusedRMSNormRoPE", "hidden_dim head_dim"),
        ("FusedGatedMLP", "hidden_dim intermediate_dim activation"),
        ("FP8Linear", "in_features out_features"),
        ("TritonAutoTuner", "kernel_fn config_space warmup_runs benchmark_runs"),
        ("BenchmarkSuite", "warmup_runs benchmark_runs"),
    ],
)
def test_leading_parameters_are_as_named(name, parameters):
    found = list(inspect.signature(getattr(oss_fused, name)).parameters)
    assert " ".join(found).startswith(parameters)


def test_what_goes_beyond_the_names_is_keyword_only():
    named = {
        "fused_rmsnorm_rope": 4,
        "fused_gated_mlp": 4,
        "fp8_gemm": 2,
        "quantize_fp8": 1,
        "dequantize_fp8": 2,
    }
    for name, count in named.items():
        parameters = list(inspect.signature(getattr(oss_fused, name)).parameters.values())
        assert {p.kind for p in parameters[count:]} == {inspect.Parameter.KEYWORD_ONLY}, name


def test_defaults_are_as_named():
    signature = inspect.signature(oss_fused.BenchmarkSuite)
    assert signature.parameters["warmup_runs"].default == 10
    assert signature.parameters["benchmark_runs"].default == 100
    signature = inspect.signature(oss_fused.fused_gated_mlp)
    assert signature.parameters["activation"].default == "silu"
    assert signature.parameters["activation_on"].default == "up"


def test_errors_are_of_one_family():
    for name in ("ShapeMismatchError", "UnsupportedDtypeError"):
        assert issubclass(getattr(oss_fused, name), (oss_fused.OssFusedError, ValueError))


def test_overflow_is_detected_adjusted_or_raised():
    x = torch.tensor([[1000.0, 1.0]])
    small = torch.ones(1)
    with pytest.raises(oss_fused.NumericalOverflowError, match="scale=1.0"):
        oss_fused.quantize_fp8(x, scale=small, on_overflow="raise")
    q, scale = oss_fused.quantize_fp8(x, scale=small)
    assert oss_fused.dequantize_fp8(q, scale)[0, 0] == pytest.approx(1000, rel=2**-4)


def examples(page):
    """The Python blocks of a page of docs/, with the line they start at."""
    lines, block, start = page.read_text().splitlines(), None, 0
    for number, line in enumerate(lines, 1):
        if line.strip() == "```python":
            block, start = [], number
        elif line.strip() == "```" and block is not None:
            yield start, "\n".join(block)
            block = None
        elif block is not None:
            block.append(line)


BLOCKS = [
    pytest.param(page, start, code, id=f"{page.name}:{start}")
    for page in (DOCS / f"{n}.md" for n in ("operators", "tuning", "measuring", "analysis"))
    for start, code in examples(page)
]


@pytest.mark.parametrize(("page", "start", "code"), BLOCKS)
def test_examples_of_the_docs_run(page, start, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exec(compile(code, f"{page.name}:{start}", "exec"), {"__name__": "example"})


def test_the_docs_show_every_function_and_module():
    used = set()
    for param in BLOCKS:
        for node in ast.walk(ast.parse(param.values[2])):
            if isinstance(node, ast.ImportFrom) and node.module == "oss_fused":
                used.update(alias.name for alias in node.names)
    assert set(REQUIRED) <= used, sorted(set(REQUIRED) - used)


def test_h200_figures_are_numbers():
    path = DOCS / "results" / "h200" / "summary.json"
    if not path.exists():
        pytest.skip("no GPU figures yet")
    figures = json.loads(path.read_text())
    assert all(isinstance(value, int | float) for value in figures.values())
    sources = json.loads(path.with_name("summary-sources.json").read_text())
    assert sources.keys() == figures.keys()
    assert all((path.parent / file).is_file() for file in sources.values())
