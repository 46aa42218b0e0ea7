# SPDX-License-Identifier: MIT
"""Regression control: compare result files, hold rows to thresholds, follow the trend.

A threshold file is JSON: ``{"format": 1, "default": 0.1, "rows": {name: {"latency_ms": best known
p50, "allowed": relative slowdown, "error": largest allowed}}}``; "ratio" in the place of
"latency_ms" is time over that of a yardstick of the same process. Adaptive write-back lowers a
baseline to a stable better time and sets ``allowed`` to what the row's noise demands; it lowers
errors, too, and never raises either.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from oss_fused.bench.statistics import Verdict, compare_samples

FORMAT = 1
HISTORY_RUNS = 100
DEFAULT_ALLOWED = 0.10
# an adapted allowance stays between these, at this many relative standard deviations
_MIN_ALLOWED, _MAX_ALLOWED, _NOISE_FACTOR = 0.05, 0.5, 4.0
# room above an error that was adapted: sums in another order round otherwise
_ERROR_ROOM = 1.1
# what a row may be measured in
_TIMES = ("ratio", "latency_ms")
_KEYS = ("operation", "problem", "implementation")
# what else a row is judged by: numbers, NaN included, or absent
_FIGURES = (*_TIMES, "error", "relative_error", "relative_std")


class RowVerdict(Enum):
    """Outcome of a row."""

    OK = "ok"
    FASTER = "faster"
    SLOWER = "slower"
    WRONG = "wrong"
    MISSING = "missing"
    NEW = "new"

    @property
    def fails(self) -> bool:
        """Whether this outcome fails a check."""
        return self in (RowVerdict.SLOWER, RowVerdict.WRONG, RowVerdict.MISSING)


@dataclass(frozen=True)
class CheckedRow:
    """A row against its baseline; times in ms or yardsticks, ``ratio`` above 1 is slower."""

    name: str
    verdict: RowVerdict
    baseline: float | None = None
    current: float | None = None
    ratio: float | None = None
    note: str = ""


def load_results(path: str | Path) -> dict[str, Any]:
    """Read a result file of BenchmarkSuite.

    Raises:
        ValueError: unreadable, not JSON, or not a result file; names the file.
    """
    raw = read_object(Path(path))
    rows = raw.get("rows")
    if raw.get("format") != FORMAT or not isinstance(rows, list):
        raise ValueError(f"{path}: not a result file (format {raw.get('format')!r}, no rows)")
    for row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _KEYS):
            raise ValueError(
                f"{path}: a row lacks operation, problem or implementation; expected a text as each"
            )
        for key in _FIGURES:
            if not isinstance(row.get(key), int | float | None):
                raise ValueError(f"{path}: a row has {key}={row[key]!r}; expected a number")
    return raw


def rows_by_name(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """``operation/problem/implementation`` -> row."""
    return {"/".join(row[key] for key in _KEYS): row for row in results["rows"]}


def compare_results(
    baseline: dict[str, Any], current: dict[str, Any], min_change: float = 0.03
) -> list[CheckedRow]:
    """A verdict per row of two result files, by medians and the Mann-Whitney U test.

    Raises:
        ValueError: a row was not timed by BenchmarkSuite; names it.
    """
    before, after = rows_by_name(baseline), rows_by_name(current)
    checked = []
    for name in [*before, *(n for n in after if n not in before)]:
        old, new = before.get(name), after.get(name)
        verdict = _without_time(old, new)
        if verdict is not None or old is None or new is None:
            checked.append(CheckedRow(name, verdict or RowVerdict.NEW, note=_message(new)))
            continue
        for side, row in (("the baseline", old), ("the results", new)):
            _check_samples(row, f"{name} of {side}")
        found = compare_samples(old["samples_ms"], new["samples_ms"], min_change)
        kind = {
            Verdict.FASTER: RowVerdict.FASTER,
            Verdict.SLOWER: RowVerdict.SLOWER,
            Verdict.SAME: RowVerdict.OK,
        }[found.verdict]
        times = (old["latency_ms"], new["latency_ms"])
        checked.append(CheckedRow(name, kind, *times, found.ratio, f"p={found.p_value:.2g}"))
    return checked


def _check_samples(row: dict[str, Any], name: str) -> None:
    samples = row.get("samples_ms")
    timed = isinstance(samples, list) and samples and all(map(is_number, samples))
    if not timed or not is_number(row.get("latency_ms")):
        raise ValueError(
            f"row {name} lacks numbers as latency_ms and samples_ms; expected those of "
            f"BenchmarkSuite"
        )


def _without_time(old: dict[str, Any] | None, new: dict[str, Any] | None) -> RowVerdict | None:
    """The verdict where there is no pair of times to compare."""
    if new is None:
        return RowVerdict.MISSING
    if new.get("status") != "ok":
        return RowVerdict.WRONG
    return RowVerdict.NEW if old is None or old.get("status") != "ok" else None


def _message(row: dict[str, Any] | None) -> str:
    return "" if row is None else str(row.get("message", ""))


class Thresholds:
    """The threshold file: what each row may cost.

    Raises:
        ValueError: the file is not a threshold file; names it.
    """

    def __init__(self, path: str | Path) -> None:
        """Read ``path``; a file that does not exist yet is an empty one."""
        self.path = Path(path)
        raw: dict[str, Any] = {"format": FORMAT}
        if self.path.exists():
            raw = read_object(self.path)
        self.default = raw.get("default", DEFAULT_ALLOWED)
        self.rows: dict[str, dict[str, float]] = raw.get("rows", {})
        sound = (
            raw.get("format") == FORMAT
            and is_number(self.default)
            and isinstance(self.rows, dict)
            and all(
                isinstance(row, dict)
                and any(name in row for name in (*_TIMES, "error"))
                and all(map(is_number, row.values()))
                and all(row[name] > 0 for name in _TIMES if name in row)
                for row in self.rows.values()
            )
        )
        if not sound:
            raise ValueError(
                f"{self.path}: not a threshold file of format {FORMAT} with finite numbers and "
                f"times above 0"
            )

    def check(self, results: dict[str, Any]) -> list[CheckedRow]:
        """Every known row and every new one of ``results``, with its verdict."""
        current = rows_by_name(results)
        checked = []
        for name in [*self.rows, *(n for n in current if n not in self.rows)]:
            known, row = self.rows.get(name), current.get(name)
            if row is None:
                checked.append(CheckedRow(name, RowVerdict.MISSING))
            elif row.get("status") != "ok":
                checked.append(CheckedRow(name, RowVerdict.WRONG, note=_message(row)))
            elif known is None:
                checked.append(CheckedRow(name, RowVerdict.NEW, current=_time_of(row)[1] or None))
            else:
                checked.append(self._checked(name, known, row))
        return checked

    def _checked(self, name: str, known: dict[str, float], row: dict[str, Any]) -> CheckedRow:
        limit, error = known.get("error"), _error_of(row)
        # NaN is no pass
        if limit is not None and not (error is not None and error <= limit):
            note = f"error {error}, expected at most {limit:.3g}"
            return CheckedRow(name, RowVerdict.WRONG, note=note)
        kind, now = _time_of(row)
        if not kind or kind not in known:
            kept = limit is not None and not (known.keys() & set(_TIMES))
            note = "" if kept else f"measured in {kind or 'nothing'}, unlike its bar"
            return CheckedRow(name, RowVerdict.OK if kept else RowVerdict.MISSING, note=note)
        allowed = known.get("allowed", self.default)
        ratio = now / known[kind]
        verdict = RowVerdict.OK
        # NaN is no pass
        if not ratio <= 1 + allowed:
            verdict = RowVerdict.SLOWER
        elif ratio < 1 - allowed:
            verdict = RowVerdict.FASTER
        unit = "ms" if kind == "latency_ms" else "of the yardstick"
        return CheckedRow(name, verdict, known[kind], now, ratio, f"{unit}, allowed {allowed:+.0%}")

    def adapt(self, results: dict[str, Any]) -> int:
        """Take over new rows, stable better times and lower errors; returns how many changed."""
        changed = 0
        for name, row in rows_by_name(results).items():
            if row.get("status") != "ok":
                continue
            known = self.rows.get(name, {})
            bar = dict(known)
            kind, now = _time_of(row)
            if (
                kind
                and now > 0
                and (not known or (row.get("stable", True) and now < known.get(kind, 0.0)))
            ):
                noise = _NOISE_FACTOR * (row.get("relative_std") or 0.0)
                # a file with a loose default, for a noisy machine, keeps it
                allowed = max(_MIN_ALLOWED, self.default, min(_MAX_ALLOWED, noise))
                bar |= {kind: now, "allowed": round(allowed, 4)}
            error = _error_of(row)
            if error is not None and (not known or "error" in known):
                limit = _ERROR_ROOM * error
                bar["error"] = min(limit, known.get("error", limit))
            if bar != known:
                self.rows[name] = bar
                changed += 1
        return changed

    def save(self) -> None:
        """Write the file in one step."""
        document = {"format": FORMAT, "default": self.default, "rows": self.rows}
        _write_json(self.path, document)


def largest(values: Iterable[float]) -> float:
    """The largest, or NaN if one is: max() drops a NaN that is not the first."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _time_of(row: dict[str, Any]) -> tuple[str, float]:
    """What a row is measured in, and its value; ("", 0.0) for one without a time."""
    kind = next((name for name in _TIMES if row.get(name) is not None), "")
    return kind, row[kind] if kind else 0.0


def _error_of(row: dict[str, Any]) -> float | None:
    """A row's own measure of error, else the relative one of BenchmarkSuite."""
    return row.get("error", row.get("relative_error"))


def load_history(path: Path) -> list[dict[str, Any]]:
    """The runs of a history file, oldest first.

    Raises:
        ValueError: the file is not a history; names it.
    """
    runs = runs_of(read_object(path), "format", FORMAT, "latency_ms")
    if runs is None:
        raise ValueError(
            f"{path}: not a history file; expected format {FORMAT} and runs with latency_ms"
        )
    return runs


def runs_of(
    raw: dict[str, Any], tag: str, wanted: object, figures: str
) -> list[dict[str, Any]] | None:
    """The runs of a file whose ``tag`` is ``wanted``; None if it is another kind of file.

    Each run has an object of numbers under the key ``figures``, NaN and infinite ones included.
    """
    runs = raw.get("runs")
    if raw.get(tag) != wanted or not isinstance(runs, list):
        return None
    for run in runs:
        numbers = run.get(figures) if isinstance(run, dict) else None
        if not isinstance(numbers, dict):
            return None
        if not all(isinstance(number, int | float) for number in numbers.values()):
            return None
    return runs


def append_history(path: str | Path, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a run to the history file and return the last HISTORY_RUNS runs, oldest first.

    Raises:
        ValueError: the file is not a history; names it.
    """
    path = Path(path)
    runs = load_history(path) if path.exists() else []
    environment = results.get("environment", {})
    # a row's time in its own unit: trends are relative to its first
    latencies = {
        name: _time_of(row)[1] for name, row in rows_by_name(results).items() if _time_of(row)[0]
    }
    run = {
        "timestamp": environment.get("timestamp"),
        "commit": environment.get("commit"),
        "latency_ms": latencies,
    }
    runs = [*runs, run][-HISTORY_RUNS:]
    _write_json(path, {"format": FORMAT, "runs": runs})
    return runs


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        ValueError: unreadable, or something else; names the file.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)
