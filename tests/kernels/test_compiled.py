# SPDX-License-Identifier: MIT
"""Backend "nvcc": what a build needs and says, and its kernels against the twins on a GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from oss_fused.errors import BackendUnavailableError, ShapeMismatchError
from oss_fused.kernels import compiled
from oss_fused.kernels.op import get_kernel
from tests.kernels import test_backends

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# a rounding of the result; partial sums of a product are float16
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 1e-3}


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with a GPU of compute capability 9.0, every tool, and nothing built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compiled._library.cache_clear()
    yield tmp_path
    compiled._library.cache_clear()


def test_what_a_build_lacks_is_named(hopper, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(BackendUnavailableError, match=r"without \['nvcc \(CUDA_HOME"):
        compiled.build()
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [tool.split(" (")[0] for tool in compiled.missing_tools()] == [
        "nvcc",
        "ninja",
        "a C++ compiler",
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(BackendUnavailableError, match=r"\(8, 0\), expected at least \(8, 9\)"):
        compiled.build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="no NVIDIA GPU"):
        compiled.build()


def test_an_operation_never_builds(hopper, monkeypatch):
    monkeypatch.setattr(cpp_extension, "load", lambda *args, **named: pytest.fail("built"))
    with pytest.raises(BackendUnavailableError, match="python -m oss_fused.kernels.compiled makes"):
        get_kernel("nvcc", "fp8_gemm")
    assert list(hopper.iterdir()) == []


def test_a_build_compiles_all_sources_for_this_gpu(hopper, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        cpp_extension, "load", lambda name, sources, **named: seen.update(named, sources=sources)
    )
    path = compiled.build()
    assert path.parent.is_dir() and path.parent.parent == hopper
    found = {p.relative_to(compiled.FOLDER).as_posix() for p in compiled.FOLDER.rglob("*.cu")}
    assert {Path(s).relative_to(compiled.FOLDER).as_posix() for s in seen["sources"]} == found
    assert "-gencode=arch=compute_90,code=sm_90" in seen["extra_cuda_cflags"]
    # another GPU's library has another name
    assert compiled.library_file((8, 9)) != path

    def fails(*args, **named):
        raise RuntimeError("Error building extension")

    monkeypatch.setattr(cpp_extension, "load", fails)
    with pytest.raises(BackendUnavailableError, match="was not built: Error building"):
        compiled.build()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", compiled.SOURCES)
def test_nvcc_takes_the_sources(source, tmp_path):
    command = ["nvcc", "-std=c++17", "-arch=sm_90", f"-I{compiled.FOLDER}", "-Werror=all-warnings"]
    command += ["-ptx", str(compiled.FOLDER / source), "-o", str(tmp_path / "code.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def built():
    """The library, where this machine can make it."""
    if missing := compiled.missing_tools():
        pytest.skip(f"needs {missing}")
    compiled.build()


def assert_near(got, want, dtype):
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    assert (got - want).norm() <= TOLERANCE[dtype] * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["fp8_gemm", "rmsnorm_rope"])
def test_the_runner_compares_it(built, operation):
    cases = {
        str(case.values[2]): case.values[2]
        for case in test_backends.PAIRS
        if case.values[0] == operation
    }
    assert cases
    for case in cases.values():
        test_backends.test_backends_agree(operation, "nvcc", case, torch.device("cuda"))


# aligned and not, one warp and several, rows that do not stay in registers, heads of odd halves
@pytest.mark.gpu
@pytest.mark.parametrize("table", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("hidden", "head_dim"), [(2880, 64), (96, 6), (17920, 128), (67584, 1024), (8320, 26)]
)
def test_rotation(built, dtype, table, hidden, head_dim):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, hidden, generator=g), torch.randn(hidden, generator=g)
    cos, sin = torch.randn(2, 3, head_dim, generator=g)
    x[0, 1, 3], x[1, 2, -1] = float("nan"), float("inf")
    tables = [t.to(table).cuda() for t in (weight, cos, sin)]
    whole = x.to(dtype).cuda()
    # strided, and from an address that no wide load takes
    for part in (whole, whole[:, ::2], torch.cat([whole, whole], 2)[:, :, 1 : hidden + 1]):
        args = (part, tables[0], *(t[: part.shape[1]] for t in tables[1:]), 1e-6)
        got, want = (get_kernel(b, "rmsnorm_rope")(*args) for b in ("nvcc", "torch"))
        assert_near(got, want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2880, 4096), (3, 33, 8208), (1, 7, 16), (20, 48, 0)])
def test_product(built, m, n, k, dtype):
    g = torch.Generator().manual_seed(0)
    a, b = ((60 * torch.randn(s, k, generator=g)).clamp(-448, 448).to(FP8).cuda() for s in (m, n))
    a_scale, b_scale = (torch.rand(s, 1, generator=g).cuda() / 60 for s in (m, n))
    for bias in (None, torch.randn(n, generator=g).to(dtype).cuda()):
        for scales in ((a_scale, b_scale), (a_scale[:1].view(1), b_scale[:1].view(1))):
            for prefetch in (False, True):
                args = (a, b, *scales, bias, dtype, prefetch)
                got, want = (get_kernel(name, "fp8_gemm")(*args) for name in ("nvcc", "torch"))
                assert_near(got, want, dtype)
    with pytest.raises(ShapeMismatchError, match="expects K a multiple of 16"):
        get_kernel("nvcc", "fp8_gemm")(
            *(torch.zeros(2, 8).to(FP8).cuda() for _ in "ab"), a_scale[:1], b_scale[:1], None, dtype
        )
