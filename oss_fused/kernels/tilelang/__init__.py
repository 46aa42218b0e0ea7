# SPDX-License-Identifier: MIT
"""Backend "tilelang": the same operations written in TileLang, to compare with."""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {
    "fp8_gemm": "gemm",
    "gated_mlp": "mlp_gated",
    "rmsnorm_rope": "rope",
}
