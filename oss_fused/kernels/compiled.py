# SPDX-License-Identifier: MIT
"""CUDA kernels that nvcc compiles, through torch's cpp_extension: backend "nvcc".

``python -m oss_fused.kernels.compiled`` builds them for this machine's GPU. Nothing else does: an
operation that finds no library says so, and no request waits for a compiler. The library lies in
torch's folder of extensions (TORCH_EXTENSIONS_DIR), under a name that its sources and the GPU's
compute capability determine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from oss_fused.errors import BackendUnavailableError, TritonKernelError

FOLDER = Path(__file__).parent
SOURCES = ("gemm/gemv.cu", "rope/rmsnorm_rope.cu")
# float dtypes as device.cuh numbers them
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# bytes of the widest load
ALIGNMENT = 16
# the first compute capability that converts FP8
_LEAST = (8, 9)
_COMMAND = "python -m oss_fused.kernels.compiled"
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}


def library_file(capability: tuple[int, int]) -> Path:
    """Where the library for GPUs of ``capability`` lies once it is built."""
    digest = hashlib.sha256(f"{torch.version.cuda} {capability}".encode())
    for source in ("device.cuh", *SOURCES):
        digest.update((FOLDER / source).read_bytes())
    name = f"oss_fused_{digest.hexdigest()[:16]}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / name / f"{name}.so"


def missing_tools() -> list[str]:
    """What a build needs and this machine lacks."""
    home = cpp_extension.CUDA_HOME
    found = {
        "nvcc (CUDA_HOME names the folder of the CUDA toolkit)": home is not None
        and shutil.which(str(Path(home) / "bin" / "nvcc")),
        "ninja (pip install ninja)": cpp_extension.is_ninja_available(),
        "a C++ compiler (CXX names one)": shutil.which(cpp_extension.get_cxx_compiler()),
    }
    return [tool for tool, there in found.items() if not there]


def build() -> Path:
    """Compile the library for the current GPU, unless it is there; some twenty seconds.

    Raises:
        BackendUnavailableError: no GPU, one without FP8, or no compiler; or the build failed.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailableError("backend='nvcc' cannot be built: no NVIDIA GPU is usable")
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST:
        raise BackendUnavailableError(
            f"backend='nvcc' cannot be built: compute capability {capability}, expected at least "
            f"{_LEAST}"
        )
    if missing := missing_tools():
        raise BackendUnavailableError(f"backend='nvcc' cannot be built without {missing}")
    path = library_file(capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    version = f"{capability[0]}{capability[1]}"
    try:
        cpp_extension.load(
            path.stem,
            [str(FOLDER / source) for source in SOURCES],
            extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{version},code=sm_{version}"],
            extra_include_paths=[str(FOLDER)],
            build_directory=str(path.parent),
            with_cuda=True,
            is_python_module=False,
        )
    except RuntimeError as error:
        raise BackendUnavailableError(f"backend='nvcc' was not built: {error}") from error
    return path


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_file(torch.cuda.get_device_capability())
    if not path.is_file():
        raise BackendUnavailableError(f"backend='nvcc' is not built: {_COMMAND} makes {path}")
    return ctypes.CDLL(str(path))


def launcher(name: str, kinds: str) -> Callable[..., None]:
    """The library's function ``name``; called with a device and the arguments before the stream.

    Args:
        name: a function of the sources that returns a CUDA error.
        kinds: an argument's kind each: p a pointer, i int, l int64, f float.

    Raises:
        BackendUnavailableError: the library is not built.
    """
    function = getattr(_library(), name)
    function.argtypes = [_KINDS[kind] for kind in kinds + "p"]

    def call(device: torch.device, *args: Any) -> None:
        with torch.cuda.device(device):
            code = function(*args, torch.cuda.current_stream(device).cuda_stream)
        if code:
            raise TritonKernelError(f"{name} failed: {torch.cuda.CudaError(code)}")

    return call


if __name__ == "__main__":
    print(build())
