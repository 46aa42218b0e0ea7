# SPDX-License-Identifier: MIT
"""Which part of a step each recorded kernel belongs to, and how long the parts take.

A kernel's name mostly tells its part. Matrix products of the baseline have names that tell only a
tile size; theirs follows from their place between two attention kernels: first the output
projection, last the next layer's q, k and v, between them the router or the MLP, and before the
sampling the head.

Kernels launched with programmatic dependent launch start while the one before runs. Time that two
share counts for the earlier one, so that the parts add up to the time the device was busy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# in the order of a layer, which is the order in tables and charts
GROUPS = ("norms", "projections", "attention", "router", "experts", "mlp", "head", "other")
_NAMES: tuple[tuple[str, str], ...] = (
    ("sampling", r"argmax|gumbel|sampl|top_?p_"),
    ("norms", r"reshape_and_cache"),
    ("router", r"router|combined_routing|topk|_route|_place_kernel|bitmatrix|sort"),
    ("mlp", r"gated_mlp|_gate_up_stream|act_mul|act_and_mul|silu"),
    (
        "experts",
        (
            r"matmul_ogs|_gate_up|_(down(_few)?|encode|combine(_norm)?)_k|^_(large|stream)_k|moe|"
            r"marlin|_reduce_grouped"
        ),
    ),
    ("projections", r"qkv|o_proj"),
    ("attention", r"attention|flash|fmha|varlen|fwdcombine|reduce_segments"),
    ("product", r"nvjet|gemm|gemv|splitk|cublas|cutlass|_mm"),
    ("norms", r"norm|rope|rotary|quant|triton_(red|per|poi)_fused"),
)
_PATTERNS = tuple((kind, re.compile(text, re.IGNORECASE)) for kind, text in _NAMES)
# the second kernel of a product whose K is split
_CONTINUES = re.compile(r"splitk_?reduce", re.IGNORECASE)


def kind_of(name: str) -> str:
    """A group of GROUPS, "sampling", or "product" for a matrix product of unknown purpose."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def attribute(names: Sequence[str]) -> list[str]:
    """The group of each launch of a run of whole steps, from the names in their order."""
    cache = {name: kind_of(name) for name in set(names)}
    kinds = [cache[name] for name in names]
    middle = "router" if "experts" in cache.values() else "mlp"
    groups = ["other" if kind == "sampling" else kind for kind in kinds]
    edges = [place for place, kind in enumerate(kinds) if kind == "attention"]
    for begin, end in zip([-1, *edges], [*edges, len(kinds)]):
        found = [place for place in range(begin + 1, end) if kinds[place] == "product"]
        # a step ends where something is sampled, and where the recording ends
        ends = [place for place in range(begin + 1, end) if kinds[place] == "sampling"]
        sampled = ends[-1] if ends else (end if end == len(kinds) else None)
        starts = [place for place in found if not _CONTINUES.search(names[place])]
        # a fused projection says what it is: then no product takes its place
        named = [place for place in range(begin + 1, end) if kinds[place] == "projections"]
        fused = bool(starts and named and named[-1] > starts[-1])
        roles = _roles(starts, sampled, begin >= 0, middle, fused)
        role = "other"
        for place in found:
            role = roles.get(place, role)
            groups[place] = role
    return groups


def _roles(
    products: Sequence[int], sampled: int | None, follows: bool, middle: str, fused: bool
) -> dict[int, str]:
    """Groups of the products between two attention kernels.

    Args:
        products: their places.
        sampled: where the step ends among them, if it does.
        follows: an attention kernel comes before them.
        middle: group of what lies between the projections.
        fused: the projection before the next attention is none of them.
    """
    if sampled is None:
        before, after = list(products), []
    else:
        before = [place for place in products if place < sampled]
        after = [place for place in products if place > sampled]
    roles = dict.fromkeys(before, middle) | dict.fromkeys(after, "projections")
    if before and sampled is not None:
        roles[before[-1]] = "head"
    elif before and not fused:
        roles[before[-1]] = "projections"
    if before and follows and (sampled is None or len(before) > 1):
        roles[before[0]] = "projections"
    return roles


def own_times(launches: Sequence[Sequence[float]]) -> list[float]:
    """Microseconds of each launch [name, start, duration] that no earlier one covers."""
    times, covered = [], float("-inf")
    for _, start, duration in launches:
        end = start + duration
        times.append(max(0.0, end - max(start, covered)))
        covered = max(covered, end)
    return times


def condense(profile: dict[str, Any]) -> dict[str, Any]:
    """A recorded profile by kernel and by group, per step.

    Args:
        profile: as decode.run records it: "steps", "names", "launches" and the cell.

    Returns:
        The cell and arm, "kernels_per_step", "busy_us" (some kernel ran), "span_us" (first start
        to last end), "groups" (name -> {"kernels", "us"}) and "kernels" (dicts of "name",
        "group", "kernels", "us", the longest first), all per step.
    """
    launches, steps = profile["launches"], max(1, profile["steps"] if profile["cell_steps"] else 1)
    order = [profile["names"][int(launch[0])] for launch in launches]
    groups: dict[str, dict[str, float]] = {}
    kernels: dict[tuple[str, str], dict[str, float]] = {}
    for name, group, us in zip(order, attribute(order), own_times(launches)):
        for entry in (
            groups.setdefault(group, {"kernels": 0.0, "us": 0.0}),
            kernels.setdefault((name, group), {"kernels": 0.0, "us": 0.0}),
        ):
            entry["kernels"] += 1 / steps
            entry["us"] += us / steps
    rows = [
        {"name": name[:160], "group": group, **{key: round(v, 3) for key, v in entry.items()}}
        for (name, group), entry in kernels.items()
    ]
    span = launches[-1][1] + launches[-1][2] - launches[0][1] if launches else 0.0
    return {
        **{key: profile[key] for key in ("arm", "batch", "context")},
        "steps": profile["cell_steps"],
        "kernels_per_step": round(len(launches) / steps, 1),
        "busy_us": sum(entry["us"] for entry in groups.values()),
        "span_us": span / steps,
        "groups": {name: groups[name] for name in GROUPS if name in groups},
        "kernels": sorted(rows, key=lambda row: -float(row["us"])),
    }
