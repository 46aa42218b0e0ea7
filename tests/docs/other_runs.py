# SPDX-License-Identifier: MIT
"""Passages on gpt-oss-20b beside a slower host, on gpt-oss-120b, and on sums over ranks."""

from __future__ import annotations

from typing import Any

from tests.docs.readers import Passages, best, load, oss, speedup

_ARMS = ("oss_fp8", "triton")


def _cells(folder: str) -> dict[tuple[int, int], dict[str, Any]]:
    cells = load(f"h200/{folder}/results.json")["cells"]
    return {(cell["batch"], cell["context"]): cell for cell in cells}


def newest() -> Passages:
    """decode.md's steps and prompts of the newest kernels of gpt-oss."""
    folder = "decode_gpt_oss_20b_newest"
    cells = _cells(folder)
    batches = (1, 8, 32, 128, 256)
    own = [cells[batch, 128]["arms"]["oss_fp8"] for batch in batches]
    rounds = [each[end] for each in own for end in ("min", "max")]
    fastest = [[cells[batch, 128]["arms"][arm]["min"] for arm in _ARMS] for batch in batches]
    longer = [cells[batch, 1024]["arms"]["oss_fp8"]["ms"] for batch in (8, 32)]
    longer += [cells[batch, 1024]["speedup"] for batch in (8, 32)]
    prompt = cells[1, 8192]
    prompts = [prompt["arms"][arm][end] for arm in _ARMS for end in ("min", "max")]
    profiles = load(f"h200/{folder}/results.json")["profiles"]
    whole = next(p for p in profiles if (p["context"], p["arm"]) == (8192, "oss_fp8"))
    each = "{:.2f} and {:.2f}"
    others = ", ".join(f"{each} at {batch}" for batch in batches[1:])
    return [
        (f"took {each} ms at 1 sequence, {others}", rounds),
        (
            "alone give {:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}. At context 1024",
            [theirs / ours for ours, theirs in fastest],
        ),
        ("8 and 32 sequences took {:.2f} and {:.2f} ms ({:.2f}x and {:.2f}x)", longer),
        (
            "Prompts took {:.1f} and {:.1f} ms, the baseline's {:.1f} and {:.1f} ({:.2f}x)",
            [*prompts, prompt["speedup"]],
        ),
        ("; the kernels took {:.1f} ms", [whole["busy_us"] / 1e3]),
    ]


def prompts() -> Passages:
    """decode.md's prompts of gpt-oss that replay graphs."""
    alone, baseline = "prefill_gpt_oss_20b_no_graph", "prefill_gpt_oss_20b"
    without = _cells(alone)[1, 8192]["arms"]
    cell = _cells(baseline)[1, 8192]
    arms = cell["arms"]
    own = [arms["oss_fp8"][figure] for figure in ("ms", "min", "max")]
    profiles = load(f"h200/{baseline}/results.json")["profiles"]
    whole = next(p for p in profiles if (p["context"], p["arm"]) == (8192, "oss_fp8"))
    return [
        (
            "{:.1f} ms with one, {:.1f} without",
            [without[arm]["ms"] for arm in ("oss_fp8", "no_graph")],
        ),
        ("{:.1f} ms with one (rounds of {:.1f} to {:.1f})", own),
        (
            "the baseline {:.1f} without and {:.1f} with one",
            [arms[arm]["ms"] for arm in ("triton", "triton_graph")],
        ),
        ("by default ({:.2f}x", [cell["speedup"]]),
        ("report.md)); the kernels took {:.1f} ms.", [whole["busy_us"] / 1e3]),
    ]


def llama() -> Passages:
    """decode.md's run of Llama."""
    cells = _cells("decode_llama_8b_rings")
    profiles = load("h200/decode_llama_8b_rings/results.json")["profiles"]
    kernels = {one["arm"]: one["busy_us"] / 1e3 for one in profiles if one["steps"]}
    arms = ("oss_fp8", "fp8_per_tensor")
    long = cells[128, 1024]
    steps = [long["arms"][arm]["ms"] for arm in arms]
    fastest = [[cells[batch, 128]["arms"][arm]["min"] for arm in arms] for batch in (1, 8, 32, 128)]
    rounds = [cells[128, 128]["arms"]["oss_fp8"][end] for end in ("min", "max")]
    return [
        (
            "positions took {:.2f} ms, the baseline's {:.2f} ({:.2f}x; 1.25x would be {:.2f} ms)",
            [*steps, long["speedup"], steps[1] / 1.25],
        ),
        ("the kernels take {:.2f} ms\n", [kernels["oss_fp8"]]),
        (
            "(the baseline's {:.2f}), both rounds {:.2f} to {:.2f} ms",
            [kernels["fp8_per_tensor"], *rounds],
        ),
        (
            "alone give {:.2f}, {:.2f}, {:.2f} and {:.2f}.\n- A run of Llama at [aa12a9b]",
            [theirs / ours for ours, theirs in fastest],
        ),
    ]


def llama_with_tiles() -> Passages:
    """decode.md's run of Llama with 72 sequences, and with an FP8 lm_head."""
    cells = _cells("decode_llama_8b_tiles")
    arms = ("oss_fp8", "fp8_per_tensor")
    contexts, batches = (128, 1024), (1, 8, 32, 128)

    def ms(batch: int, context: int, arm: str) -> float:
        return float(cells[batch, context]["arms"][arm]["ms"])

    def ratios(batch: int) -> list[float]:
        return [cells[batch, context]["speedup"] for context in contexts]

    few = [[ms(72, context, arm) for context in contexts] for arm in arms]
    of_five = "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}"
    heads = [[ms(b, context, "oss_fp8_head") for b in (1, 8, 32, 72, 128)] for context in contexts]
    long = ms(128, 1024, "fp8_per_tensor") / heads[1][-1]
    return [
        (
            (
                "{:.2f} ms at context 128 and {:.2f} at 1024, the baseline's {:.2f} and {:.2f} "
                "({:.2f}x and {:.2f}x)"
            ),
            [*few[0], *few[1], *ratios(72)],
        ),
        (
            "positions took {:.2f} ms, the baseline's {:.2f} ({:.2f}x). At context 128",
            [*(ms(128, 1024, arm) for arm in arms), ratios(128)[1]],
        ),
        (
            "give {:.2f}, {:.2f}, {:.2f} and {:.2f} at 1, 8, 32 and 128 sequences",
            [ratios(batch)[0] for batch in batches],
        ),
        (
            (
                f"others: {of_five} ms at 1, 8, 32, 72 and 128 sequences of 128 positions, "
                f"{of_five} of 1024 "
                "({:.2f}x of the baseline"
            ),
            [*heads[0], *heads[1], long],
        ),
    ]


def short_run() -> Passages:
    """decode.md's steps of the run without a profile."""
    cells = load("h200/decode_gpt_oss_20b_short/results.json")["cells"]
    assert [cell["batch"] for cell in cells] == [1, 8, 32, 128, 256]
    of_five = "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}"
    both = [[cell["arms"][arm]["ms"] for cell in cells] for arm in ("oss_fp8", "triton")]
    form = "({:.2f}x, {:.2f}x, {:.2f}x, {:.2f}x and {:.2f}x)"
    ratios = [cell["speedup"] for cell in cells]
    beside = f"at 1, 8, 32, 128 and 256 sequences, with Triton experts {of_five} ms {form}"
    return [(f"Steps took {of_five} ms", both[0]), (beside, [*both[1], *ratios])]


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
