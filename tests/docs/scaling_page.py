# SPDX-License-Identifier: MIT
"""Passages of scaling.md."""

from __future__ import annotations

from typing import Any

from tests.docs import other_runs
from tests.docs.readers import (
    Passages,
    best,
    load,
    memory,
    oss,
    served,
    speedup,
)


def scaling() -> Passages:
    found: Passages = [
        ("**{:.2f}** | 6.4", [memory("gpt_oss_20b", "triton")]),
        ("**{:.2f}** | 5.8", [memory("gpt_oss_20b", "oss_fp8")]),
        ("**{:.2f}** | 4.3", [memory("llama_8b", "oss_fp8")]),
        (
            "4 GiB hold {:.0f} tokens of gpt-oss-20b, and 10 GiB {:.0f} of Llama",
            [
                load(f"h200/{m}/results.json")["arms"]["oss_fp8"]["memory"]["kv_cache_tokens"]
                for m in ("gpt_oss_20b", "llama_8b")
            ],
        ),
        (
            "takes {:.2f} and {:.2f} ms",
            [served("gpt_oss_20b", arm, "tpot")[0] for arm in (None, "oss_fp8")],
        ),
    ]
    pair = "{:.2f} / {:.2f} ({:.2f}x)"
    for label, model, place in (
        ("20b, one GPU", "gpt_oss_20b", "h200"),
        ("20b, TP 2", "gpt_oss_20b", "h200x2"),
        ("120b, TP 2", "gpt_oss_120b", "h200x2"),
    ):
        values = [
            f(model, batch, 128, place) for batch in (1, 32, 128) for f in (best, oss, speedup)
        ]
        values += [f(model, 1, 8192, place) for f in (best, oss, speedup)]
        form = f"| {label}: baseline / oss_fp8 | {' | '.join([pair] * 3)} | "
        form += "{:.0f} / {:.0f} ({:.2f}x"
        found.append((form, values))
    for label, model, time in (
        ("gpt-oss-20b, baseline (faster expert backend)", "gpt_oss_20b", best),
        ("gpt-oss-20b, oss_fp8", "gpt_oss_20b", oss),
        ("Llama-3-8B, vLLM's FP8", "llama_8b", best),
        ("Llama-3-8B, oss_fp8", "llama_8b", oss),
    ):
        batches = (1, 8, 32, 128, 256) if model == "gpt_oss_20b" else (1, 8, 32, 128)
        rates = [1e3 * batch / time(model, batch) for batch in batches]
        rounded = [round(rate, -1 if rate < 1000 else -2) for rate in rates]
        found.append((f"| {label} | {' | '.join(['{:.0f}'] * len(rates))} |", rounded))
    for pairs in (4, 8, 16, 32):
        steps = [oss("gpt_oss_120b", batch, 128, "h200x2") for batch in (1, 32, 128)]
        rates = [round(1e3 * pairs * n / ms, -2) for n, ms in zip((1, 32, 128), steps)]
        found.append((f"| {pairs} | {{:.0f}} | {{:.0f}} | {{:.0f}} |", rates))
    found += _two_nodes()
    found += _served_tp2() + other_runs.sums()
    runs = (
        "cpu/soak",
        "h200/soak",
        "h200/soak_bursts",
        "h200/soak_vllm_scheduler",
        "h200x2/soak_dp2",
    )
    found += [soak(f"{run}.json") for run in runs]
    one, two = best("gpt_oss_20b", 1), best("gpt_oss_20b", 1, 128, "h200x2")
    found.append(("and {:.0f} % less for the baseline", [100 * (1 - two / one)]))
    falls = [speedup("gpt_oss_20b", 1), speedup("gpt_oss_20b", 1, 128, "h200x2")]
    found.append(("falls from {:.2f}x to {:.2f}x", falls))
    return found


def _served_tp2() -> Passages:
    found: Passages = []
    pair = "{:.0f} / {:.0f} ({:.2f}x)"
    for label, model in (
        ("20b, the better of Triton and Marlin experts", "20b"),
        ("120b, Triton experts", "120b"),
    ):
        values: list[float] = []
        cells = load(f"h200x2/served_gpt_oss_{model}/results.json")["cells"]
        for each in cells:
            arms, baseline = each["arms"], each["baselines"]["output_throughput"]
            values += [arms[arm]["figures"]["output_throughput"] for arm in (baseline, "oss_fp8")]
            values.append(arms["oss_fp8"]["ratios"]["output_throughput"]["median"])
        found.append((f"| {label} | {pair} | {pair} | {pair} |", values))
        if model == "120b":
            last = cells[-1]["arms"]
            gaps = [last[arm]["figures"]["p50_itl_ms"] for arm in ("triton", "oss_fp8")]
            form = "between two tokens was {:.1f} ms, with oss_fp8 {:.1f} ({:.2f}x)"
            found.append((form, [*gaps, gaps[0] / gaps[1]]))
        else:
            taken = cells[0]["arms"]["oss_fp8"]["figures"]
            alone = served("gpt_oss_20b", "oss_fp8", "tpot")[0]
            form = "takes {:.2f} ms per token, more than on one GPU ({:.2f}, with 128 tokens out)"
            found.append((form, [taken["p50_tpot_ms"], alone]))
            found.append(("burst of four steps took {:.1f} ms", [taken["p50_itl_ms"]]))
            # a burst of `auto` lasts 5 ms at most
            found.append(("of a burst took at most {:.2f} ms on the device", [5 / 4]))
            plain = load("h200x2/two_nodes.json")["layouts"]["tp2"]["ms_per_token"]
            found.append(("it took {:.2f} ms in another run", [plain["batch_1"]["median"]]))
    return found


def _two_nodes() -> Passages:
    layouts = load("cpu/two_nodes.json")["layouts"]
    all_three = [layouts[name] for name in ("tp2", "two_nodes_tp2", "two_nodes_pp2")]
    distances = [entry["distance_from_tp1"] for entry in all_three]
    same = " | ".join(distance["same_tokens"] for distance in distances)
    again = layouts["two_nodes_tp2"]["distance_from_tp2"]
    assert again["same_text"] and not again["largest_logprob_difference"]
    two = all_three[1:]
    assert all(entry["same_answer"] and entry["worker_killed"]["exit_status"] == 0 for entry in two)
    cable = load("h200x2/two_nodes_all_reduce.json")["two_nodes"]["by_tokens"]
    once = [cable[tokens]["us"] for tokens in ("1", "8", "4096")]
    step = oss("gpt_oss_120b", 1, 128, "h200x2")
    return [
        *_on_gpus(),
        ("took {:.0f} us between two", once[:1]),
        ("of 8 tokens {:.0f} us, of 4096 tokens {:.0f} us", once[1:]),
        ("A step of 20b has 48: {:.1f} ms at one token", [48e-3 * once[0]]),
        ("has 72 of them, {:.1f} ms. It takes {:.2f} ms on one node", [72e-3 * once[0], step]),
        (f"tokens equal to one process | {same} |", []),
        (
            "difference from one process | {} | {} | {} |",
            [distance["largest_logprob_difference"] for distance in distances],
        ),
        (
            "second node's worker, s | | {} | {} |",
            [entry["worker_killed"]["seconds"] for entry in two],
        ),
        (
            "started again until the first answer, s | | {} | {} |",
            [entry["restart_seconds"] for entry in two],
        ),
    ]


def _on_gpus() -> Passages:
    """Two H200s as two nodes."""
    report = load("h200x2/two_nodes.json")
    layouts = report["layouts"]
    others = [layouts[name] for name in ("tp2", "two_nodes_tp2", "two_nodes_pp2", "dp2_ep")]
    distances = [entry["distance_from_tp1"] for entry in others]
    assert all(distance["agrees"] for distance in distances)
    again = layouts["two_nodes_tp2"]["distance_from_tp2"]
    assert again["same_text"] and not again["largest_logprob_difference"]

    def ms(entry: dict[str, Any], batch: int = 1) -> float:
        return float(entry["ms_per_token"][f"batch_{batch}"]["median"])

    one, two = layouts["tp1"], layouts["two_nodes_tp2"]
    same = " | ".join(distance["same_tokens"] for distance in distances)
    return [
        (f"tokens equal to one GPU | | {same} |", []),
        (
            "difference from one GPU | | {} | {} | {} | {} |",
            [distance["largest_logprob_difference"] for distance in distances],
        ),
        (
            "one request | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |",
            [ms(entry) for entry in (one, *others)],
        ),
        ("two nodes takes {:.2f} times", [report["tp2_tpot_ratio"]]),
        ("two nodes cost {:.2f} ms", [ms(two) - ms(layouts["tp2"])]),
        ("takes {:.2f} ms per token and TP 2 over two nodes {:.2f}", [ms(one, 8), ms(two, 8)]),
        (
            "PP ended {} s after",
            [layouts["two_nodes_pp2"]["worker_killed"]["seconds"]],
        ),
    ]


def soak(name: str) -> tuple[str, list[float]]:
    """A row of the table of loads: requests, errors, growth of memory and its end."""
    run = load(name)
    requests, total = sum(run["requests"].values()), run["memory_mib"][-1]["total"]
    form = f"]({f'results/{name}'})) | {{:.0f}} | {{:.0f}} | +{{:.1f}} of {{:.0f}} MiB"
    return form, [requests, len(run["errors"]), run["memory_growth_mib"], total]
