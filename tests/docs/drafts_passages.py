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


def _without_drafts() -> Passages:
    burst = served("gpt_oss_20b", "oss_fp8", "tpot")[0]
    return [("bursts give a token in {:.2f} ms", [burst])]


def _earlier() -> Passages:
    """The run that had Marlin experts and a head in FP8 beside."""
    found = load("h200/gpt_oss_20b_drafts3_head/results.json")
    arms = [cell["arms"] for cell in found["cells"]]
    rate, three = "output_throughput", "{:.0f}, {:.0f} and {:.0f}"
    stock = [each[name]["figures"][rate] for name in ("marlin", "triton") for each in arms]
    less = [
        each[name]["ratios"]["p50_tpot_ms"]["median"]
        for name in ("oss_fp8", "oss_fp8_head")
        for each in arms
    ]
    repeats = [
        run["figures"][rate]
        for run in found["measurements"]
        if (run["arm"], run["concurrency"]) == ("oss_fp8_head", 1)
    ]
    ratios = "{:.2f}, {:.2f} and {:.2f} times less"
    both = f"{ratios} time per output token than the better of both, with the head in FP8 {ratios}"
    return [
        (f"Marlin experts gave {three} tokens per second, Triton experts {three}.", stock),
        (both, less),
        (f"the three repeats gave {three} tokens per second", repeats),
    ]


def drafts() -> Passages:
    return [
        *_table("gpt_oss_20b_drafts3"),
        *_table("gpt_oss_20b_drafts7"),
        *_without_drafts(),
        *_earlier(),
    ]
