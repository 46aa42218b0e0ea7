# SPDX-License-Identifier: MIT
"""Launches of the shapes that are served, for compilers without a GPU (hopper.py): case -> call."""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  registers the operators
from oss_fused.kernels.attention.launches import stream_for
from oss_fused.kernels.moe.config import SCRATCH
from oss_fused.kernels.op import OPERATIONS, get_kernel

BF16, FP8, F32, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
# it reads numbers
NOT_WITHOUT_A_GPU = ("moe_repack_mxfp4",)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def experts(tokens: int, inter: int = 2880, number: int = 32) -> None:
    """gpt-oss's norms, router and experts."""
    hidden = 2880
    padded = -(-inter // 64) * 64
    first = (number, 2 * padded, hidden), empty(number, 2 * padded)
    second = (number, hidden, padded), empty(number, hidden)
    weights: list[torch.Tensor] = []
    for (e, n, k), bias in (first, second):
        scale = empty(e, n // 64, -(-k // 128), 64, dtype=I32)
        weights += [empty(e, n, k // 2, dtype=torch.uint8), scale, bias]
    x, gain = empty(tokens, hidden), empty(hidden)
    router = (empty(number, hidden), empty(number))
    following = (gain, 1e-5, None, empty(SCRATCH, dtype=I32))
    get_kernel("triton", "norm_moe_norm")(
        x, x, gain, 1e-5, *router, *weights, 4, True, 512, *following, True
    )


def codes(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(rows, columns, dtype=FP8), empty(rows, 1, dtype=F32)


def product(rows: int, n: int, k: int, out_dtype: torch.dtype = BF16) -> None:
    (a, a_scale), (b, b_scale) = codes(rows, k), codes(n, k)
    get_kernel("triton", "fp8_gemm")(a, b, a_scale, b_scale, empty(n), out_dtype, True)


def two_levels(rows: int, n: int, k: int) -> None:
    """A linear layer whose few rows keep 16 bits."""
    weight, scale = codes(n, k)
    get_kernel("triton", "fp8_linear")(empty(rows, k), weight, scale, None, empty(n), True, 8)


def gate_up(rows: int, hidden: int = 4096, inter: int = 14336) -> None:
    (x, x_scale), (w, w_scale) = codes(rows, hidden), codes(2 * inter, hidden)
    get_kernel("triton", "gate_up_quant")(x, w, x_scale, w_scale, BF16, "silu", True)


def mlp(rows: int, hidden: int = 4096, inter: int = 14336) -> None:
    (x, x_scale), gate_up = codes(rows, hidden), codes(2 * inter, hidden)
    weights = (gate_up[0], x_scale, gate_up[1], *codes(hidden, inter))
    get_kernel("triton", "mlp_fp8")(x, *weights, None, BF16, "silu", True)


def mlp_norm(rows: int, hidden: int = 4096, inter: int = 14336) -> None:
    (x, x_scale), gate_up = codes(rows, hidden), codes(2 * inter, hidden)
    weights = (gate_up[0], x_scale, gate_up[1], *codes(hidden, inter))
    norm = (empty(rows, hidden), empty(hidden), 1e-5, None)
    get_kernel("triton", "mlp_norm")(x, *weights, None, *norm, "silu", True, 8)


def weight_only(rows: int, n: int = 6144, k: int = 4096) -> None:
    w, scale = codes(n, k)
    get_kernel("triton", "weight_only_linear")(empty(rows, k), w, scale, None, True)


def cache(heads: int, dim: int, page: int = 16, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Keys and values as vLLM lays them out."""
    return list(empty(100, heads, page, 2 * dim, dtype=dtype).transpose(1, 2).split(dim, -1))


def qkv(
    rows: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    dim: int,
    two_levels: bool = False,
    bias: bool = True,
) -> None:
    levels = codes(16, hidden)[0] if two_levels else None
    n = (heads + 2 * kv_heads) * dim
    (x, x_scale), (w, w_scale) = codes(rows, hidden), codes(n, hidden)
    where = empty(rows, dtype=torch.int64)
    get_kernel("triton", "qkv_rope_kv")(
        x, w, x_scale, w_scale, empty(n) if bias else None, BF16, where, empty(4096, dim), heads,
        True,
        *cache(kv_heads, dim), where, None, None, None, None, 1e-5, None, True, levels,
    )  # fmt: skip


def attention(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    page: int = 16,
    sinks: bool = True,
    dtype: torch.dtype = BF16,
    tokens: int = 1,
) -> None:
    query, lens = empty(rows * tokens, heads, dim, dtype=dtype), empty(rows, dtype=I32)
    scales = [empty(1, dtype=F32) if dtype == FP8 else None] * 3
    get_kernel("triton", "decode_attention")(
        query, *cache(kv_heads, dim, page, dtype), empty(rows, 131072 // page, dtype=I32), lens,
        empty(rows * tokens, heads, dim), empty(rows * tokens * heads, dtype=I32), 0.1, window,
        empty(heads) if sinks else None, *scales, True,
        *((empty(rows + 1, dtype=I32), tokens) if tokens > 1 else ()),
    )  # fmt: skip


def stream(
    items: int, heads: int, kv_heads: int, dim: int, window: int, page: int, sinks: bool
) -> None:
    """Attention of large batches, with the launch of so many sequences times KV heads."""
    from oss_fused.kernels.attention.stream import decode_stream

    query, lens = empty(64, heads, dim), empty(64, dtype=I32)
    decode_stream(
        query, *cache(kv_heads, dim, page), empty(64, 1, dtype=I32), lens, torch.empty_like(query),
        0.1, window, empty(heads) if sinks else None, True, stream_for(dim, items),
    )  # fmt: skip


def window(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> None:
    """Attention of prompts over the longest window."""
    query, lens = empty(64, heads, dim, dtype=dtype), empty(3, dtype=I32)
    scales = [empty(1, dtype=F32)] * 3
    get_kernel("triton", "window_attention")(
        query, *cache(kv_heads, dim, 16, dtype), empty(2, 64, dtype=I32), lens[:2], lens,
        empty(64, heads, dim), 0.1, 128, empty(heads), *scales,
    )  # fmt: skip


def greedy(rows: int, columns: int) -> None:
    arrivals = empty(rows, dtype=I32)
    get_kernel("triton", "greedy_tokens")(empty(rows, columns), arrivals)


def convolution(stride: int, channels: int = 64) -> None:
    """Images, last channels, and filters of 3 x 3."""
    shape = {"memory_format": torch.channels_last}
    x = torch.empty(8, channels, 56, 56, dtype=BF16, device="cuda", **shape)
    w = torch.empty(channels, channels, 3, 3, dtype=BF16, device="cuda", **shape)
    rest = ([stride] * 2, [1, 1], [1, 1], True, "implicit")
    get_kernel("triton", "conv2d")(x, w, empty(channels), *rest)


def example(operation: str) -> None:
    """The operation on the arguments of its declaration."""

    def move(argument: Any) -> Any:
        if isinstance(argument, list):
            return [move(each) for each in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        shape, dtype = argument.shape, argument.dtype
        return torch.empty_strided(shape, argument.stride(), dtype=dtype, device="cuda")

    # on the CPU, outside of the mode in which tensors have no memory
    with torch.utils._python_dispatch._disable_current_modes():
        arguments = OPERATIONS[operation].contract.example()
    get_kernel("triton", operation)(*map(move, arguments))


def asked(ptx: str) -> int:
    """Global loads that follow the wait for the kernel ahead before threads exchange anything."""
    behind = ptx.rpartition("griddepcontrol.wait")[2]
    alone = re.split(r"bar\.sync|st\.shared", behind, maxsplit=1)[0]
    return len(re.findall(r"ld\.global|cp\.async\.c[ag]", alone))


call = functools.partial
# gpt-oss-20b, 120b on one of two GPUs, Llama-3-8B; heads whose query heads share keys, or do not
SHORT: dict[str, functools.partial[None]] = {
    **{f"experts {tokens}": call(experts, tokens) for tokens in (1, 8, 128)},
    **{f"qkv 5120 {rows}": call(product, rows, 5120, 2880) for rows in (1, 64, 512)},
    "lm_head 16": call(product, 16, 201088, 2880),
    "lm_head 256, float32": call(product, 256, 201088, 2880, F32),
    "greedy tokens": call(greedy, 8, 201088),
    "joined qkv 1": call(qkv, 1, 2880, 64, 8, 64),
    "joined qkv 8, two levels": call(qkv, 8, 2880, 64, 8, 64, True),
    "joined qkv 128": call(qkv, 128, 2880, 64, 8, 64),
    **{f"o_proj {rows}, two levels": call(two_levels, rows, 2880, 4096) for rows in (1, 8)},
    "o_proj of Llama 1, two levels": call(two_levels, 1, 4096, 4096),
    **{f"lm_head {rows}, two levels": call(two_levels, rows, 201088, 2880) for rows in (1, 2)},
    "gate_up 4": call(gate_up, 4),
    "mlp 257": call(mlp, 257),
    **{f"mlp and norm {rows}": call(mlp_norm, rows) for rows in (1, 64, 128)},
    "weight-only 64": call(weight_only, 64),
    "attention 1": call(attention, 1, 64, 8, 64, 0),
    "attention 1, window": call(attention, 1, 64, 8, 64, 128),
    "attention 16, FP8": call(attention, 16, 64, 8, 64, 0, dtype=FP8),
    "attention 8 of Llama, FP8": call(attention, 8, 32, 8, 128, 0, dtype=FP8),
    "attention 4, four tokens each": call(attention, 4, 64, 8, 64, 0, tokens=4),
    "attention 1, a KV head each": call(attention, 1, 32, 32, 128, 0),
    "attention 1, a KV head each, window": call(attention, 1, 32, 32, 64, 128),
    "stream 65, 64": call(stream, 65, 64, 8, 64, 0, 16, True),
    "stream 512, 64, window": call(stream, 512, 64, 8, 64, 128, 16, True),
    "stream 256, 128": call(stream, 256, 32, 8, 128, 0, 32, False),
    "stream 65, 128, window": call(stream, 65, 32, 8, 128, 128, 16, False),
    "window 64": call(window, 64, 8, 64),
    "window 128, FP8": call(window, 64, 8, 128, FP8),
    "window 128, 128 heads of one": call(window, 128, 1, 128),
    "window 256": call(window, 8, 4, 256),
    "window 256, a KV head each": call(window, 8, 8, 256),
    "convolution": call(convolution, 1),
}
LONG: dict[str, functools.partial[None]] = {
    **{
        f"experts {n}": call(experts, n)
        for n in (2, 4, 32, 64, 192, 256, 384, 512, 1024, 2048, 8192)
    },
    **{
        f"experts of 120b {n}": call(experts, n, 1440, 128)
        for n in (1, 2, 8, 32, 64, 256, 511, 2048)
    },
    **{
        f"product {n} x {k}, {rows}": call(product, rows, n, k)
        for n, k in ((5120, 2880), (2880, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
        for rows in (2, 16, 32, 128, 256, 1024, 2048)
    },
    **{
        f"joined qkv of Llama {rows}": call(qkv, rows, 4096, 32, 8, 128, bias=False)
        for rows in (1, 16, 64, 128)
    },
    **{f"gate_up {rows}": call(gate_up, rows) for rows in (1, 16, 64, 128, 512)},
    "convolution, stride 2": call(convolution, 2),
    **{f"weight-only {rows}": call(weight_only, rows) for rows in (1, 2, 3, 256, 257, 2048)},
    **{
        f"attention {rows}, {heads} over {kv} of {dim}, {width}": call(
            attention, rows, heads, kv, dim, width
        )
        for heads, kv, dim in ((64, 8, 64), (32, 8, 128), (32, 32, 128), (8, 4, 256), (32, 32, 96))
        for width in (0, 128, 2047)
        for rows in (1, 4, 16)
    },
}
EXAMPLES = {
    f"example of {name}": call(example, name)
    for name, operation in OPERATIONS.items()
    if "triton" in operation.modules and name not in NOT_WITHOUT_A_GPU
}
# they take longer to compile than all other examples
for each in [name for name in EXAMPLES if "flash_attention" in name]:
    LONG[each] = EXAMPLES.pop(each)
CASES = {**SHORT, **LONG, **EXAMPLES}

if __name__ == "__main__":
    from tests.kernels.hopper import hopper

    for case in sys.argv[1:]:
        with hopper() as made:
            CASES[case]()
        for kernel in made:
            shown = kernel._asdict()
            shown["lines"] = kernel.asm.get("ttir", "").count("\n")
            products = [line for line in kernel.asm["ptx"].splitlines() if "wgmma.mma" in line]
            shown["products"] = len(products)
            shown["prefetches"] = kernel.asm["ptx"].count("prefetch.global.L2")
            # those that read their left operand transposed
            shown["transposed"] = sum(line.endswith(", 1, 0;") for line in products)
            shown["meetings"] = kernel.asm["ptx"].count("bar.sync")
            shown["asked"] = asked(kernel.asm["ptx"])
            # boxes that the loading warp asks for before it waits
            *before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
            shown["waits"] = len(before)
            box = re.compile(r"cp\.async\.bulk\.tensor\S*\.shared::\w+\.global")
            shown["early"] = max((len(box.findall(part)) for part in before), default=0)
            begin, wait = (
                kernel.asm["ptx"].find(f"griddepcontrol.{word}")
                for word in ("launch_dependents", "wait")
            )
            shown["starts_first"] = 0 <= begin < wait
            loads = re.findall(r"ld\.global\S*", kernel.asm["ptx"])
            shown["narrow"] = sum(".v" not in load for load in loads)
            shown["kept"] = kernel.asm["ptx"].count("L2::evict_last.b64")
            # stores of several values that name no policy of L2
            stores = re.findall(r"st\.global\S*\.v\d\S*", kernel.asm["ptx"])
            shown["leaving"] = sum("cache_hint" not in store for store in stores)
            shown["freed"] = kernel.asm["ptx"].count("mbarrier.arrive.shared")
            print(json.dumps({"case": case, **shown, "asm": None}), flush=True)
