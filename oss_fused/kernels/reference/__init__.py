# SPDX-License-Identifier: MIT
"""Backend "torch": the fp32-math twin of every operation. Ground truth, and the CPU path."""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {
    "act_mul_quant": "mlp",
    "add_rms_norm_quant": "norm",
    "add_rms_norm_router": "router",
    "decode_attention": "attention",
    "dequantize_fp8": "quantize",
    "fp8_gemm": "gemm",
    "fp8_linear": "gemm",
    "fp8_linear_add": "linear_add",
    "gated_mlp": "mlp",
    "gated_mlp_backward": "backward",
    "moe_fp8": "moe",
    "moe_mxfp4": "moe",
    "moe_repack_mxfp4": "mxfp4",
    "moe_route": "router",
    "norm_qkv_rope_kv": "qkv",
    "qkv_rope_kv": "qkv",
    "quantize_fp8": "quantize",
    "quantize_fp8_adjusted": "quantize",
    "rmsnorm_rope": "rope",
    "rmsnorm_rope_backward": "backward",
    "rope_kv": "rope",
}
