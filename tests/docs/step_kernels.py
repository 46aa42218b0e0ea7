# SPDX-License-Identifier: MIT
"""Passages of decode.md about the kernels of a step."""

from __future__ import annotations

from tests.docs.readers import Passages, profile, summary

_BATCHES = (1, 8, 32, 128, 256)
_EARLY, _BEFORE = "h200/decode_gpt_oss_20b_early", "h200/decode_gpt_oss_20b_kernels"
_NEWEST, _H100 = "h200/decode_gpt_oss_20b_alone", "h100/decode_gpt_oss_20b_early"
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
    for prefix, folder in (("", _NEWEST), ("h100.", _H100)):
        for batch in (2, 4, *_BATCHES):
            took = round(_ms(batch, "oss_fp8", folder), 4)
            assert summary(f"{prefix}decode.gpt_oss_20b.kernel_ms_b{batch}") == took
    return _groups() + _runs() + _ratios()


def _ms(batch: int, arm: str, folder: str) -> float:
    return float(profile(batch, arm, folder)["busy_us"]) / 1e3


def _kernels(batch: int, folder: str) -> dict[str, float]:
    kernels = profile(batch, "oss_fp8", folder)["kernels"]
    return {kernel["name"]: kernel["us"] for kernel in kernels}


def _longer(time: float, than: float) -> float:
    """By how many percent ``time`` is more."""
    return 100 * (time / than - 1)


def _groups() -> Passages:
    found = [_profile_row(name, group) for name, group in _PROFILED.items()]
    whole = [
        figure
        for batch in (1, 256)
        for figure in (
            profile(batch, "triton", _EARLY)["busy_us"],
            profile(batch, "oss_fp8", _EARLY)["busy_us"],
            sum(profile(batch, "oss_fp8", _EARLY)["limits"].values()),
        )
    ]
    found.append(("| all | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |", whole))
    arms = ("triton", "oss_fp8")
    count = [profile(b, arm, _EARLY)["kernels_per_step"] for b in (1, 256) for arm in arms]
    return [*found, ("| number of kernels | {:.0f} | {:.0f} | | {:.0f} | {:.0f} | |", count)]


def _profile_row(name: str, group: str) -> tuple[str, list[float]]:
    cells, values = [], []
    for batch in (1, 256):
        for arm in ("triton", "oss_fp8"):
            cells.append("{:.0f}")
            values.append(profile(batch, arm, _EARLY)["groups"][group]["us"])
        limit = profile(batch, "oss_fp8", _EARLY)["limits"].get(group)
        cells.append("{:.0f}" if limit else "")
        values += [limit] if limit else []
    return f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |"), values


def _runs() -> Passages:
    lines = (
        ("oss_fp8, H200, [bdaf3c7](results/h200/decode_gpt_oss_20b_alone/report.md)", _NEWEST),
        ("oss_fp8, H200, [464a9a6](results/h200/decode_gpt_oss_20b_early/report.md)", _EARLY),
        ("oss_fp8, H200, [7cfe9e5](results/h200/decode_gpt_oss_20b_kernels/report.md)", _BEFORE),
        ("oss_fp8, H100, [4cfbffc](results/h100/decode_gpt_oss_20b_early/report.md)", _H100),
    )
    found = [(label, [_ms(b, "oss_fp8", folder) for b in _BATCHES]) for label, folder in lines]
    found += [
        (f"Triton experts, H200, {commit}", [_ms(b, "triton", folder) for b in _BATCHES])
        for commit, folder in (("464a9a6", _EARLY), ("7cfe9e5", _BEFORE))
    ]
    return [(f"| {label} |" + " {:.3f} |" * len(times), times) for label, times in found]


def _ratios() -> Passages:
    now, before = _kernels(128, _EARLY), _kernels(128, _BEFORE)
    names = ("stream", "qkv", "add_rms_norm_router", "place_and_encode", "quantize_row", "route")
    slowed = [_longer(now[f"_{name}_kernel"], before[f"_{name}_kernel"]) for name in names]
    stock = [_longer(_ms(b, "triton", _EARLY), _ms(b, "triton", _BEFORE)) for b in (1, 8)]
    h100, h200 = _kernels(1, _H100), _kernels(1, _EARLY)
    ratio = {name: h100[name] / h200[name] for name in h100.keys() & h200.keys()}
    light = [ratio[f"_{name}_kernel"] for name in ("gemm_stream", "qkv", "decode_attention")]
    same = [("quantize_row", 32), ("quantize_row", 1), ("combine_norm", 1)]
    more = [
        _kernels(b, _NEWEST)[f"_{name}_kernel"] - _kernels(b, _EARLY)[f"_{name}_kernel"]
        for name, b in same
    ]
    return [
        ("takes {:.0f} us more at 32 sequences and {:.0f} at one", more[:2]),
        ("combination {:.0f} us more at one", more[2:]),
        ("would take {:.3f} ms", [_ms(1, "oss_fp8", _NEWEST) - sum(more[1:]) / 1e3]),
        ("take {:.1f} and {:.1f} % longer at 1 and 8", stock),
        ("take {:.0f} to {:.0f} % longer, probably", [min(slowed), max(slowed)]),
        (
            "take {:.2f} and {:.2f} times as long as the H200's",
            [_ms(batch, "oss_fp8", _H100) / _ms(batch, "oss_fp8", _EARLY) for batch in (1, 8)],
        ),
        (
            "w13 takes {:.2f} times as long and lm_head {:.2f} times",
            [ratio["_gate_up_few_kernel"], ratio["_gemv_kernel"]],
        ),
        ("projection take {:.2f} to {:.2f} times", [min(light), max(light)]),
    ]
