# SPDX-License-Identifier: MIT
"""Backend "cuda": adapters over compiled operations that cuBLASLt and vLLM ship, to compare with.

Their own numerics hold: vLLM's quantisers keep a scale of 2**-17 / 7 or more where ours keep
2**-126, and its rotation rounds in the tensors' dtype.
"""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {
    "act_mul_quant": "mlp",
    "add_rms_norm_quant": "norm",
    "fp8_gemm": "gemm",
    "fp8_linear": "linear",
    "quantize_fp8": "quantize",
    "rmsnorm_rope": "rope",
    "rope_kv": "rope",
}
