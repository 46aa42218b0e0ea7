# SPDX-License-Identifier: MIT
"""Passages of decode.md about the kernels of a step."""

from __future__ import annotations

from tests.docs.readers import Passages, profile, summary

_BATCHES = (1, 8, 32, 128, 256)
_H200, _H100 = "h200/decode_gpt_oss_20b_newest", "h100/decode_gpt_oss_20b_one_round"
_PROFILED = {
    "experts": "experts",
    "projections": "projections",
    "router": "router",
    "attention": "attention",
    "lm_head": "head",
    "norms, RoPE, cache write": "norms",
    "sampling, copies": "other",
}


def passages() -> Passages:
    """The table of groups, that of runs, and what is said of both."""
    # the run before has more batches
    before = "h200/decode_gpt_oss_20b_one_round"
    runs = (("", _H200, _BATCHES), ("", before, (2, 4)), ("h100.", _H100, (2, 4, *_BATCHES)))
    for prefix, folder, batches in runs:
        for batch in batches:
            took = round(_ms(batch, "oss_fp8", folder), 4)
            assert summary(f"{prefix}decode.gpt_oss_20b.kernel_ms_b{batch}") == took
    return _groups() + _runs() + _ratios()


def readme() -> Passages:
    """README's kernels of a step."""
    five = "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f} ms"
    form = f"{five} at 1, 8, 32, 128 and 256 sequences, with Triton experts {five}"
    times = [_ms(b, arm, _H200) for arm in ("oss_fp8", "triton") for b in _BATCHES]
    return [(form, times), (f"On one H100 {five}", [_ms(b, "oss_fp8", _H100) for b in _BATCHES])]


def _ms(batch: int, arm: str, folder: str) -> float:
    return float(profile(batch, arm, folder)["busy_us"]) / 1e3


def _kernels(batch: int, folder: str) -> dict[str, float]:
    kernels = profile(batch, "oss_fp8", folder)["kernels"]
    return {kernel["name"]: kernel["us"] for kernel in kernels}


def _groups() -> Passages:
    found = [_profile_row(name, group) for name, group in _PROFILED.items()]
    whole = [
        figure
        for batch in (1, 256)
        for figure in (
            profile(batch, "triton", _H200)["busy_us"],
            profile(batch, "oss_fp8", _H200)["busy_us"],
            sum(profile(batch, "oss_fp8", _H200)["limits"].values()),
        )
    ]
    found.append(("| all | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |", whole))
    arms = ("triton", "oss_fp8")
    count = [profile(b, arm, _H200)["kernels_per_step"] for b in (1, 256) for arm in arms]
    return [*found, ("| number of kernels | {:.0f} | {:.0f} | | {:.0f} | {:.0f} | |", count)]


def _profile_row(name: str, group: str) -> tuple[str, list[float]]:
    cells, values = [], []
    for batch in (1, 256):
        for arm in ("triton", "oss_fp8"):
            cells.append("{:.0f}")
            values.append(profile(batch, arm, _H200)["groups"][group]["us"])
        limit = profile(batch, "oss_fp8", _H200)["limits"].get(group)
        cells.append("{:.0f}" if limit else "")
        values += [limit] if limit else []
    return f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |"), values


def _runs() -> Passages:
    h100 = "oss_fp8, [H100](results/h100/decode_gpt_oss_20b_one_round/report.md)"
    lines = (
        ("oss_fp8, H200", "oss_fp8", _H200),
        ("Triton experts, H200", "triton", _H200),
        (h100, "oss_fp8", _H100),
    )
    found = [(label, [_ms(b, arm, folder) for b in _BATCHES]) for label, arm, folder in lines]
    return [(f"| {label} |" + " {:.3f} |" * len(times), times) for label, times in found]


def _ratios() -> Passages:
    h100, h200 = _kernels(1, _H100), _kernels(1, _H200)
    ratio = {name: h100[name] / h200[name] for name in h100.keys() & h200.keys()}
    light = [ratio[f"_{name}_kernel"] for name in ("gemm_stream", "qkv", "decode_attention")]
    return [
        (
            "take {:.2f}, {:.2f}, {:.2f} and {:.2f} times as long as the H200's at 1",
            [_ms(b, "oss_fp8", _H100) / _ms(b, "oss_fp8", _H200) for b in _BATCHES[:4]],
        ),
        (
            "w13 takes {:.2f} times as long and lm_head {:.2f} times",
            [ratio["_gate_up_few_kernel"], ratio["_gemv_kernel"]],
        ),
        ("projection take {:.2f} to {:.2f} times", [min(light), max(light)]),
    ]
