# SPDX-License-Identifier: MIT
"""Passages of moe.md."""

from __future__ import annotations

from tests.docs.readers import Passages, layer_us, load


def moe() -> Passages:
    found: Passages = []
    rows = [r for r in load("h200/moe.json")["results"] if not r["fp8_activations"]]
    for row in rows:
        us, share = row["us"], {name: 100 * x for name, x in row["of_copy"].items()}
        base = [row["baselines"][name]["us"] for name in ("triton_kernels", "marlin")]
        if row["batch"] in (1, 32, 128):
            form = "| {} | {:.1f} | {:.1f} ({:.0f} %) | {:.1f} ({:.0f} %) | {:.1f} | {:.1f} |"
            form += " {:.1f} | {:.1f} | {:.2f} |"
            middle = [us["gate_up"], share["gate_up"], us["down"], share["down"]]
        elif row["batch"] == 8192:
            form = "| {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.2f} |"
            middle = [us["gate_up"], us["down"]]
        else:
            continue
        values = [
            row["batch"],
            us["route"],
            *middle,
            us["combine"],
            us["layer"],
            *base,
            row["speedup"],
        ]
        found.append((form, values))
    rows = [r["us"] for r in load("h200/moe_parts.json")["results"] if r["fp8_activations"]]
    around = 100 * (rows[-1]["route"] + rows[-1]["combine"]) / rows[-1]["layer"]
    found.append(("routing and combination ({:.0f} % of the layer)", [around]))
    for label, fp8 in (("bf16 precision", False), ("FP8 activations", True)):
        times = [layer_us(tokens, fp8) for tokens in (256, 512, 1024, 2048, 8192)]
        found.append((f"| {label} | {' | '.join(['{:.1f}'] * 5)} |", times))
    return found
