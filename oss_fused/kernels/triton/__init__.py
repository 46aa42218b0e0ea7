# SPDX-License-Identifier: MIT
"""Backend "triton": one file per operation: docstring, jit kernel, launcher."""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {
    "act_mul_quant": "mlp",
    "add_rms_norm_quant": "norm",
    "add_rms_norm_router": "router_norm",
    "decode_attention": "attention_decode",
    "dequantize_fp8": "quantize",
    "fp8_gemm": "gemm",
    "fp8_linear": "gemm",
    "fp8_linear_add": "linear_add",
    "gated_mlp": "mlp_gated",
    "gated_mlp_backward": "mlp_gated_backward",
    "moe_fp8": "moe_fp8",
    "moe_mxfp4": "moe",
    "moe_repack_mxfp4": "mxfp4",
    "moe_route": "router",
    "norm_qkv_rope_kv": "qkv",
    "qkv_rope_kv": "qkv",
    "quantize_fp8": "quantize",
    "quantize_fp8_adjusted": "quantize",
    "rmsnorm_rope": "rope",
    "rmsnorm_rope_backward": "rope_backward",
    "rope_kv": "rope_kv",
}
