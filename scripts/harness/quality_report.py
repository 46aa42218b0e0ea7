# SPDX-License-Identifier: MIT
"""Tables of the JSON that scripts/evaluate.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.arguments import content_of
from oss_fused.bench.report import Report

_HEADER = ("text", "model", "perplexity", "factor", "KL, nats", "KL p99", "same top token")


def load_quality(path: Path) -> dict[str, Any]:
    """Read what scripts/evaluate.py wrote.

    Raises:
        ValueError: it is something else; names the argument and the file.
    """
    with content_of("--quality", path, "a JSON file of scripts/evaluate.py"):
        quality: dict[str, Any] = json.loads(path.read_text())
        add_quality(Report(""), quality)  # fails on another shape
    return quality


def add_quality(report: Report, quality: Mapping[str, Any]) -> None:
    """Add perplexities and, where they were measured, pass keys and scores of lm-eval.

    Args:
        report: to add to, under a heading of its own.
        quality: "texts", "task" and maybe "needles" and "lm_eval", as evaluate.py writes them.
    """
    report.table(_HEADER, [row for text in quality["texts"] for row in _rows(text)])
    task = quality.get("task")
    if task:
        sizes = [f"{text['tokens']} tokens of {_name(text)}" for text in quality["texts"]]
        report.paragraph(
            f"{', '.join(sizes)}, in windows of {task['window']}; KL of the baseline from the "
            f"model over the {task['top']} likeliest tokens, the others taken as one."
        )
    needles = quality.get("needles") or []
    lengths = list(needles[0]["by_length"]) if needles else []
    report.table(
        ("pass key found in", *(f"{length} tokens" for length in lengths)),
        [[row["name"], *(f"{row['by_length'][n]:.0%}" for n in lengths)] for row in needles],
    )
    report.table(
        ("model", "lm-eval task", "metric", "score"),
        [
            [row["name"], name, metric, f"{value:.4f}"]
            for row in quality.get("lm_eval") or []
            for name, metrics in row["tasks"].items()
            for metric, value in metrics.items()
        ],
    )


def _name(text: Mapping[str, Any]) -> str:
    return Path(text["text"]).name


def _rows(text: Mapping[str, Any]) -> list[list[str]]:
    base = text["baseline"]
    return [
        [_name(text), base["name"], f"{base['perplexity']:.3f}", "1", "", "", ""],
        *(
            [
                _name(text),
                arm["name"],
                f"{arm['perplexity']:.3f}",
                f"{arm['perplexity_factor']:.4f}",
                f"{arm['kl_divergence']:.4f}",
                f"{arm['kl_divergence_p99']:.3f}" if "kl_divergence_p99" in arm else "",
                f"{arm['top1_agreement']:.1%}",
            ]
            for arm in text["candidates"]
        ),
    ]
