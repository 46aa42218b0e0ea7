# SPDX-License-Identifier: MIT
"""The three fused operations on tensors, without vLLM: ``python examples/kernels.py``."""

import torch

from oss_fused import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(1, 16, 256, dtype=torch.bfloat16, device=device)

weight = torch.ones(256, dtype=torch.bfloat16, device=device)
angles = torch.arange(16, device=device)[:, None] * torch.ones(64, device=device)
y = fused_rmsnorm_rope(x, weight, angles.cos(), angles.sin())
print("RMSNorm + RoPE", tuple(y.shape))

gate, up = (0.05 * torch.randn(512, 256, dtype=torch.bfloat16, device=device) for _ in "gu")
print("gated MLP", tuple(fused_gated_mlp(x, gate, up).shape))

a, b = y[0], gate.t()
exact, fp8 = a.double() @ b.double(), fp8_gemm(a, b).double()
print(f"FP8 GEMM, relative error {(fp8 - exact).norm() / exact.norm():.3f}")
