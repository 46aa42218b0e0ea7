# SPDX-License-Identifier: MIT
"""Passages of README and decode.md about an H100."""

from __future__ import annotations

from tests.docs.readers import Passages, best, cell, load, oss, profile, speedup

_MODEL, _PLACE = "gpt_oss_20b", "h100"
_BATCHES = (1, 8, 32, 128)
_STEPS = f"{_PLACE}/decode_{_MODEL}"


def _row(form: str, values: list[float]) -> tuple[str, list[float]]:
    return " | ".join([form] * len(values)), values


def _speedups(context: int) -> list[float]:
    return [speedup(_MODEL, batch, context, _PLACE) for batch in _BATCHES]


def readme() -> Passages:
    """The table of steps."""
    return [
        _row("{:.2f}", [best(_MODEL, batch, 128, _PLACE) for batch in _BATCHES]),
        _row("{:.2f}", [oss(_MODEL, batch, 128, _PLACE) for batch in _BATCHES]),
        _row("**{:.2f}x**", _speedups(128)),
        ("context of 1024 tokens: {:.2f}x, {:.2f}x, {:.2f}x and {:.2f}x", _speedups(1024)),
        ("the kernels take {:.2f} ms", [profile(1, "oss_fp8", _STEPS)["busy_us"] / 1e3]),
    ]


def decode() -> Passages:
    """Times, limits and the same steps on an H200."""
    found: Passages = []
    shares = []
    for batch in _BATCHES:
        busy = profile(batch, "oss_fp8", _STEPS)["busy_us"]
        limit = sum(profile(batch, "oss_fp8", _STEPS)["limits"].values())
        shares.append(100 * limit / busy)
        here = (_MODEL, batch, 128, _PLACE)
        values = [batch, best(*here), oss(*here), speedup(*here)]
        values += [speedup(_MODEL, batch, 1024, _PLACE), busy / 1e3, limit / 1e3, shares[-1]]
        found.append(
            ("| {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.0f} % |", values)
        )
    steps = [oss(_MODEL, b, 128, _PLACE) / oss(_MODEL, b) for b in _BATCHES[1:]]
    kernels = [
        profile(batch, "oss_fp8", _STEPS)["busy_us"] / profile(batch, "oss_fp8")["busy_us"]
        for batch in _BATCHES
    ]
    bandwidths = [
        load(f"{folder}/results.json")["bandwidth"] / 1e12
        for folder in (_STEPS, f"h200/decode_{_MODEL}")
    ]
    arms = cell(_MODEL, 1, 8192, _PLACE)["arms"]
    rounds = [arms[arm][end] for arm in ("oss_fp8", "triton") for end in ("min", "max")]
    whole = [best(_MODEL, 1, 8192, _PLACE), oss(_MODEL, 1, 8192, _PLACE)]
    whole.append(speedup(_MODEL, 1, 8192, _PLACE))
    prompts = load(f"{_STEPS}/results.json")["profiles"]
    prefill = {p["arm"]: p["busy_us"] / 1e3 for p in prompts if not p["steps"]}
    return [
        *found,
        ("| prefill 8192 | {:.2f} | {:.2f} | {:.2f} |", whole),
        ("took {:.1f} and {:.1f} ms, with Triton experts {:.1f} and {:.1f}.", rounds),
        ("kernels take {:.1f} and {:.1f} ms", [prefill["oss_fp8"], prefill["triton"]]),
        ("copy bandwidth, {:.2f} TB/s (H200: {:.2f} TB/s)", bandwidths),
        ("took {:.2f}, {:.2f} and {:.2f} times", steps),
        ("Kernels took {:.2f}, {:.2f}, {:.2f} and {:.2f} times", kernels),
        ("least speed-up is {:.2f}", [min(_speedups(128) + _speedups(1024))]),
    ]
