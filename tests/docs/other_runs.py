# SPDX-License-Identifier: MIT
"""Passages on gpt-oss-20b beside a slower host, on gpt-oss-120b, and on sums over ranks."""

from __future__ import annotations

from tests.docs.readers import Passages, best, load, oss, profile, speedup, summary

_SLOW = "h200/decode_gpt_oss_20b_slow_host"
_KERNELS = "h200/decode_gpt_oss_20b_kernels"
_EARLY = "decode_gpt_oss_20b_early"


def slower_host() -> Passages:
    """decode.md's newer kernels."""
    report = load(f"{_SLOW}/results.json")
    prompt = next(c for c in report["cells"] if c["context"] == 8192)
    both = [prompt["arms"][arm]["ms"] for arm in ("oss_fp8", prompt["baseline"])]
    form = "prompt took {:.1f} ms there, the baseline's {:.1f} ({:.2f}x); its kernels took {:.1f}"
    whole = next(p for p in report["profiles"] if (p["context"], p["arm"]) == (8192, "oss_fp8"))
    steps = [profile(batch, "oss_fp8", _KERNELS)["busy_us"] / 1e3 for batch in (1, 8, 32, 128, 256)]
    before, after = _KERNELS, f"h200/{_EARLY}"
    stock = [longer(kernel_ms(b, "triton", after), kernel_ms(b, "triton", before)) for b in (1, 8)]
    early = [kernel_ms(batch, "oss_fp8", after) for batch in (1, 8, 128, 256)]
    for batch, folder in ((1, after), (8, after), (32, before), (128, before)):
        took = round(kernel_ms(batch, "oss_fp8", folder), 4)
        assert summary(f"decode.gpt_oss_20b.kernel_ms_b{batch}") == took
    times = [
        {k["name"]: k["us"] for k in profile(128, "oss_fp8", folder)["kernels"]}
        for folder in (after, before)
    ]
    names = ("stream", "qkv", "add_rms_norm_router", "place_and_encode", "quantize_row", "route")
    slowed = [longer(*(kernels[f"_{name}_kernel"] for kernels in times)) for name in names]
    return [
        ("step take {:.3f} and {:.3f} ms at 1 and 8", early[:2]),
        ("took {:.1f} and {:.1f} % longer than in the run", stock),
        ("the kernels took {:.3f} and {:.3f} ms. At 128", early[2:]),
        ("took {:.0f} to {:.0f} % longer, probably", [min(slowed), max(slowed)]),
        (form, [*both, prompt["speedup"], whole["busy_us"] / 1e3]),
        ("take {:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f} ms at 1, 8, 32, 128 and 256", steps),
    ]


def longer(time: float, than: float) -> float:
    """By how many percent ``time`` is more."""
    return 100 * (time / than - 1)


def kernel_ms(batch: int, arm: str, folder: str) -> float:
    """Milliseconds of the kernels of a step."""
    return float(profile(batch, arm, folder)["busy_us"]) / 1e3


def kernels_of_h100() -> Passages:
    """decode.md's newer kernels on an H100."""
    here = {b: kernel_ms(b, "oss_fp8", f"h100/{_EARLY}") for b in (1, 8, 32, 128, 256)}
    for b, took in here.items():
        assert summary(f"h100.decode.gpt_oss_20b.kernel_ms_b{b}") == round(took, 4)
    ratios = [here[b] / kernel_ms(b, "oss_fp8", f"h200/{_EARLY}") for b in (1, 8)]
    kernels = [
        {k["name"]: k["us"] for k in profile(1, "oss_fp8", f"{gpu}/{_EARLY}")["kernels"]}
        for gpu in ("h100", "h200")
    ]

    def ratio(name: str) -> float:
        return kernels[0][name] / kernels[1][name]

    others = [ratio(f"_{name}_kernel") for name in ("gemm_stream", "qkv", "decode_attention")]
    heavy = [ratio("_gate_up_few_kernel"), ratio("_gemv_kernel")]
    return [
        ("take {:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f} ms at 1, 8, 32", [*here.values()]),
        ("that is {:.2f} and {:.2f} times", ratios),
        ("w13 takes {:.2f} times as long and lm_head {:.2f} times", heavy),
        ("projection take {:.2f} to {:.2f} times", [min(others), max(others)]),
    ]


def slow_rounds() -> Passages:
    """decode.md's rounds of Llama that the host slowed."""
    cells = {
        cell["batch"]: cell["arms"]
        for cell in load("h200/decode_llama_8b/results.json")["cells"]
        if cell["context"] == 128
    }
    arms = ("fp8_per_tensor", "oss_fp8")
    fastest = [[cells[batch][arm]["min"] for arm in arms] for batch in (1, 8, 32, 128)]
    rounds = [cells[batch]["oss_fp8"][end] for batch in (8, 32, 128) for end in ("min", "max")]
    form = "took {:.2f} and {:.2f} ms at 8 sequences, {:.2f} and {:.2f} at 32, {:.2f} and {:.2f} at"
    faster = "alone give {:.2f}, {:.2f}, {:.2f} and {:.2f} at 1, 8, 32 and 128"
    return [(form, rounds), (faster, [one / own for one, own in fastest])]


def two_gpus() -> Passages:
    """README's gpt-oss-120b."""
    values = [
        f("gpt_oss_120b", batch, 128, "h200x2")
        for f in (oss, best, speedup)
        for batch in (1, 32, 128)
    ]
    form = "sequences: {:.2f}, {:.2f} and {:.2f}, with Triton experts {:.2f}, {:.2f} and {:.2f}"
    return [(f"{form} ({{:.2f}}x, {{:.2f}}x and {{:.2f}}x,", values)]


def sums() -> Passages:
    """scaling.md's table of sums over ranks, and what the steps of 120b say of prompts."""
    rows = load("h200x2/all_reduce.json")["rows"]
    assert all(row["same_bits"] for row in rows)
    found: Passages = [(f"| tokens | {' | '.join(str(row['tokens']) for row in rows)} |", [])]
    for label, name, digits in (
        ("vLLM", "vllm_us", 1),
        ("oss_fused", "oss_fused_us", 1),
        ("ratio", "ratio", 2),
    ):
        cells = " | ".join([f"{{:.{digits}f}}"] * len(rows))
        found.append((f"| {label} | {cells} |", [row[name] for row in rows]))
    report = load("h200x2/decode_gpt_oss_120b/results.json")
    kernels = next(p for p in report["profiles"] if (p["context"], p["arm"]) == (8192, "oss_fp8"))
    prompt = next(c for c in report["cells"] if c["context"] == 8192)["arms"]["oss_fp8"]
    form = "kernels take {:.0f} ms of the {:.0f}. The rounds took {:.0f} and {:.0f}"
    values = [kernels["busy_us"] / 1e3, prompt["ms"], prompt["min"], prompt["max"]]
    return [*found, (form, values)]
