# SPDX-License-Identifier: MIT
"""`pip install oss-fused` gives the operators: torch, Triton and the other base packages only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# distribution -> module, where they differ
MODULES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}

_SCRIPT = """
import sys

HIDDEN = sys.argv[1].split(",")
# as if it were not installed
sys.modules.update(dict.fromkeys(HIDDEN))

import torch

import oss_fused
from oss_fused.kernels.op import get_kernel

for name in oss_fused.__all__:
    getattr(oss_fused, name)
x = torch.randn(3, 40)
y = oss_fused.layer_norm(oss_fused.softmax(x))
for_triton = (get_kernel("triton", "softmax")(x, "two_pass"), None, None, 1e-5, "two_pass")
torch.testing.assert_close(get_kernel("triton", "layer_norm")(*for_triton), y)
q = torch.randn(1, 2, 9, 16, requires_grad=True)
oss_fused.flash_attention(q, q, q, causal=True, fp8="channel").sum().backward()
w = torch.randn(4, 3, 3, 3)
oss_fused.conv2d_bias_relu(torch.randn(1, 3, 6, 6), w, torch.zeros(4), padding=1)
codes, scale = oss_fused.quantize_fp8(x)
oss_fused.fp8_gemm(x, x.t())
oss_fused.fused_gated_mlp(x, torch.randn(8, 40), torch.randn(8, 40))
tables = (torch.ones(3, 8), torch.zeros(3, 8))
oss_fused.fused_rmsnorm_rope(x[None], torch.ones(40), *tables)
suite = oss_fused.BenchmarkSuite(1, 20, device="cpu", compile_baseline=False)
assert {row.status for row in suite.benchmark_softmax([(2, 16)])} == {"ok"}
assert not any(sys.modules[name] for name in HIDDEN)
print("operators run")
"""


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", one)[0].lower() for one in requirements}


def test_operators_need_the_base_packages_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = distributions(project["dependencies"])
    assert base == {"torch", "triton", "numpy", "tqdm"}
    extras = distributions([r for part in project["optional-dependencies"].values() for r in part])
    hidden = {MODULES.get(name, name.replace("-", "_")) for name in extras - base - {"oss-fused"}}
    assert {"vllm", "transformers", "pydantic", "yaml", "safetensors"} <= hidden
    # a helper of torch's own
    hidden -= {"jinja2"}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, ",".join(sorted(hidden))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("operators run\n")
