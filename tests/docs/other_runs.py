# SPDX-License-Identifier: MIT
"""Passages on gpt-oss-20b beside a slower host, on gpt-oss-120b, and on sums over ranks."""

from __future__ import annotations

from tests.docs.readers import Passages, best, load, oss, speedup

_ONE_ROUND = "h200/decode_gpt_oss_20b_one_round"


def one_round() -> Passages:
    """decode.md's steps and prompt of the newest kernels."""
    report = load(f"{_ONE_ROUND}/results.json")
    cells = {(cell["batch"], cell["context"]): cell for cell in report["cells"]}
    ms = {key: cell["arms"]["oss_fp8"]["ms"] for key, cell in cells.items()}
    prompt = cells[1, 8192]
    both = [prompt["arms"][arm]["ms"] for arm in ("oss_fp8", prompt["baseline"])]
    whole = next(p for p in report["profiles"] if (p["context"], p["arm"]) == (8192, "oss_fp8"))
    eight = [each for n in (128, 1024) for each in (ms[8, n], cells[8, n]["speedup"])]
    return [
        (
            "one sequence ({:.2f} ms) and of 256 ({:.2f}), and probably of 128 ({:.2f})",
            [ms[batch, 128] for batch in (1, 256, 128)],
        ),
        ("took {:.2f} ms ({:.2f}x) at context 128 and {:.2f} ({:.2f}x) at 1024", eight),
        ("at 32 it took {:.2f} ({:.2f}x)", [ms[32, 128], cells[32, 128]["speedup"]]),
        (
            "prompt took {:.1f} ms, the baseline's {:.1f} ({:.2f}x); its kernels took {:.1f}",
            [*both, prompt["speedup"], whole["busy_us"] / 1e3],
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
