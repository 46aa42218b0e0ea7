# SPDX-License-Identifier: MIT
"""Passages of calibration.md."""

from __future__ import annotations

from tests.docs.readers import (
    Passages,
    left_of_nearest,
    load,
    texts,
)


def calibration() -> Passages:
    found: Passages = []
    for label, arm in _MIXES.items():
        factors, kls = (
            texts("smollm2_accuracy", arm, f) for f in ("perplexity_factor", "kl_divergence")
        )
        cells = " | ".join(["{:.4f} ({:.4f})"] * 3)
        found.append((f"{label} | {cells} |", [x for pair in zip(factors, kls) for x in pair]))
    found += four_texts()
    prose, dialogue, code = texts("smollm2_quality", "oss_fp8")
    time, small = load("cpu/smollm2_calibration_time.json"), load("cpu/smollm2_calibration.json")
    large = load("h200/calibration_20b.json")
    finetune = load("cpu/finetune_memory.json")
    tiny = load("cpu/tiny_gpt_oss_quality.json")
    wraps, statistics, english = texts("tiny_gpt_oss_quality", "tiny-fp8-2")
    feedback = texts("tiny_gpt_oss_quality", "tiny-fp8-2", "kl_divergence")
    nearest = [text["kl_divergence"] for text in tiny["experts_rounded_to_nearest"].values()]
    gains = [100 * (1 - own / other) for own, other in zip(feedback, nearest, strict=True)]
    return [
        *found,
        *finetuned(),
        (
            "{:.3f} on English prose, {:.3f} on dialogue, {:.3f} on source code",
            [prose, dialogue, code],
        ),
        (
            "{:.1f} minutes on two cores beside other work, and {:.1f} minutes",
            [time["wall_minutes"], time["cpu_minutes_on_2_cores"]],
        ),
        (
            "peak was {:.4f} GiB resident: {:.2f} GiB anonymous",
            [small["peak_resident_gib"], small["peak_anonymous_gib"]],
        ),
        (
            "takes {:.2f} GiB of host memory, or {:.2f} GiB",
            [large["peak_anonymous_gib"], large["peak_resident_gib"]],
        ),
        (
            "20b's shape took {:.2f} GiB of host memory",
            [finetune["peak_anonymous_gib"]],
        ),
        ("One layer in float32 is {:.2f} GiB", [finetune["largest_layer_float32_gib"]]),
        (
            "{:.4f} on held-out modules (`statistics.py`; `textwrap.py` {:.4f})",
            [statistics, wraps],
        ),
        ("and {:.4f} on English", [english]),
        (
            "takes {:.0f} s on one H200",
            [large["seconds"]],
        ),
        (
            "from {:.4f} to {:.4f}, {:.4f} to {:.4f} and {:.4f} to {:.4f} nats",
            [x for pair in zip(nearest, feedback) for x in pair],
        ),
        (
            "the KL divergence by {:.0f} to {:.0f} %",
            [min(gains), max(gains)],
        ),
        (
            "amax / 448, {:.0f} % would",
            [100 * tiny["mxfp4_to_fp8"]["share_with_scales_of_amax_over_448"]],
        ),
    ]


def four_texts() -> Passages:
    """SmolLM2 with all weights in FP8: a row per share of them whose inputs stay in 16 bits."""
    results = load("cpu/smollm2_four_texts.json")
    found: Passages = [("its own, {:.0f} tokens of each", [results["task"]["max_tokens"]])]
    for arm, shares in results["shares_of_weights"].items():
        cells = zip(*(texts("smollm2_four_texts", arm, f) for f in _FACTOR_AND_KL))
        form = "| {:.0f} % | " + " | ".join(["{:.4f} ({:.4f})"] * 4) + " |"
        assert "BF16" not in shares
        values = [100 * shares.get("W8A16", 0.0), *(x for pair in cells for x in pair)]
        found.append((form, values))
    return found


def finetuned() -> Passages:
    """Rounding to MXFP4: a row per arm of each model, and what is left of the divergence."""
    found: Passages = []
    models = load("cpu/finetune_mxfp4.json")["models"]
    for measured in models.values():
        arms = [measured["texts"][text]["arms"] for text in ("prose", "licence", "python")]
        for arm, label in _ROUNDINGS.items():
            values = [x for text in arms for x in _kl_and_factor(text[arm])]
            found.append((f"| {label} | {' | '.join(['{:.4f} ({:.4f})'] * 3)} |", values))
    for text in models["tuned"]["texts"].values():
        assert text["arms"]["mse"] == text["arms"]["mse_base"]
    forms = {
        "feedback": "feedback leaves at most {:.2f} of the trained model's and {:.2f} of the fine",
        "mse": "`mse` leaves {:.2f} and {:.2f}.",
    }
    shares = {arm: [left_of_nearest(arm, model) for model in models] for arm in forms}
    return [*found, *((form, shares[arm]) for arm, form in forms.items())]


def _kl_and_factor(figures: dict[str, float]) -> tuple[float, float]:
    return figures["kl_divergence"], figures["perplexity_factor"]


_FACTOR_AND_KL = ("perplexity_factor", "kl_divergence")
_ROUNDINGS = {
    "nearest": "`nearest`",
    "mse": "`mse`",
    "feedback": "`feedback`",
    "everything": "`feedback`, FP8 attention and head",
}
_MIXES = {"(`W8A16`)": "w8a16", "nothing spared": "w8a8", "W8A16 and bf16": "policy"}
