# SPDX-License-Identifier: MIT
# %% [markdown]
# # 16. Publishing
#
# **Goal.** Write a report that another engineer can check: every number from a file, every file
# with its environment, and the failures beside the successes.
#
# Three templates are in this folder: the [kernel report](templates/kernel-report.md), the [PR
# checklist](templates/pr-checklist.md), and an [article](templates/article.md), "0 to 70 % of
# cuBLAS".

# %%
import re
from pathlib import Path

import book

from oss_fused.environment import describe

# %% [markdown]
# ## What a claim needs
#
# | claim | needs |
# |---|---|
# | "1.3x faster" | than what, at which shape and dtype, on which device, both measured in turn |
# | "takes 0.18 ms" | median, number of samples, RSD, versions, commit |
# | "exact" | the reference, its precision, the error that was accepted and why |
# | "reaches 95 % of cuBLAS" | cuBLAS measured in the same run, not from a datasheet |
# | "supports X" | the test that runs X |
#
# A claim without its row is left out. What was measured and is bad stays in.
#
# ## A report from a file
#
# The template has names in braces. The function fills them from `library.json`, so that no number
# is typed.


# %%
def version_table() -> list[dict]:
    """The versions of the matrix product: change, TFLOP/s, gain over the version before, remark."""
    changes = {
        "v0": ("one row and 128 columns per program", "limited by loads"),
        "v1": ("tiles of 64 x 64, tensor cores", "limited by waiting"),
        "v2": ("pipeline of 3 stages, grouped order", "limited by its tile"),
        "v3": ("config from the tuner", "limited by tensor cores"),
        "v4": ("bias and SiLU in the epilogue", "does more work than v3"),
    }
    times = book.measured("library.json", "matmul_ms") or {}
    rows, before = [], None
    for name, (change, remark) in changes.items():
        ms = times.get(name)
        row = {"version": name, "change": change, "TFLOP/s": ms and 2 * 4096**3 / ms * 1e-9}
        row["gain"] = "-" if before is None or ms is None else f"{before / ms:.2f}x"
        rows.append(row | {"remark": remark})
        before = ms
    return rows


def kernel_report() -> str:
    """The kernel report of chapter 6, filled from its JSON file."""
    template = (book.FOLDER / "templates" / "kernel-report.md").read_text()
    environment = book.measured("library.json", "environment")
    share = book.measured("summary.json", "library.matmul_v3.fraction_of_cublas")
    values = {
        "kernel": "matmul_v3",
        "shape": "4096^2 bfloat16",
        "environment": describe(environment) if environment else book.NOT_MEASURED,
        "command": "python scripts/bench_library.py --output docs/results/h200",
        "versions": book.table(version_table()),
        "share": book.percent(share),
        "file": "docs/results/h200/library.json",
        "profiler": book.NOT_MEASURED,
    }
    return fill(template, values)


def fill(template: str, values: dict[str, str]) -> str:
    """Replace ``{name}`` by its value.

    Raises:
        KeyError: the template has a name that ``values`` lacks; a report with a hole is no report.
    """
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], template)


if __name__ == "__main__":
    book.show(book.table(version_table(), "4096^2 bfloat16.", book.source("library.json")))
    lines = kernel_report().splitlines()
    book.show("\n".join(["````", *lines[:14], "...", "````"]))

# %% [markdown]
# ## Figures that stay true
#
# A number in a page goes stale when the kernel changes. This repository reads each from its JSON
# in a test: the test fills a sentence from the file and looks for it in the page. A page with
# another number fails. Numbers that no file explains must be listed with the reason: a setting, a
# target, a datasheet.
#
# `summary.json` holds the named figures of all runs, `summary-sources.json` the file of each. A
# script that measures merges its own figures with `--summary`; nobody edits them.


# %%
def summary_sources() -> list[dict]:
    """Named figures per source file."""
    sources = book.measured("summary-sources.json") or {}
    files = sorted(set(sources.values()))
    return [{"file": f, "figures": list(sources.values()).count(f)} for f in files] or [
        {"file": None}
    ]


if __name__ == "__main__":
    book.show(book.table(summary_sources()))

# %% [markdown]
# ## Before you open a pull request
#
# The [checklist](templates/pr-checklist.md) in one sentence each: a test fails without the change;
# the error is stated before the time; the baseline was measured in the same run; the JSON is
# committed; the page names the file; what was not run is named.
#
# ## The production version
#
# `make_report` of the suite writes Markdown, HTML and charts from saved rows, so that a report can
# be made again without a GPU (`scripts/bench_library.py --render`). The reports of this
# repository:


# %%
def reports() -> list[dict]:
    """Reports under docs/results/h200, with the number of lines."""
    found = sorted(book.RESULTS.rglob("*.md"))
    return [
        {"report": str(path.relative_to(book.RESULTS)), "lines": lines_of(path)} for path in found
    ] or [{"report": None}]


def lines_of(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text().splitlines())


def acceptance() -> list[book.Bar]:
    """Every named figure has its file."""
    sources = book.measured("summary-sources.json") or {}
    figures = book.measured("summary.json") or {}
    share = sum(name in sources for name in figures) / len(figures) if figures else None
    return [book.Bar("named figures with a source file", 1.0, share, "summary-sources.json")]


if __name__ == "__main__":
    book.show(book.table(reports()))
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Must I publish a slow shape?** Yes, if a user can meet it. A table without a loss is not
# believed.
#
# **How many digits?** As many as the RSD allows: with 1 % of scatter, three.
#
# **The baseline got faster since.** Then your ratio is history. Measure again or remove it.
#
# ## Exercises
#
# 1. Find a figure in `summary.json` whose source file has another commit than `library.json`.
# 2. Fill the kernel report for `fused_gated_mlp` from `kernels.json`.
#
# Answers: [answers/16-publishing.py](answers/16-publishing.py).
#
# Next: [calibrating and serving FP8](17-fp8-calibration-and-serving.py).
