# SPDX-License-Identifier: MIT
"""Figures of the result files, as pages quote them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
# templates and what fills them
Passages = list[tuple[str, list[float]]]


@functools.cache
def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def short_loads(model: str) -> list[Any]:
    cells = load(f"h200/{model}/results.json")["cells"]
    return [cell for cell in cells if cell["input_len"] == 128]


def served(model: str, arm: str | None, figure: str) -> list[float]:
    """Median milliseconds of a comparison's loads, steady ones only; None: the best baseline's."""
    cells = short_loads(model)
    name = f"p50_{figure}_ms"
    arms = [cell["arms"][arm or cell["baselines"][name]] for cell in cells]
    return [each["figures"][name] for each in arms if figure == "tpot" or each["steady"]]


def ratios(model: str, arm: str, figure: str) -> list[float]:
    cells = short_loads(model)
    name = f"p50_{figure}_ms"
    told = []
    for cell in cells:
        both = (cell["arms"][arm], cell["arms"][cell["baselines"][name]])
        if figure == "tpot" or all(side["steady"] for side in both):
            told.append(both[0]["ratios"][name]["median"])
    return told


def memory(model: str, arm: str) -> float:
    return load(f"h200/{model}/results.json")["arms"][arm]["memory"]["weights_gib"]


def startup(model: str, arm: str) -> float:
    return load(f"h200/{model}/results.json")["arms"][arm]["startup_seconds"][0]


def cell(model: str, batch: int, context: int = 128, place: str = "h200") -> Any:
    cells = load(f"{place}/decode_{model}/results.json")["cells"]
    return next(c for c in cells if (c["batch"], c["context"]) == (batch, context))


def best(model: str, batch: int, context: int = 128, place: str = "h200") -> float:
    found = cell(model, batch, context, place)
    return found["arms"][found["baseline"]]["ms"]


def oss(model: str, batch: int, context: int = 128, place: str = "h200") -> float:
    return cell(model, batch, context, place)["arms"]["oss_fp8"]["ms"]


def speedup(model: str, batch: int, context: int = 128, place: str = "h200") -> float:
    return cell(model, batch, context, place)["speedup"]


def before(arm: str, batch: int, context: int = 128) -> float:
    """Milliseconds in the comparison with the package at 4f8f7d1."""
    cells = load("h200/decode_gpt_oss_20b_before/results.json")["cells"]
    found = next(c for c in cells if (c["batch"], c["context"]) == (batch, context))
    return found["arms"][arm]["ms"]


def profile(batch: int, arm: str, folder: str = "h200/decode_gpt_oss_20b") -> Any:
    found = load(f"{folder}/results.json")["profiles"]
    return next(p for p in found if p["steps"] and (p["batch"], p["arm"]) == (batch, arm))


def logits(arm: str, *figures: tuple[str, str]) -> list[float]:
    found = load("h200/decode_gpt_oss_20b/logits.json")["figures"][arm]["bfloat16"]
    return [found[part][name] for part, name in figures]


def left_of_nearest(arm: str, model: str) -> float:
    """KL divergence of a rounding to MXFP4 over that of rounding to nearest, on the worst text."""
    measured = load("cpu/finetune_mxfp4.json")["models"][model]["texts"].values()
    kls = [{a: found["kl_divergence"] for a, found in text["arms"].items()} for text in measured]
    return max(kl[arm] / kl["nearest"] for kl in kls)


def layer_us(tokens: int, fp8: bool) -> float:
    rows = load("h200/moe_parts.json")["results"]
    row = next(r for r in rows if (r["batch"], r["fp8_activations"]) == (tokens, fp8))
    return row["us"]["layer"]


def attention(shape: str, batch: int, context: int) -> tuple[float, float]:
    rows = load("h200/attention.json")["rows"]
    key = (shape, batch, context)
    row = next(r for r in rows if (r["shape"], r["batch"], r["context"]) == key)
    return row["native_us"], row["flash_us"]


def texts(name: str, arm: str, figure: str = "perplexity_factor") -> list[float]:
    return [
        candidate[figure]
        for text in load(f"cpu/{name}.json")["texts"]
        for candidate in text["candidates"]
        if candidate["name"] == arm
    ]


def summary(name: str) -> float:
    return load("h200/summary.json")[name]


def library(operation: str, implementation: str, folder: str = "library-norm/") -> list[float]:
    rows = load(f"h200/{folder}library-suite.json")["rows"]
    wanted = (operation, implementation)
    found = [r for r in rows if (r["operation"], r["implementation"]) == wanted]
    return [1e3 * row["latency_ms"] for row in found]


def operator(part: str, operation: str, implementation: str, **shape: Any) -> Any:
    rows = load(f"h200/operators-{part}.json")["rows"]
    wanted = {"operation": operation, "implementation": implementation, **shape}
    return next(row for row in rows if wanted.items() <= row.items())


def flash(way: str, length: int, dim: int, causal: bool) -> dict[str, float]:
    """TFLOPS of attention "forward" or "backward", by implementation."""
    rows = load("h200/operators-attention.json")["rows"]
    shape = {"operation": f"flash {way}", "length": length, "dim": dim, "causal": causal}
    return {r["implementation"]: r["tflops"] for r in rows if shape.items() <= r.items()}


def kernels(group: str, figure: str, **shape: Any) -> list[float]:
    rows = load("h200/kernels.json")["results"]
    found = [r for r in rows if r["group"] == group and shape.items() <= r.items()]
    return [row[figure] for row in found]


def text_of(path: Path) -> str:
    """The Markdown of a page, or that of a chapter's cells; without code."""
    text = path.read_text()
    if path.suffix == ".py":
        cells = text.split("# %% [markdown]\n")[1:]
        lines = [line for cell in cells for line in cell.partition("\n# %%")[0].splitlines()]
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)
