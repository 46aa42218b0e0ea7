# SPDX-License-Identifier: MIT
"""Weight-only linears measured by bench_kernels: FP8 weights against bf16's, 16-bit activations."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.nn.functional import linear

from harness.kernel_cases import Case, Prepared, bf16, ops, relative_error
from oss_fused.bench.timing import copies_for
from oss_fused.kernels.op import get_kernel

# (K, N) of projections of gpt-oss-20b and Llama-3-8B
SHAPES = ((2880, 5120), (4096, 2880), (4096, 6144), (4096, 28672), (14336, 4096))
ROWS = (1, 2, 8, 32, 64, 128, 256, 512, 2048)
# a bfloat16 rounding of the result and, where the weight is dequantised, one of that
_TOLERANCE = 4e-3


def _weight_only(m: int, n: int, k: int) -> Prepared:
    x = bf16(m, k)
    dense = [bf16(n, k) / k**0.5 for _ in range(copies_for(n * k))]
    codes = [ops.quantize_fp8(weight, None, "channel") for weight in dense]

    def error() -> float:
        got = ops.weight_only_linear(x, *codes[0], None)[:256]
        want = get_kernel("torch", "weight_only_linear")(x[:256].float(), *codes[0], None)
        return relative_error(got, want)

    return Prepared(
        [functools.partial(ops.weight_only_linear, x, *pair, None, True) for pair in codes],
        {"bf16": [functools.partial(linear, x, weight) for weight in dense]},
        error,
        _TOLERANCE,
    )


def weight_only_cases() -> Iterator[Case]:
    """One to 2048 rows of each shape; weights rotated beyond L2."""
    for k, n in SHAPES:
        for m in ROWS:
            yield Case(
                "w8a16",
                {"M": m, "K": k, "N": n},
                n * k + 2 * m * (k + n),
                2 * m * n * k,
                functools.partial(_weight_only, m, n, k),
            )
