# SPDX-License-Identifier: MIT
"""What the chapters share: Triton's interpreter, other chapters, tables, figures of one H200.

A chapter imports this module first: without a GPU, Triton must be told to interpret before it is
imported.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda" if GPU else "cpu")
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = ROOT / "docs" / "results" / "h200"
NOT_MEASURED = "not measured"
# of a time in the chapters' own tables
SAMPLES = 20 if GPU else 3
# where show() also writes what it prints, for the rendered pages
_RECORD = "TUTORIAL_RECORD"

# measuring code that a checkout has and an installed package has not
if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))


def chapters() -> list[str]:
    """Names of all chapters, in order."""
    return sorted(path.stem for path in FOLDER.glob("[0-9][0-9]-*.py"))


def chapter(name: str, folder: str = "") -> ModuleType:
    """The module of a chapter, such as "06-matmul", or of its answers (folder "answers").

    The names of the files are no names of Python. A module is made once in a process.

    Raises:
        FileNotFoundError: no chapter has that name.
    """
    key = "_".join(("tutorial", folder, name)).replace("-", "_").replace("__", "_")
    if key not in sys.modules:
        path = FOLDER / folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def exercises(name: str) -> list[str]:
    """The exercises that a chapter sets, as text."""
    text = (FOLDER / f"{name}.py").read_text().partition("# ## Exercises\n")[2]
    lines = [
        line.removeprefix("#").strip() for line in text.partition("# Answers:")[0].splitlines()
    ]
    return [item.strip() for item in re.split(r"(?m)^\d+\. ", "\n".join(lines))[1:]]


@functools.cache
def _json(file: str) -> Any:
    path = RESULTS / file
    return json.loads(path.read_text()) if path.is_file() else None


def measured(file: str, *path: str | int) -> Any:
    """A value in a JSON file of docs/results/h200, or None where it was not measured."""
    value = _json(file)
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def measured_rows(file: str, *path: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a list in a result file whose fields equal ``wanted``; none where there is no file.

    Args:
        file: below docs/results/h200.
        path: keys that lead to the list.
        wanted: field -> value.
    """
    rows = measured(file, *path) or []
    return [row for row in rows if wanted.items() <= row.items()]


def source(file: str) -> str:
    """The line under a table of measured figures: file, device, versions, commit, time."""
    from oss_fused.environment import describe

    environment = measured(file, "environment")
    told = NOT_MEASURED if environment is None else describe(environment)
    return f"Source: docs/results/h200/{file}. {told}"


def here(what: str, with_times: bool = False) -> str:
    """The line under a table of this run: machine, versions, commit, what was measured how often.

    Args:
        what: shape and dtype.
        with_times: the table has times.
    """
    from oss_fused.environment import describe, fingerprint

    way = "compiled" if GPU else "Triton's interpreter"
    often = f"; medians of {SAMPLES} samples or more" if with_times else ""
    return f"This run: {what}; {way}{often}. {describe(fingerprint())}"


def timed(call: Callable[[], Any]) -> tuple[float, float, int]:
    """Median milliseconds of ``call``, relative standard deviation, and number of samples.

    On a GPU 20 samples, and more rounds of 20 while they scatter. Under the interpreter few,
    because its times say nothing about a GPU.
    """
    from oss_fused.bench.statistics import collect, summarize
    from oss_fused.bench.timing import time_calls, warm_up

    warm_up(call, 3 if GPU else 1, DEVICE)
    if GPU:
        samples, found = collect(functools.partial(time_calls, call, device=DEVICE))
    else:
        samples = time_calls(call, SAMPLES, DEVICE)
        found = summarize(samples)
    return found.p50, found.relative_std, len(samples)


def cell(value: Any) -> str:
    """A value as a cell of a table."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def percent(share: float | None) -> str:
    """A share as text."""
    return NOT_MEASURED if share is None else f"{100 * share:.1f} %"


def table(rows: Sequence[Mapping[str, Any]], *notes: str) -> str:
    """Rows as a Markdown table with aligned columns, and a line of text for each note.

    Columns are those of the first row.
    """
    names = list(rows[0])
    cells = [names, *[[cell(row[name]) for name in names] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = [
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths))} |"
        for line in cells
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


@dataclass(frozen=True)
class Bar:
    """An acceptance number: what was measured on one H200, and what is asked for.

    Attributes:
        what: the figure, as a sentence.
        needed: the least that is asked for; the most, where ``at_most``.
        value: what was measured; None where nothing was.
        file: of docs/results/h200, or "arithmetic" where no measurement is needed.
        at_most: less is better.
    """

    what: str
    needed: float
    value: float | None
    file: str
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """Met, not met, or not measured."""
        if self.value is None:
            return NOT_MEASURED
        good = self.value <= self.needed if self.at_most else self.value >= self.needed
        return "met" if good else "NOT met"


def bars(found: Sequence[Bar]) -> str:
    """The table of a chapter's acceptance numbers."""
    rows = [
        {
            "acceptance number": bar.what,
            "needed": f"{'at most' if bar.at_most else 'at least'} {percent(bar.needed)}",
            "one H200": percent(bar.value),
            "verdict": bar.verdict,
            "source": bar.file,
        }
        for bar in found
    ]
    return table(rows)


def show(text: str) -> None:
    """Print, and record for the rendered page where a build asks for it."""
    print(text, end="\n\n", flush=True)
    _record({"text": text})


def show_plot(name: str, png: bytes) -> None:
    """Record a chart for the rendered page; a terminal gets nothing.

    Args:
        name: of the file, without suffix.
        png: its bytes.
    """
    if record := os.environ.get(_RECORD):
        path = Path(record)
        plot = f"{path.name.partition('.')[0]}-{name}.png"
        (path.parent / plot).write_bytes(png)
        _record({"plot": plot})


def _record(entry: dict[str, Any]) -> None:
    if record := os.environ.get(_RECORD):
        with Path(record).open("a") as file:
            file.write(json.dumps({"line": _line_of_the_chapter(), **entry}) + "\n")


def _line_of_the_chapter() -> int:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_lineno
