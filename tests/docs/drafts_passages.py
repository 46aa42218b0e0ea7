# SPDX-License-Identifier: MIT
"""Passages of serving.md on speculative decoding."""

from __future__ import annotations

from tests.docs.readers import Passages, load, served

# arm of a comparison with drafts -> what the page calls it
_HEADS = {"oss_fp8": "oss_fp8", "oss_fp8_head": "oss_fp8 with the head in FP8"}


def _table(model: str) -> Passages:
    """The table of a comparison with drafts, row by row."""
    found: Passages = []
    cells = load(f"h200/{model}/results.json")["cells"]
    for figure, name, digits, unit in (
        ("p50_tpot_ms", "time per output token", 2, ", ms"),
        ("output_throughput", "output tokens per second", 0, ""),
        ("p50_ttft_ms", "time to first token", 1, ", ms"),
    ):
        form = " | ".join([f"{{:.{digits}f}}"] * len(cells))
        theirs = [cell["arms"][cell["baselines"][figure]] for cell in cells]
        baseline = [arm["figures"][figure] for arm in theirs]
        found.append((f"{name}, baseline{unit} | {form} |", baseline))
        for arm, called in _HEADS.items():
            own = [cell["arms"][arm] for cell in cells if arm in cell["arms"]]
            ratios = " | ".join(f"{each['ratios'][figure]['median']:.2f}" for each in own)
            if own:
                row = f"{name}, {called}{unit} | {form} | | ratio | {ratios} |"
                found.append((row, [each["figures"][figure] for each in own]))
    return found


def _rates_of_one_request() -> Passages:
    runs = load("h200/gpt_oss_20b_drafts3/results.json")["measurements"]
    rates = [
        run["figures"]["output_throughput"]
        for run in runs
        if (run["arm"], run["concurrency"]) == ("oss_fp8_head", 1)
    ]
    burst = served("gpt_oss_20b", "oss_fp8", "tpot")[0]
    return [
        ("gave {:.0f}, {:.0f} and {:.0f} tokens per second", rates),
        ("bursts give a token in {:.2f} ms", [burst]),
    ]


def _with_finer_graphs() -> Passages:
    cells = load("h200/gpt_oss_20b_drafts3_triton/results.json")["cells"]

    def of(arm: str, figure: str, ratio: bool = True) -> list[float]:
        own = [cell["arms"][arm] for cell in cells]
        return [a["ratios"][figure]["median"] if ratio else a["figures"][figure] for a in own]

    rate, first = "output_throughput", "p50_ttft_ms"
    plain, head = "oss_fp8", "oss_fp8_head"
    three, ratios = "{:.0f}, {:.0f} and {:.0f}", "{:.2f}, {:.2f} and {:.2f} times"
    return [
        (f"{three} tokens per second, {ratios}", of(plain, rate, False) + of(plain, rate)),
        (f"FP8 {three}, {ratios}", of(head, rate, False) + of(head, rate)),
        (f"many, and {ratios} less", of(head, "p50_tpot_ms")),
        ("ratio {:.2f}, with the head in FP8 {:.2f}", [of(plain, first)[2], of(head, first)[2]]),
    ]


def drafts() -> Passages:
    return [
        *_table("gpt_oss_20b_drafts3"),
        *_table("gpt_oss_20b_drafts7"),
        *_rates_of_one_request(),
        *_with_finer_graphs(),
    ]
