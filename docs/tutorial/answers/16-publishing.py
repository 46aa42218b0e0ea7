# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 16

# %%
import json

import book

from oss_fused.environment import describe

publishing = book.chapter("16-publishing")


# %%
def exercise_1() -> list[str]:
    """Figures whose source has another commit: ratios across them compare nothing."""
    sources = book.measured("summary-sources.json") or {}
    wanted = book.measured("library.json", "environment", "commit")
    commits = {}
    for file in set(sources.values()):
        path = book.RESULTS / file
        data = json.loads(path.read_text()) if path.suffix == ".json" else {}
        commits[file] = (data.get("environment") or {}).get("commit")
    found = [name for name, file in sources.items() if commits[file] not in (wanted, None)]
    assert not any(name.startswith("library.matmul") for name in found)
    return found


# %%
def exercise_2() -> str:
    """The kernel report of ``fused_gated_mlp``; it has no hole."""
    rows = book.measured_rows("kernels.json", "results", group="gated_mlp")
    environment = book.measured("kernels.json", "environment")
    table = [{"problem": row["name"], "us": row["us"], "over": row["speedup"]} for row in rows]
    values = {
        "kernel": "fused_gated_mlp",
        "shape": "8192 rows",
        "environment": describe(environment) if environment else book.NOT_MEASURED,
        "command": "python scripts/bench_kernels.py",
        "versions": book.table(table or [{"problem": None}]),
        "share": book.percent(rows[0]["peak_fraction"] if rows else None),
        "file": "docs/results/h200/kernels.json",
        "profiler": book.NOT_MEASURED,
    }
    template = (book.FOLDER / "templates" / "kernel-report.md").read_text()
    report = publishing.fill(template, values)
    assert "fused_gated_mlp" in report and "{" not in report
    return report


if __name__ == "__main__":
    book.show(f"{len(exercise_1())} figures have another commit. The report begins:")
    book.show("\n".join(exercise_2().splitlines()[:3]))
