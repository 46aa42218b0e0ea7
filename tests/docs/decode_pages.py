# SPDX-License-Identifier: MIT
"""Passages of README and decode.md."""

from __future__ import annotations

from typing import Any

from tests.docs import h100_pages, other_runs, step_kernels
from tests.docs.readers import (
    Passages,
    attention,
    before,
    best,
    cell,
    layer_us,
    left_of_nearest,
    load,
    logits,
    memory,
    oss,
    profile,
    ratios,
    served,
    short_loads,
    speedup,
    startup,
    texts,
)


def _served_rows() -> Passages:
    """The served times, a row per arm."""
    found: Passages = []
    arm = "oss_fp8"
    for model in ("gpt_oss_20b", "llama_8b"):
        for figure, digits in (("tpot", 2), ("ttft", 1)):
            theirs, own = served(model, None, figure), served(model, arm, figure)
            cells = [f"{{:.{digits}f}}"] * len(theirs)
            found.append((f"ms | {' | '.join(cells)} |", theirs))
            found.append((f"oss_fp8, ms | {' | '.join(cells)} |", own))
            told = ratios(model, arm, figure)
            found.append((f"| {' | '.join(['**{:.2f}x**'] * len(told))} |", told))
    return found


def _demo() -> Passages:
    found: Passages = []
    for name, form in (
        (
            "demo",
            "gave {:.2f} times the tokens per second of bf16 at one request and {:.2f} times at",
        ),
        ("demo_epyc", "it gave {:.2f} and {:.2f} times"),
    ):
        arms = [cell["arms"] for cell in load(f"cpu/{name}.json")["cells"]]
        rates = [
            [each[arm]["figures"]["output_throughput"] for each in arms]
            for arm in ("oss_fp8", "bf16")
        ]
        found.append((form, [own / theirs for own, theirs in zip(*rates)]))
    cells = load("cpu/demo_epyc.json")["cells"]
    rounds = [each["arms"]["oss_fp8"]["ratios"]["output_throughput"] for each in cells]
    form = "gave {:.2f} to {:.2f} and {:.2f} to {:.2f} times"
    found.append((form, [each[end] for each in rounds for end in ("min", "max")]))
    return found


def readme() -> Passages:
    cost = ("decode", "kl")
    vllm_arms = ("triton", "marlin", "triton_fp8", "marlin_fp8")
    baselines = [startup("gpt_oss_20b", arm) for arm in vllm_arms]
    return [
        *_served_rows(),
        *(h100_pages.readme() + other_runs.two_gpus() + step_kernels.readme()),
        *_demo(),
        _largest_load(),
        (
            "is {:.2f}x, {:.2f}x and {:.2f}x faster per token",
            ratios("gpt_oss_20b_drafts3", "oss_fp8", "tpot"),
        ),
        (
            "gpt-oss-20b {:.2f} GiB (baseline {:.2f})",
            [memory("gpt_oss_20b", arm) for arm in ("oss_fp8", "triton")],
        ),
        (
            "Llama {:.2f} GiB (vLLM's FP8 {:.2f} and {:.2f})",
            [memory("llama_8b", arm) for arm in ("oss_fp8", "fp8_per_tensor", "fp8_per_channel")],
        ),
        (
            "gpt-oss-20b {:.0f} s (the baseline's four servers {:.0f} to {:.0f} s)",
            [startup("gpt_oss_20b", "oss_fp8"), min(baselines), max(baselines)],
        ),
        (
            "Llama {:.0f} s (vLLM's FP8 {:.0f} and {:.0f} s)",
            [startup("llama_8b", arm) for arm in ("oss_fp8", "fp8_per_tensor", "fp8_per_channel")],
        ),
        (
            "takes {:.1f} ms, with bf16 precision {:.1f} ms, and {:.1f} ms in the baseline",
            [before(arm, 1, 8192) for arm in ("oss_fp8", "exact", "triton")],
        ),
        ("at most {:.4f} times bf16's", [max(texts("smollm2_four_texts", "w8a8"))]),
        ("to {:.4f} times", [max(texts("smollm2_accuracy", "policy"))]),
        ("in FP8, to {:.4f} times on all", [max(texts("smollm2_four_texts", "third"))]),
        (
            "20b's shape take {:.2f} GiB",
            [load("cpu/finetune_memory.json")["peak_anonymous_gib"]],
        ),
        ("data left at most {:.2f} of the KL", [left_of_nearest("feedback", "tuned")]),
        ("below {:.4f} times", [max(texts("tiny_gpt_oss_quality", "tiny-fp8-2"))]),
        (
            "in decode steps of 16 tokens is {:.4f}; the baseline's is {:.4f}",
            [*logits("oss_bf16", cost), *logits("baseline", cost)],
        ),
    ]


def _pairs(model: str, name: str, input_len: int) -> list[tuple[float, float]]:
    """A figure of the best baseline and of oss_fp8, per load with prompts of this length."""
    cells = load(f"h200/{model}/results.json")["cells"]
    found = []
    for each in cells:
        if each["input_len"] == input_len:
            arms = each["arms"][each["baselines"][name]], each["arms"]["oss_fp8"]
            found.append((arms[0]["figures"][name], arms[1]["figures"][name]))
    return found


def _longer() -> Passages:
    """Long prompts, and long answers."""
    llama = [x for theirs, own in _pairs("llama_8b", "p50_ttft_ms", 4096) for x in (own, theirs)]
    prompts = _pairs("served_gpt_oss_20b", "p50_ttft_ms", 4096)
    rates = _pairs("served_gpt_oss_20b", "output_throughput", 128)
    run = load("h200/served_gpt_oss_20b/results.json")
    (many,) = (cell["arms"] for cell in run["cells"] if cell["concurrency"] == 128)
    compiled = [
        many["triton"]["figures"]["p50_ttft_ms"],
        # the grid's fourth load
        run["arms"]["triton"]["warmups"][3][0],
    ]
    return [
        ("first tokens took {:.0f} ms, in the warm-up {:.0f}", compiled),
        (
            "times per token is {:.2f} there",
            [many["oss_fp8"]["ratios"]["p50_tpot_ms"]["median"]],
        ),
        (
            "after {:.1f} ms at one request (vLLM's FP8 {:.1f}) and {:.1f} ms at four ({:.1f})",
            llama,
        ),
        (
            "{:.1f} ms at one request (baseline {:.1f}), and after {:.1f} ms at four ({:.1f})",
            [x for theirs, own in prompts for x in (own, theirs)],
        ),
        (
            f"| {' | '.join(['{:.0f} / {:.0f}'] * len(rates))} |",
            [x for pair in rates for x in pair],
        ),
        (
            f"| {' | '.join(['{:.2f}'] * len(rates))} |",
            [own / theirs for theirs, own in rates],
        ),
    ]


def _few_requests() -> Passages:
    """Later runs at a few requests: gpt-oss-20b and Llama, against one baseline each."""
    model = "served_gpt_oss_20b_few"
    rates = {cell["concurrency"]: cell["arms"]["oss_fp8"] for cell in short_loads(model)}
    told = [rates[number] for number in (1, 8)]
    prompts = dict(zip((4, 1), _pairs(model, "p50_ttft_ms", 4096)))
    name, llama = "output_throughput", "served_llama_8b"
    found: Passages = [
        (
            "{:.0f} output tokens per second at one request and {:.0f} at 8, {:.2f} and {:.2f}",
            [each["figures"][name] for each in told]
            + [each["ratios"][name]["median"] for each in told],
        ),
        ("A token of one request takes {:.2f} ms", [rates[1]["figures"]["p50_tpot_ms"]]),
        (
            "{:.1f} ms at one request (Triton experts {:.1f}), and after {:.1f} ms at four",
            [*reversed(prompts[1]), prompts[4][1]],
        ),
        (
            "after {:.1f} ms at one request ({:.1f}).",
            [x for theirs, own in _pairs(llama, "p50_ttft_ms", 4096) for x in (own, theirs)],
        ),
        (
            "first tokens are {:.2f}, {:.2f} and {:.2f} at 1, 8 and 32 requests",
            ratios(llama, "oss_fp8", "ttft"),
        ),
        (f"| {' | '.join(['{:.2f}'] * 4)} |", ratios(llama, "oss_fp8", "tpot")),
    ]
    runs = load(f"h200/{llama}/results.json")["measurements"]
    for arm, form in (
        ("fp8_per_channel", "its two runs took {:.0f} and {:.0f} ms"),
        ("oss_fp8", "those of oss_fp8 {:.0f} and {:.0f}."),
    ):
        own = [run for run in runs if (run["arm"], run["concurrency"]) == (arm, 128)]
        found.append((form, [run["figures"]["p50_ttft_ms"] for run in own]))
    for figure, digits in (("p50_tpot_ms", 2), ("p50_ttft_ms", 1)):
        pairs = _pairs(llama, figure, 128)
        row = " | ".join([f"{{:.{digits}f}} / {{:.{digits}f}}"] * len(pairs))
        found.append((f"FP8 per channel / oss_fp8 | {row} |", [x for pair in pairs for x in pair]))
    return found


def _busy_host() -> Passages:
    """One request while the engine shares its core: baseline, single steps, bursts."""
    (found,) = load("h200/busy_host_gpt_oss_20b/results.json")["cells"]
    arms = [found["arms"][name] for name in ("triton", "single", "oss_fp8")]
    name = "output_throughput"
    return [
        ("second | {:.0f} | {:.0f} | {:.0f} |", [arm["figures"][name] for arm in arms]),
        ("| ratio | | {:.2f} | {:.2f} |", [arm["ratios"][name]["median"] for arm in arms[1:]]),
    ]


def _largest_load() -> tuple[str, list[float]]:
    arms = load("h200/max_load_gpt_oss_20b/results.json")["cells"][-1]["arms"]["oss_fp8"]
    name = "output_throughput"
    values = [arms["figures"][name], arms["ratios"][name]["median"]]
    return "{:.0f} output tokens per second, {:.2f} times Triton experts", values


def _max_load() -> Passages:
    results = load("h200/max_load_gpt_oss_20b/results.json")
    arms = [each["arms"] for each in results["cells"]]
    name = "output_throughput"
    rates = [arm[side]["figures"][name] for arm in arms for side in ("triton", "oss_fp8")]
    streaming = results["streaming"]["oss_fp8"]["tokens_per_s"]
    return [
        ("Triton experts / oss_fp8 | {:.0f} / {:.0f} | {:.0f} / {:.0f} | {:.0f} / {:.0f} |", rates),
        (
            "| ratio | {:.2f} | {:.2f} | {:.2f} |\n\nAt 512",
            [arm["oss_fp8"]["ratios"][name]["median"] for arm in arms],
        ),
        (
            "came with {:.0f} tokens per second streamed and {:.0f} whole",
            [streaming["streamed"], streaming["whole"]],
        ),
    ]


def _api_server() -> Passages:
    loads = load("cpu/api_server.json")["loads"]
    form = "every {:.1f}, {:.0f} and {:.0f} ms"
    found: Passages = [(form, [each["step_ms"] for each in loads if each["arm"] == "vllm"])]
    for label, arm in (("vLLM", "vllm"), ("oss_fp8", "oss_fp8")):
        rates = [each["tokens_per_s"] for each in loads if each["arm"] == arm]
        row = f"| {label} | {' | '.join(['{:.0f} / {:.0f}'] * len(rates))} |"
        found.append((row, [each[kind] for each in rates for kind in ("streamed", "whole")]))
    return found


def prefill_us(arm: str) -> float:
    """Kernels of the profiled prefill."""
    profiles = load("h200/decode_gpt_oss_20b/results.json")["profiles"]
    return next(p["busy_us"] for p in profiles if p["arm"] == arm and not p["steps"])


def decode() -> Passages:
    found = _longer() + _few_requests() + _busy_host() + _max_load() + _api_server()
    found += h100_pages.decode() + other_runs.newest() + other_runs.slow_rounds()
    found += other_runs.short_run() + other_runs.prompts()
    found += other_runs.llama() + other_runs.llama_with_tiles()
    found += step_kernels.passages()
    for batch in (1, 8, 32, 128):
        row = "| {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |"
        values: list[float] = [batch]
        for model in ("gpt_oss_20b", "llama_8b_rings"):
            values += [best(model, batch), oss(model, batch), speedup(model, batch)]
            values.append(speedup(model, batch, 1024))
        found.append((row, values))
    wide = ("gpt_oss_20b", 256)
    found += [
        (
            "| 256 | {:.2f} | {:.2f} | {:.2f} | {:.2f} |",
            [best(*wide), oss(*wide), speedup(*wide), speedup(*wide, 1024)],
        ),
        (
            "| prefill 8192 | {:.1f} | {:.1f} | {:.2f} | | {:.1f} | {:.1f} | {:.2f} | |",
            [
                f(m, 1, 8192)
                for m in ("gpt_oss_20b", "llama_8b_rings")
                for f in (best, oss, speedup)
            ],
        ),
        ("Prefill of gpt-oss: {:.1f} ms", [oss("gpt_oss_20b", 1, 8192)]),
        (
            "kernels take {:.1f} ms (Triton experts {:.1f})",
            [prefill_us(arm) / 1e3 for arm in ("oss_fp8", "triton")],
        ),
        (
            "one took {:.2f} ms and the other {:.2f}",
            [cell(*wide, 128)["arms"]["oss_fp8"][end] for end in ("min", "max")],
        ),
        (
            "takes {:.2f} ms instead of {:.2f}",
            [layer_us(8192, False) / 1e3, layer_us(8192, True) / 1e3],
        ),
        (
            "with bf16 precision {:.1f} ms, the baseline {:.1f}",
            [before("exact", 1, 8192), before("triton", 1, 8192)],
        ),
        (
            "the kernels take {:.2f} ms, the rounds took {:.2f} to {:.2f} ms, and {:.2f} to {:.2f}",
            [
                profile(1, "oss_fp8")["busy_us"] / 1e3,
                *(
                    cell("gpt_oss_20b", 1, context)["arms"]["oss_fp8"][end]
                    for context in (128, 1024)
                    for end in ("min", "max")
                ),
            ],
        ),
        (
            "cut scheduler time by {:.0f} to {:.0f} %",
            [100 * (1 - end(load["ratio"] for load in load_scheduler())) for end in (max, min)],
        ),
    ]
    return found + _attention_and_logits()


def _attention_and_logits() -> Passages:
    found: Passages = []
    for label, shape in _ATTENTION.items():
        for context in (128, 1024, 4096):
            if (label, context) in _UNSHOWN:
                continue
            pairs = [attention(shape, batch, context) for batch in (1, 8, 32, 128)]
            cells = " | ".join(["{:.1f} / {:.1f}"] * 4)
            found.append(
                (f"| {label} | {context} | {cells} |", [x for pair in pairs for x in pair])
            )
    parts = (
        ("prefill", "kl"),
        ("decode", "kl"),
        ("prefill", "top1_agreement"),
        ("decode", "top1_agreement"),
    )
    fp8, bf16 = (logits(arm, ("prefill", "kl"))[0] for arm in ("oss_fp8_activations", "oss_bf16"))
    found.append(("FP8 expert activations add {:.0f} %", [100 * (fp8 / bf16 - 1)]))
    for label, arm in _LOGITS.items():
        found.append(
            (f"| {label} | {{:.4f}} | {{:.4f}} | {{:.3f}} | {{:.3f}} |", logits(arm, *parts))
        )
    return found


def load_scheduler() -> list[Any]:
    return load("cpu/scheduler.json")["loads"]


_ATTENTION = {
    "gpt-oss, full": "gpt-oss full",
    "gpt-oss, sliding": "gpt-oss sliding",
    "Llama 8B": "Llama 8B",
}
_UNSHOWN = {("gpt-oss, sliding", 128), ("gpt-oss, sliding", 4096), ("Llama 8B", 4096)}
_LOGITS = {
    "baseline, MXFP4 experts": "baseline",
    "baseline's experts, FP8 projections and lm_head": "vllm_experts",
    "oss_fp8, bf16-precision experts": "oss_bf16",
    "oss_fp8, FP8 expert activations from 512 tokens per step": "oss_fp8_activations",
}
