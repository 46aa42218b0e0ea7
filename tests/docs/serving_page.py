# SPDX-License-Identifier: MIT
"""Passages of serving.md."""

from __future__ import annotations

from tests.docs import drafts_passages
from tests.docs.readers import (
    Passages,
    load,
)


def _kv_cache_times() -> Passages:
    """Of gpt-oss-20b's shape: a row per context, and how far logits are apart."""
    results = load("h200/kv_fp8.json")
    times = {
        (cell["context"], cell["batch"], cell["steps"] > 0): [
            cell["arms"][name]["ms"] for name in ("bf16", "fp8")
        ]
        for cell in results["speed"]["cells"]
    }
    found: Passages = []
    for context, batches in ((8192, (1, 8, 32)), (32768, (1, 8))):
        steps = [ms for batch in batches for ms in times[context, batch, True]]
        cells = " | ".join(["{:.3f} / {:.3f}"] * len(batches) + [""] * (3 - len(batches)))
        row = f"step at {{:.0f}} positions | {cells} | {{:.1f}} / {{:.1f}} |"
        found.append((row.replace("|  |", "| |"), [context, *steps, *times[context, 1, False]]))
    quality = results["quality"]
    kl = [row[kind]["kl"] for row in quality["fp8"]["prompts"] for kind in ("prefill", "decode")]
    floor = [row["prefill_from_decode"]["kl"] for row in quality["bf16"]["prompts"]]
    return [
        *found,
        ("bf16 cache is {:.4f} to {:.4f}", [min(kl), max(kl)]),
        ("differs by {:.4f} to {:.4f}", [min(floor), max(floor)]),
    ]


def _kv_cache() -> Passages:
    """FP8 against bf16 on text and keys, at two lengths."""
    runs = {length: load(f"h200/kv_fp8_text_{length // 1024}k.json") for length in (8192, 32768)}
    fp8 = [run["texts"][0]["candidates"][0] for run in runs.values()]
    training = "trained for {:.0f} s to find", [load("h200/kv_fp8_training.json")["seconds"]]
    found = [
        (
            f"keys found, {label} | {{:.0f}} % | {{:.0f}} % |",
            [100 * run["needles"][place]["by_length"][str(n)] for n, run in runs.items()],
        )
        for place, label in enumerate(("bf16", "FP8"))
    ]
    return [
        *_kv_cache_times(),
        training,
        ("windows of {:.0f} tokens | of {:.0f} tokens", list(runs)),
        ("times bf16's | {:.4f} | {:.4f} |", [row["perplexity_factor"] for row in fp8]),
        ("from bf16, nats | {:.4f} | {:.4f} |", [row["kl_divergence"] for row in fp8]),
        *found,
    ]


def _newer_vllm() -> Passages:
    cells = load("h200/decode_gpt_oss_20b_vllm_0.33/results.json")["cells"]
    values = [
        value
        for cell in cells
        for value in (*(cell["arms"][arm]["ms"] for arm in ("triton", "oss_fp8")), cell["speedup"])
    ]
    steps = " | ".join(["{:.2f} / {:.2f} ({:.2f}x)"] * 4)
    return [(f"| {steps} | {{:.1f}} / {{:.1f}} ({{:.2f}}x) |", values)]


def _head() -> Passages:
    """Steps of Llama with and without an FP8 lm_head."""
    cells = load("h200/decode_llama_8b_tiles/results.json")["cells"]
    ms = {
        (cell["batch"], cell["context"], arm): cell["arms"][arm]["ms"]
        for cell in cells
        for arm in ("oss_fp8_head", "oss_fp8")
    }
    pair = "{:.2f} instead of {:.2f} ms"
    few, long = (
        [ms[batch, context, arm] for arm in ("oss_fp8_head", "oss_fp8")]
        for batch, context in ((1, 128), (128, 1024))
    )
    return [(f"{pair}, one of 128 sequences of 1024 positions {pair}", [*few, *long])]


def serving() -> Passages:
    monitor = load("h200/monitor.json")
    return [
        *drafts_passages.drafts(),
        *_newer_vllm(),
        *_kv_cache(),
        *_head(),
        (
            "a sample takes {:.1f} ms more than its step of {:.1f} ms",
            [monitor["batch_32"]["sample_extra_ms"], monitor["batch_32"]["step_ms"]],
        ),
        (
            "costs {:.2f} % of decode time at 32 requests and {:.2f} % at one request",
            [
                100 * monitor["batch_32"]["cost_share_at_every_2000"],
                100 * monitor["batch_1"]["cost_share_at_every_2000"],
            ],
        ),
        ("pays {:.2f} microseconds", [monitor["unsampled_step_us"]]),
    ]
