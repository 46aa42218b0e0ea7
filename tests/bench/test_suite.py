# SPDX-License-Identifier: MIT
"""BenchmarkSuite: it rejects broken kernels, times right ones, and its reports say so."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.nn.functional as F

from oss_fused.bench.roofline import Ceilings
from oss_fused.bench.runner import KernelRunner, shared_operations, verify
from oss_fused.bench.suite import BenchmarkRow, BenchmarkSuite
from oss_fused.bench.suite_report import scoreboard, winners
from oss_fused.errors import BackendUnavailableError, ShapeMismatchError, TritonKernelError
from oss_fused.functional import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope
from oss_fused.kernels.op import get_kernel
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

ROPE = RMSNormRoPEInput(2, 5, 64, 16)
MLP = GatedMLPInput(1, 5, 64, 96)
GEMM = FP8GEMMInput(15, 48, 64)
CEILINGS = Ceilings("test", 10.0, {"bfloat16": 0.1, "float32": 0.1})


def wrong_eps(x, weight, cos, sin):
    return fused_rmsnorm_rope(x, weight, cos, sin, eps=1e-5)


def rope_interleaved(x, weight, cos, sin):
    y = fused_rmsnorm_rope(x, weight, torch.ones_like(cos), torch.zeros_like(sin))
    y = y.float().view(*x.shape[:2], -1, cos.shape[-1])
    rotated = torch.stack([-y[..., 1::2], y[..., 0::2]], -1).flatten(-2)
    return (y * cos[:, None] + rotated * sin[:, None]).view(x.shape).to(x.dtype)


def negated_sin(x, weight, cos, sin):
    return fused_rmsnorm_rope(x, weight, cos, -sin)


def swallows_nan(x, weight, cos, sin):
    return fused_rmsnorm_rope(x, weight, cos, sin).nan_to_num()


def skips_last_row(x, weight, cos, sin):
    out = fused_rmsnorm_rope(x, weight, cos, sin)
    out[:, -1] = 0
    return out


def in_place(x, weight, cos, sin):
    return x.copy_(fused_rmsnorm_rope(x, weight, cos, sin))


def activates_the_gate(x, gate_weight, up_weight, activation):
    return fused_gated_mlp(x, gate_weight, up_weight, activation, activation_on="gate")


def tanh_gelu_for_silu(x, gate_weight, up_weight, activation):
    return fused_gated_mlp(x, gate_weight, up_weight, "gelu_tanh")


def skips_k_tail(a, b):
    return fp8_gemm(a[:, :-8], b[:-8])


def forgets_the_scale(a, b):
    return (a.to(torch.float8_e4m3fn).float() @ b.to(torch.float8_e4m3fn).float() * 0.9).to(a.dtype)


def e5m2_for_e4m3(a, b):
    return (a.to(torch.float8_e5m2).float() @ b.to(torch.float8_e5m2).float()).to(a.dtype)


def wrong_dtype(a, b):
    return fp8_gemm(a, b, out_dtype=torch.float32)


def crashes(a, b):
    raise RuntimeError("illegal memory access")


BROKEN = [
    (wrong_eps, ROPE),
    (rope_interleaved, ROPE),
    (negated_sin, ROPE),
    (swallows_nan, ROPE),
    (skips_last_row, ROPE),
    (in_place, ROPE),
    (activates_the_gate, MLP),
    (tanh_gelu_for_silu, MLP),
    (skips_k_tail, GEMM),
    (forgets_the_scale, GEMM),
    (e5m2_for_e4m3, GEMM),
    (wrong_dtype, GEMM),
    (crashes, GEMM),
]


@pytest.mark.parametrize(("kernel", "problem"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_broken_kernel_gets_no_time(kernel, problem):
    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS)
    (row,) = suite.benchmark("op", [problem], {"broken": kernel})
    assert row.status == "wrong" and row.latency_ms is None and row.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_kernels_pass(dtype):
    for function, problem in (
        (fused_rmsnorm_rope, RMSNormRoPEInput(2, 5, 64, 16, dtype)),
        (fused_gated_mlp, GatedMLPInput(1, 5, 64, 96, "silu", dtype)),
        (fused_gated_mlp, GatedMLPInput(1, 5, 64, 96, "gelu", dtype)),
        (fp8_gemm, FP8GEMMInput(15, 48, 64, out_dtype=dtype)),
    ):
        verdict = verify(function, problem)
        assert verdict.passed, (problem, verdict)


@pytest.fixture(scope="module")
def suite():
    suite = BenchmarkSuite(1, 20, device="cpu", dtype=torch.float32, ceilings=CEILINGS)
    suite.benchmark_rmsnorm_rope((1,), (8,), (64, 128))
    suite.benchmark_gated_mlp((1,), (4,), (64,), (96,))
    suite.benchmark_fp8_gemm([(8, 64, 64)])
    suite.benchmark("gated_mlp", [MLP], {"broken <b>": activates_the_gate})
    return suite


def test_rows_are_complete_and_consistent(suite):
    good = [row for row in suite.rows if row.status == "ok"]
    assert len(good) == 8 and len(suite.rows) == 9
    for row in good:
        assert 0 < row.latency_ms <= row.p90_ms <= row.p99_ms
        assert row.bandwidth_utilization == pytest.approx(row.bandwidth_gbps / 10.0)
        assert len(row.samples_ms) >= 20
    by_name = {row.name: row for row in good}
    ours = by_name["fp8_gemm/8x64x64/oss_fused"]
    theirs = by_name["fp8_gemm/8x64x64/pytorch"]
    assert ours.speedup == pytest.approx(theirs.latency_ms / ours.latency_ms)
    assert ours.tflops == pytest.approx(2 * 8 * 64 * 64 / ours.latency_ms / 1e9)


def test_text_report_names_winner_and_failure(suite):
    text = suite.generate_report()
    assert "WRONG" in text and "rmsnorm_rope" in text
    board, *blocks = text.split("\n\nrmsnorm_rope\n")
    stars = [line for line in blocks[0].splitlines() if " * " in line]
    assert len(stars) == len(winners(suite.rows)) == 4
    # who is fastest where, at a glance: a line a problem, a star a line, what failed in words
    assert board.count(" *") == 4 and board.count("wrong") == 1


def test_the_strongest_baseline_stands_first():
    """Eager PyTorch, which a reader would not use, is measured first and shown last."""
    times = {"pytorch": 20.0, "oss_fused": 1.0, "pytorch compiled": 1.25, "broken": None}
    rows = [
        BenchmarkRow("norm", "8x8", name, "ok" if ms else "wrong", latency_ms=ms)
        for name, ms in times.items()
    ]
    header, line = scoreboard(rows)
    assert header[2:] == ["oss_fused", "pytorch compiled", "pytorch", "broken"]
    assert line[2:] == ["**1**", "1.25 (1.25x)", "20 (20.00x)", "wrong"]


def test_reports_are_written(suite, tmp_path):
    raw = json.loads(suite.save_report(tmp_path / "out" / "r.json").read_text())
    assert len(raw["rows"]) == 9
    assert {"timestamp", "commit", "versions"} <= raw["environment"].keys()
    markdown = suite.save_report(tmp_path / "r.md").read_text()
    # a winner is marked on the board and in its operation's table
    assert markdown.count("**") == 2 * 2 * 4 and markdown.count("![") == 7
    assert markdown.count("![efficiency") == 1, "of the operation with several problems"
    for name in ("rmsnorm_rope", "gated_mlp", "fp8_gemm"):
        for kind in ("roofline", "latency"):
            assert f"(r-{kind}-{name}.png)" in markdown
            assert (tmp_path / f"r-{kind}-{name}.png").read_bytes().startswith(b"\x89PNG")
    page = suite.save_report(tmp_path / "r.html").read_text()
    assert page.count("data:image/png;base64,") == 7
    assert "broken &lt;b&gt;" in page and "broken <b>" not in page
    assert suite.save_report(tmp_path / "r.txt").read_text() == suite.generate_report()
    with pytest.raises(ValueError, match=r"r\.pdf"):
        suite.save_report(tmp_path / "r.pdf")


def test_compiled_baseline_is_one_more_verified_row(monkeypatch):
    # tracing is what can go wrong here; the C++ compiler would take 20 s
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, compile_baseline=True)

    def double_silu(x, gate_weight, up_weight, activation):
        return F.linear(x, gate_weight) * F.silu(F.linear(x, up_weight))

    rows = suite.benchmark("gated_mlp", [MLP], {"eager": double_silu})
    assert [row.implementation for row in rows] == ["eager", "eager compiled"]
    assert [row.status for row in rows] == ["ok", "ok"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_energy_needs_a_gpu():
    with pytest.raises(BackendUnavailableError, match="energy=True"):
        BenchmarkSuite(energy=True)


@pytest.mark.gpu
def test_energy_gives_work_per_joule():
    suite = BenchmarkSuite(1, 20, energy=True, compile_baseline=False)
    for row in suite.benchmark_fp8_gemm([(1024, 1024, 1024)])[:2]:
        assert row.status == "ok", row.message
        watts = row.energy_mj / row.latency_ms
        assert row.gops_per_watt > 0 and 20 < watts < 3000
    assert "GOPS/W" in suite.generate_report()


def test_peak_memory_is_in_row_and_report(monkeypatch):
    from oss_fused.bench import suite as module

    seen = []
    peaks = iter((3_000_000, None))

    def peak(call, device):
        seen.append(call())
        return next(peaks)

    monkeypatch.setattr(module, "peak_memory_bytes", peak)
    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, backends=())
    first, second = suite.benchmark_gated_mlp((1,), (4,), (64,), (96,))
    assert (first.peak_memory_bytes, second.peak_memory_bytes) == (3_000_000, None)
    assert [out.shape[-1] for out in seen] == [96, 96]
    assert "peak MB" in suite.generate_report()


@pytest.mark.gpu
def test_peak_memory_of_a_call():
    suite = BenchmarkSuite(1, 20, compile_baseline=False, backends=())
    for row in suite.benchmark_fp8_gemm([(1024, 2048, 4096)]):
        # the output in bf16; an eager product makes a copy or two of its operands beside it
        assert 1024 * 2048 * 2 <= row.peak_memory_bytes < 1 << 30


@pytest.mark.gpu
def test_what_cannot_be_captured_says_how_to_time_it():
    def waits(x, gate_weight, up_weight, activation):
        torch.cuda.synchronize()
        return fused_gated_mlp(x, gate_weight, up_weight, activation)

    for graphs, status in ((True, "failed"), (False, "ok")):
        suite = BenchmarkSuite(1, 20, compile_baseline=False, graphs=graphs)
        (row,) = suite.benchmark("gated_mlp", [MLP], {"waits": waits})
        assert row.status == status, row.message
        assert ("graphs=False" in row.message) is graphs
    # PyTorch's allocator no longer takes a capture to be under way: it gives memory back
    torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved


def test_unknown_backend_is_named():
    with pytest.raises(BackendUnavailableError, match="fortran"):
        BenchmarkSuite(device="cpu", backends=("fortran",)).benchmark_fp8_gemm([(8, 64, 64)])


def test_further_backends_get_rows_where_they_run():
    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, backends=("torch", "cuda"))
    rows = suite.benchmark_gated_mlp((1,), (4,), (64,), (96,))
    assert [row.implementation for row in rows] == ["pytorch", "oss_fused", "torch"]
    assert {row.status for row in rows} == {"ok"}


def test_bad_run_counts():
    with pytest.raises(ValueError, match="benchmark_runs=3"):
        BenchmarkSuite(benchmark_runs=3)
    with pytest.raises(ValueError, match="warmup_runs=-1"):
        BenchmarkSuite(warmup_runs=-1)


def test_runner_passes_our_errors_and_wraps_others(monkeypatch):
    runner = KernelRunner("torch")
    args = RMSNormRoPEInput(1, 2, 8, 4).make()
    out = runner.run("rmsnorm_rope", *args.values(), 1e-6)
    assert torch.equal(out, fused_rmsnorm_rope(**args))
    with pytest.raises(ShapeMismatchError):
        runner.run("rmsnorm_rope", args["x"], args["weight"][1:], args["cos"], args["sin"], 1e-6)
    with pytest.raises(TritonKernelError, match="rmsnorm_rope"):
        runner.run("rmsnorm_rope", args["x"])
    with pytest.raises(BackendUnavailableError, match="no_such_op"):
        runner.run("no_such_op")
    with pytest.raises(BackendUnavailableError, match="fortran"):
        KernelRunner("fortran").run("rmsnorm_rope")


@pytest.mark.parametrize(
    ("operation", "problem", "extra"),
    [
        ("rmsnorm_rope", RMSNormRoPEInput(1, 3, 48, 12, torch.float32), (1e-6,)),
        ("gated_mlp", GatedMLPInput(1, 3, 40, 24, dtype=torch.float32), (None, None, "silu", "up")),
    ],
)
def test_backends_agree(operation, problem, extra, device):
    if operation not in shared_operations():
        pytest.skip("one backend here")
    tensors = [v for v in problem.make(device).values() if isinstance(v, torch.Tensor)]
    expected = get_kernel("torch", operation)(*tensors, *extra)
    actual = KernelRunner("triton").run(operation, *tensors, *extra)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
