# SPDX-License-Identifier: MIT
"""Passages of the pages on kernels: gemm.md, kernels.md, operators.md, tuning.md, analysis.md."""

from __future__ import annotations

import itertools

from tests.docs.readers import (
    Passages,
    flash,
    kernels,
    library,
    load,
    operator,
    profile,
    summary,
)


def _kernel_us(batch: int, arm: str, name: str) -> float:
    measured = profile(batch, arm)["kernels"]
    return sum(each["us"] for each in measured if each["name"] == f"{name}_kernel")


def gemm() -> Passages:
    small, large = "kernels.gemm_small.speedup_", "kernels.gemm_large.speedup_"
    results = load("h200/kernels.json")["results"]
    rows = [row for row in results if row["group"] == "gated_mlp"]
    (cublas,) = kernels("gemm_large", "baselines_us", M=8192, N=8192, K=8192)
    cublas = cublas["cublaslt"]
    counts = (1, 2, 8, 32, 64, 128, 256, 512, 2048)
    speedups = [kernels("w8a16", "speedup", M=m) for m in counts]
    cells = " | ".join(["{:.2f}"] * len(counts))
    picks = (("least", min), ("greatest", max))
    arms = ("one_level", "oss_fp8")
    busy = {a: [profile(b, a)["busy_us"] for b in (1, 2, 4, 8)] for a in arms}
    same = {a: [profile(b, a)["busy_us"] for b in (32, 128, 256)] for a in arms}
    dense = {
        a: [profile(b, a, "h200/decode_llama_8b_levels")["busy_us"] for b in (1, 8)] for a in arms
    }
    noise, costs, of_llama = (
        [100 * (two / one - 1) for one, two in zip(both["one_level"], both["oss_fp8"])]
        for both in (same, busy, dense)
    )
    parts = ("_combine_norm", "_quantize_row", "_qkv")
    extra = [_kernel_us(1, "oss_fp8", part) - _kernel_us(1, "one_level", part) for part in parts]
    texts = load("cpu/linear_activations.json")["texts"]
    divergences = [text["candidates"][i]["kl_divergence"] for i in (0, 1) for text in texts]
    return [
        ("| `fp8` | {:.0f} | {:.0f} | {:.0f} | {:.0f} |", busy["one_level"]),
        ("| `bf16` | {:.0f} | {:.0f} | {:.0f} | {:.0f} |", busy["oss_fp8"]),
        ("| more | {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} % |", costs),
        ("Llama-3-8B: {:.1f} % more at 1 token and {:.1f} % at 8", of_llama),
        ("differed by {:.1f}, {:.1f} and {:.1f} %", noise),
        ("experts ({:.0f} us), quantisation ({:.0f}) and the QKV projection ({:.0f})", extra),
        (
            "of {:.4f} and {:.4f} nats on two texts, FP8 activations {:.4f} and {:.4f}",
            divergences,
        ),
        ("| CUTLASS | 1.3x | {:.3f}x |", [summary(f"{small}geomean")]),
        ("| CUTLASS | 0.97x | {:.3f}x |", [summary(f"{small}min")]),
        ("| cuBLASLt | 1.0x | {:.3f}x |", [summary(f"{large}geomean")]),
        ("| cuBLASLt | 0.97x | {:.3f}x |", [summary(f"{large}min")]),
        (
            "| 80 % | {:.0f} ({:.0f} %) |",
            [summary("kernels.gemm_8192.tflops"), summary("kernels.gemm_8192.tflops") / 19.79],
        ),
        ("cuBLASLt reaches {:.0f} TFLOPS", [2 * 8192**3 / cublas / 1e6]),
        ("| bf16 | 1.5x | {:.2f}x |", [summary("kernels.w8a16.speedup_b1")]),
        ("| bf16 | 1.0x | {:.2f}x |", [summary("kernels.w8a16.speedup_min")]),
        *((f"| {name} | {cells} |", [pick(each) for each in speedups]) for name, pick in picks),
        ("| 1.1x | {:.2f}x, {:.2f}x, {:.2f}x, {:.2f}x |", [row["speedup"] for row in rows]),
    ]


def kernel_page() -> Passages:
    shares = {}
    for group, rows in (
        ("norm_quant", 2048),
        ("norm_quant", 8192),
        ("rmsnorm_rope", 4096),
        ("rmsnorm_rope", 8192),
    ):
        shares[group, rows] = [100 * x for x in kernels(group, "bandwidth_fraction", rows=rows)]
    four = "{:.0f}, {:.0f}, {:.0f}, {:.0f} %"
    return [
        *((f"| 85 % | {four} |", values) for values in shares.values()),
        (
            "| 75 % | {:.0f}, {:.0f} % |",
            [100 * x for x in kernels("rope_kv", "bandwidth_fraction", rows=8192)],
        ),
        ("at most {:.3f}x |", [summary("kernels.small_rows.time_ratio_max")]),
        ("at most {:.3f}x |", [summary("kernels.fused_qkv.time_ratio_max")]),
        ("reaches at least {:.0f} %", [100 * summary("library.rmsnorm_rope.bandwidth_min")]),
    ]


def _attention() -> Passages:
    """Times of the longest sequence, shares at all lengths, and the least of them."""
    found: Passages = []
    least: dict[str, list[float]] = {"forward": [], "backward": []}
    lengths = (512, 1024, 2048, 4096, 16384)
    for dim, causal in itertools.product((64, 128), (False, True)):
        mask = "causal" if causal else "full"
        shares: list[float] = []
        for length in lengths:
            ahead, back = (flash(way, length, dim, causal) for way in least)
            pair = [
                ahead["oss_fused"] / ahead["flash_attention_3"],
                back["oss_fused"] / back["pytorch"],
            ]
            shares += pair
            for row, share in zip(least.values(), pair):
                row.append(share)
        # the last length is the longest
        tflops = [*ahead.values(), *back.values()]
        found.append((f"| {mask}, {{:.0f}} | {' | '.join(['{:.0f}'] * 5)} |", [dim, *tflops]))
        found.append(
            (f"| {mask}, {{:.0f}} | {' | '.join(['{:.2f}, {:.2f}'] * 5)} |", [dim, *shares])
        )
    longest = min(least["forward"][len(lengths) - 1 :: len(lengths)])
    found.append(("forward has at least {:.2f} of FlashAttention 3's speed", [longest]))
    found.append(("at all lengths at least {:.2f}", [summary("operators.flash.vs_fa3_fwd_min")]))
    found.append(("at least {:.2f} of PyTorch's", [summary("operators.flash.vs_fa3_bwd_min")]))
    return found


def operators() -> Passages:
    names = {
        "triton": "oss_fused",
        "tilelang": "tilelang",
        "cuda": "cuda",
        "torch.compile": "pytorch compiled",
    }
    times = {label: library("rmsnorm_rope", name) for label, name in names.items()}
    found: Passages = []
    found += _attention()
    for name, label in (("softmax", "softmax"), ("layer_norm", "LayerNorm")):
        pairs = [operator("rows", name, "oss_fused", size=n) for n in (1024, 2048, 4096, 8192)]
        shown = " | ".join(["{:.0f} % ({:.2f}x)"] * 4)
        values = [x for row in pairs for x in (100 * row["share"], row["speedup"])]
        found.append((f"| {label} | {shown} |", values))
    copies = [operator("rows", "layer_norm", "copy", size=n) for n in (1024, 2048, 4096, 8192)]
    shown = " | ".join(["{:.0f} %"] * 4)
    found.append((f"| copy | {shown} |", [100 * row["share"] for row in copies]))
    for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        problem = f"32x{channels}x{channels}x{size}x3 nhwc"
        values = [
            operator("convolution", "convolution", name, problem=problem)["tflops"]
            for name in ("oss_fused", "cudnn", "oss_fused bias relu", "cudnn, bias, relu")
        ]
        shown = " | ".join(["{:.0f}"] * 4)
        found.append((f"| {{:.0f}}, {{:.0f}} | {shown} |", [channels, size, *values]))
    for pattern, name, factor in (
        ("by at most {:.1e}", "flash.fp8_p99_abs", 1),
        ("at least {:.3f} of cuDNN's speed", "conv.vs_cudnn_min", 1),
        ("{:.0f} % of the bytes", "conv.fused_bytes_saved", 100),
        ("{:.1f} % of the plain product's speed", "gemm_epilogue.fraction", 100),
    ):
        found.append((pattern, [factor * summary(f"operators.{name}")]))
    return [
        *found,
        ("{:.1f} / {:.1f} / {:.1f} us for `triton`", times["triton"]),
        ("{:.1f} / {:.1f} / {:.1f} for `tilelang`", times["tilelang"]),
        ("{:.0f} / {:.0f} / {:.0f} for `cuda`", times["cuda"]),
        ("{:.1f} / {:.1f} / {:.1f} for torch.compile", times["torch.compile"]),
    ]


def tuning() -> Passages:
    gains = [
        summary("library.tuning.gain"),
        *(
            load(f"h200/tuning-{name}.json")["results"][0]["gain"]
            for name in ("gated_mlp", "rmsnorm_rope")
        ),
    ]
    shares = [row["share"] for row in load("h100/recovery.json")["results"]]
    recovery, geomean = (
        summary(f"tuning.h100_from_h200_recovery{end}") for end in ("", "_geomean")
    )
    assert min(shares) == recovery
    tiles = load("h100/tiles.json")["results"]
    found = [row for row in tiles if row["config"]]
    return [
        ("{:.1f} % for `matmul`", [100 * gains[0]]),
        ("{:.1f} % for `gated_mlp`", [100 * gains[1]]),
        ("{:.1f} % for `rmsnorm_rope`", [100 * gains[2]]),
        (
            "over {} shapes of gpt-oss-20b: {:.1f} % at worst, {:.1f} % in the geometric mean",
            [len(shares), 100 * recovery, 100 * geomean],
        ),
        ("For {} of the {} shapes a tile saved", [len(found), len(tiles)]),
    ]


def analysis() -> Passages:
    sent = load("cpu/communication_bytes.json")["figures"]["analysis.comm_bytes_error_max"]
    layouts, graph = load("cpu/layout_order.json"), load("h200/model_graph_gpt_oss_20b.json")
    assert layouts["figures"]["analysis.layout_order_agreement"] == 1.0
    found: Passages = [
        ("differ by at most {:.2f} % from the formula", [100 * sent]),
        ("all {} orders that differed in time were predicted", [len(layouts["pairs"])]),
    ]
    for row in layouts["rows"]:
        if (row["family"] == "copy" and "stride" in row["pattern"]) or "random" in row["pattern"]:
            values = [row["predicted"]["traffic"], row["ns_per_access"]]
            found.append((f"{row['pattern']} {row['predicted']['pattern_type']} ", []))
            found.append(("% {:.2f} {:.2f}", values))
    total = sum(group["seconds"] for group in graph["decode"]["groups"])
    for group in graph["decode"]["groups"][:3]:
        values = [group["flops"] / 1e9, group["memory"] / 1e6, group["flops"] / group["memory"]]
        values += [1e3 * group["seconds"], 100 * group["seconds"] / total]
        line = f"{group['name']} {group['nodes']} {{:.2f}} {{:.1f}} {{:.1f}} {{:.3f}} {{:.1f}}%"
        found.append((line, values))
    for one in graph["decode"]["kernels"][:3]:
        times = [1e3 * one["seconds_before"], 1e3 * one["seconds_saved"], one["bytes_saved"] / 1e6]
        found.append((f"{one['kernel']} {len(one['nodes'])} {{:.3f}} {{:.3f}} {{:.1f}}", times))
    return found
