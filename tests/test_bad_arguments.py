# SPDX-License-Identifier: MIT
"""Whatever shapes, dtypes, devices and options it gets, a public name works or names the fault.

Only the classes of errors.py may come out: no bare ValueError, RuntimeError or AssertionError.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oss_fused
from oss_fused import (
    BenchmarkSuite,
    FP8GEMMInput,
    FP8Linear,
    FusedGatedMLP,
    FusedRMSNormRoPE,
    GatedMLPInput,
    PatchPolicy,
    RMSNormRoPEInput,
    TensorSpec,
    TritonAutoTuner,
    dequantize_fp8,
    fp8_gemm,
    fused_gated_mlp,
    fused_rmsnorm_rope,
    quantize_fp8,
)
from oss_fused.errors import (
    BackendUnavailableError,
    OssFusedError,
    SchemeError,
    ShapeMismatchError,
    UnsupportedDeviceError,
    UnsupportedDtypeError,
)
from oss_fused.kernels.checks import check_device
from oss_fused.tuning.objective import Objective

FP8 = torch.float8_e4m3fn
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.bool,
    torch.complex64,
    FP8,
    torch.float8_e5m2,
]


@st.composite
def tensors(draw, shape, dtype=torch.float32):
    """A tensor of ``shape`` and ``dtype``, or, one time in three each, of others."""
    if not draw(st.integers(0, 2)):
        dtype = draw(st.sampled_from(DTYPES))
    if not draw(st.integers(0, 2)):
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3))
    device = draw(st.sampled_from(["cpu"] * 9 + ["meta"]))
    made = torch.full(tuple(shape), draw(st.sampled_from([0.0, 0.5, 300.0, -2.0, float("nan")])))
    return made.to(dtype).to(device)


def optional(strategy):
    return st.one_of(st.none(), strategy)


SIZES = st.sampled_from([-3, -1, 0, 1, 2, 3, 4, 8])
WORDS = st.sampled_from(["silu", "gelu", "up", "gate", "tensor", "token", "adjust", "raise", ""])
SCALE = optional(st.one_of(tensors((1,)), tensors((4, 1))))
FUZZED = {
    "quantize_fp8": (
        quantize_fp8,
        {
            "t": tensors((4, 8)),
            "scale": SCALE,
            "strategy": st.one_of(st.sampled_from(["tensor", "token", "channel"]), WORDS),
            "on_overflow": st.one_of(st.sampled_from(["adjust", "saturate", "raise"]), WORDS),
        },
    ),
    "dequantize_fp8": (
        dequantize_fp8,
        {
            "q": tensors((4, 8), FP8),
            "scale": st.one_of(tensors((1,)), tensors((4, 1))),
            "out_dtype": st.sampled_from(DTYPES),
        },
    ),
    "fp8_gemm": (
        fp8_gemm,
        {
            "a": tensors((4, 8)),
            "b": tensors((8, 4), FP8),
            "a_scale": SCALE,
            "b_scale": SCALE,
            "bias": optional(tensors((4,))),
            "out_dtype": st.sampled_from([None, *DTYPES]),
            "on_overflow": st.one_of(st.just("adjust"), WORDS),
        },
    ),
    "fused_rmsnorm_rope": (
        fused_rmsnorm_rope,
        {
            "x": tensors((2, 3, 8)),
            "weight": tensors((8,)),
            "cos": tensors((3, 4)),
            "sin": tensors((3, 4)),
            "eps": st.sampled_from([1e-6, 0.0, -1.0, float("nan")]),
        },
    ),
    "fused_gated_mlp": (
        fused_gated_mlp,
        {
            "x": tensors((3, 8)),
            "gate_weight": tensors((4, 8)),
            "up_weight": tensors((4, 8)),
            "activation": st.one_of(st.just("silu"), WORDS),
            "activation_on": st.one_of(st.just("up"), WORDS),
            "gate_scale": SCALE,
            "up_scale": SCALE,
        },
    ),
    "validate_rmsnorm_rope_inputs": (
        oss_fused.validate_rmsnorm_rope_inputs,
        {n: tensors(s) for n, s in (("x", (2, 3, 8)), ("weight", (8,)), ("cos", (3, 4)))}
        | {"sin": tensors((3, 4))},
    ),
    "RMSNormRoPEInput": (
        RMSNormRoPEInput,
        {n: SIZES for n in ("batch_size", "seq_len", "hidden_dim", "head_dim")},
    ),
    "GatedMLPInput": (
        GatedMLPInput,
        {n: SIZES for n in ("batch_size", "seq_len", "hidden_dim", "intermediate_dim")}
        | {"activation": WORDS},
    ),
    "FP8GEMMInput": (
        FP8GEMMInput,
        {n: SIZES for n in "mnk"} | {"out_dtype": st.sampled_from(DTYPES)},
    ),
    "TensorSpec": (
        lambda shape, name, tensor: TensorSpec(tuple(shape)).validate(name, tensor),
        {"shape": st.lists(SIZES, max_size=3), "name": WORDS, "tensor": tensors((2, 3))},
    ),
    "FP8Linear": (
        lambda n, k, x, o: FP8Linear(n, k, on_overflow=o)(x),
        {"n": SIZES, "k": SIZES, "x": tensors((2, 4)), "o": st.one_of(st.just("adjust"), WORDS)},
    ),
    "static FP8Linear": (
        lambda scale, x: FP8Linear.from_linear(torch.nn.Linear(8, 4), scale)(x),
        {"scale": st.one_of(tensors((1,)), tensors((4, 1))), "x": tensors((2, 8))},
    ),
    "FusedGatedMLP": (
        lambda n, k, x, word: FusedGatedMLP(n, k, word)(x),
        {"n": SIZES, "k": SIZES, "x": tensors((2, 4)), "word": WORDS},
    ),
    "FusedRMSNormRoPE": (
        lambda n, k, x, t: FusedRMSNormRoPE(n, k)(x, t, t),
        {"n": SIZES, "k": SIZES, "x": tensors((2, 3, 8)), "t": tensors((3, 4))},
    ),
}


@pytest.mark.parametrize("name", FUZZED)
@pytest.mark.parametrize("grad", [False, True])
def test_a_result_or_a_named_error(name, grad):
    function, arguments = FUZZED[name]

    @given(st.fixed_dictionaries(arguments))
    def call(given_arguments):
        for value in given_arguments.values() if grad else ():
            if isinstance(value, torch.Tensor) and value.dtype in DTYPES[:3]:
                value.requires_grad_()
        try:
            result = function(**given_arguments)
        except OssFusedError as error:
            assert str(error)
            return
        if grad and isinstance(result, torch.Tensor) and result.requires_grad:
            result.float().sum().backward()

    call()


@pytest.mark.parametrize("name", ["rmsnorm_rope", "gated_mlp", "fp8_gemm"])
def test_validators_and_functions_agree(name):
    """What the one refuses, the other refuses with the same words."""
    function, arguments = FUZZED[name if name == "fp8_gemm" else f"fused_{name}"]
    validate = getattr(oss_fused, f"validate_{name}_inputs")
    further = {"bias", "out_dtype", "on_overflow", "eps"}
    shared = {n: strategy for n, strategy in arguments.items() if n not in further}

    def outcome(check, values):
        try:
            check(**values)
        except OssFusedError as error:
            return type(error), str(error)
        return None

    @given(st.fixed_dictionaries(shared))
    def call(values):
        assert outcome(function, values) == outcome(validate, values)

    call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, FP8])
def test_dtypes_are_refused_by_function_and_validator(dtype):
    for problem, function in (
        (RMSNormRoPEInput(1, 2, 8, 4), fused_rmsnorm_rope),
        (GatedMLPInput(1, 2, 8, 4), fused_gated_mlp),
    ):
        arguments = problem.make()
        validate = getattr(oss_fused, f"validate_{function.__name__.removeprefix('fused_')}_inputs")
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                for check in (function, validate):
                    with pytest.raises(UnsupportedDtypeError, match=rf"\.dtype={dtype}|dtype="):
                        check(**{**arguments, name: value.to(dtype)})


def test_empty_hidden_sizes_are_named():
    nothing = torch.zeros(2, 3, 0)
    with pytest.raises(ShapeMismatchError, match="hidden at least 1"):
        fused_rmsnorm_rope(nothing, torch.zeros(0), torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(ShapeMismatchError, match="at least 1"):
        fused_gated_mlp(nothing, torch.zeros(4, 0), torch.zeros(4, 0))
    with pytest.raises(ShapeMismatchError, match="at least"):
        fp8_gemm(torch.zeros(2, 0), torch.zeros(0, 4))


def test_sizes_are_integers():
    for size in (8.0, "8", None):
        with pytest.raises(ShapeMismatchError, match=f"hidden_dim={size!r}: expected an integer"):
            FusedGatedMLP(size, 4)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 2), (3, 1)])
def test_scales_of_rows_are_a_column(shape):
    with pytest.raises(
        ShapeMismatchError, match=r"scale\.shape=.*: expected one element or \(4, 1"
    ):
        quantize_fp8(torch.ones(4, 8), scale=torch.ones(shape))


def test_scales_of_a_product_are_a_row_or_a_column():
    a, b = quantize_fp8(torch.randn(2, 8)), torch.randn(4, 8)
    codes, column = quantize_fp8(b, strategy="channel")

    def product(scale):
        return fp8_gemm(a[0], codes.t(), a_scale=a[1], b_scale=scale)

    expected = product(column)
    for scale in (column.view(4), column.view(1, 4)):
        assert torch.equal(product(scale), expected)
    with pytest.raises(ShapeMismatchError, match=r"b_scale\.shape=\(2, 2\)"):
        product(column.view(2, 2))


def test_a_gpu_that_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda", "cuda:1", "cpu"):
        assert check_device(name) == torch.device(name)
    with pytest.raises(UnsupportedDeviceError, match="device='cuda:2': expected an index below 2"):
        check_device("cuda:2")


def test_an_activation_without_a_kernel_is_named_at_construction():
    with pytest.raises(SchemeError, match="activation='relu'"):
        FusedGatedMLP(8, 8, activation="relu")
    with pytest.raises(SchemeError, match="activation_on='down'"):
        FusedGatedMLP(8, 8, activation_on="down")


def test_a_suite_names_what_it_cannot_run(monkeypatch):
    suite = BenchmarkSuite(1, 20, device="cpu")
    for run in (
        lambda: suite.benchmark_fp8_gemm([(0, 8, 8)]),
        lambda: suite.benchmark_gated_mlp([0], [1], [8], [8]),
        lambda: suite.benchmark_rmsnorm_rope([1], [0], [64]),
    ):
        with pytest.raises(ShapeMismatchError, match="at least 1"):
            run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="device='cuda'"):
        BenchmarkSuite(device="cuda")


@pytest.mark.parametrize(
    "bad",
    [
        lambda: BenchmarkSuite(-1, device="cpu"),
        lambda: BenchmarkSuite(benchmark_runs=3, device="cpu"),
        lambda: BenchmarkSuite(device="nonsense"),
        lambda: BenchmarkSuite(device="cpu", dtype=torch.int8),
        lambda: BenchmarkSuite(device="cpu").save_report("report.doc"),
        lambda: TritonAutoTuner(print, {}),
        lambda: TritonAutoTuner(print, {"A": (1, 1)}),
        lambda: TritonAutoTuner(print, {"A": (1,)}, warmup_runs=-1),
        lambda: TritonAutoTuner(print, {"A": (1,)}, benchmark_runs=1),
        lambda: Objective(latency=-1),
        lambda: PatchPolicy(linears="int4"),
        lambda: oss_fused.patch_model(torch.nn.Linear(2, 2)),
        lambda: oss_fused.get_cached_config("x", (1, -2), device="cpu"),
        lambda: oss_fused.get_cached_config("x", 3, device="cpu"),
    ],
)
def test_bad_options_are_named(bad):
    with pytest.raises(OssFusedError, match="expected"):
        bad()


def test_the_flag_of_the_hypothesis_profile_decides(tmp_path):
    """Under the conftest of this folder: 20 examples, 300 with --hypothesis-profile=ci."""
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_tiny.py").write_text(
        "import hypothesis\n"
        "def test_tiny():\n"
        "    print('examples', hypothesis.settings().max_examples)\n"
    )
    # the conftest imports from this folder
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for flags, count in (([], 20), (["--hypothesis-profile=ci"], 300)):
        command = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", *flags]
        run = subprocess.run(
            [*command, "test_tiny.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"examples {count}\n" in run.stdout
