# SPDX-License-Identifier: MIT
"""Regression control: verdicts, adaptive bars, history, and the command's exit codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from harness import paired_times
from harness.regression import (
    HISTORY_RUNS,
    RowVerdict,
    Thresholds,
    append_history,
    compare_results,
    load_results,
)
from harness.regression_report import make_report, trend_chart

from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
ci_check = load_script("ci_check")


def row(name, ms, **changes):
    samples = [ms * (1 + 0.001 * (i % 5)) for i in range(30)]
    return {
        "operation": name,
        "problem": "8x8",
        "implementation": "oss_fused",
        "status": "ok",
        "message": "",
        "latency_ms": ms,
        "relative_std": 0.01,
        "stable": True,
        "samples_ms": samples,
        **changes,
    }


def results(*rows):
    return {"format": 1, "environment": {"timestamp": "t", "commit": "c"}, "rows": list(rows)}


BASE = results(row("a", 1.0), row("b", 2.0), row("c", 3.0), row("d", 4.0))


def test_compare_gives_every_row_a_verdict():
    now = results(
        row("a", 1.2), row("b", 1.5), row("c", 3.0), row("e", 1.0), row("d", 4.0, status="wrong")
    )
    verdicts = {r.name[0]: r.verdict for r in compare_results(BASE, now)}
    assert verdicts == {
        "a": RowVerdict.SLOWER,
        "b": RowVerdict.FASTER,
        "c": RowVerdict.OK,
        "d": RowVerdict.WRONG,
        "e": RowVerdict.NEW,
    }
    lost = compare_results(BASE, results(row("a", 1.0)))
    assert sum(r.verdict is RowVerdict.MISSING for r in lost) == 3


@pytest.fixture
def thresholds(tmp_path):
    found = Thresholds(tmp_path / "bars" / "t.json")
    assert found.adapt(BASE) == 4
    found.save()
    return found


def test_thresholds_catch_a_slowdown_and_only_that(thresholds):
    reread = Thresholds(thresholds.path)
    assert all(r.verdict is RowVerdict.OK for r in reread.check(BASE))
    lost = reread.check(results(*BASE["rows"][:3]))
    assert [r.verdict for r in lost].count(RowVerdict.MISSING) == 1
    slow = copy.deepcopy(BASE)
    slow["rows"][0]["latency_ms"] = 1.11
    slow["rows"][1]["latency_ms"] = 2.1
    verdicts = [r.verdict for r in reread.check(slow)]
    assert verdicts == [RowVerdict.SLOWER, RowVerdict.OK, RowVerdict.OK, RowVerdict.OK]


def test_a_time_that_is_no_number_is_no_pass_and_no_bar(thresholds, tmp_path):
    broken = results(row("a", float("nan")), *BASE["rows"][1:])
    verdicts = [r.verdict for r in thresholds.check(broken)]
    assert verdicts == [RowVerdict.SLOWER, RowVerdict.OK, RowVerdict.OK, RowVerdict.OK]
    fresh = Thresholds(tmp_path / "fresh.json")
    fresh.adapt(broken)
    assert "latency_ms" not in fresh.rows.get("a/8x8/oss_fused", {})


@pytest.mark.parametrize("bar", ['{"latency_ms": NaN}', '{"ratio": 0}', '{"error": Infinity}'])
def test_a_bar_that_nothing_can_fail_is_refused(tmp_path, bar):
    path = tmp_path / "bad.json"
    path.write_text(f'{{"format": 1, "rows": {{"a": {bar}}}}}')
    with pytest.raises(ValueError, match=r"bad\.json.*finite numbers and times above 0"):
        Thresholds(path)


def test_adapting_lowers_but_never_raises_a_bar(thresholds):
    now = results(row("a", 0.5), row("b", 9.0), row("c", 2.0, stable=False))
    assert thresholds.adapt(now) == 1
    bars = {name[0]: bar["latency_ms"] for name, bar in thresholds.rows.items()}
    assert bars == {"a": 0.5, "b": 2.0, "c": 3.0, "d": 4.0}


def test_a_noisy_row_gets_a_wider_allowance(tmp_path):
    bars = Thresholds(tmp_path / "t.json")
    bars.adapt(results(row("a", 1.0, relative_std=0.05), row("b", 1.0, relative_std=3.0)))
    assert [bar["allowed"] for bar in bars.rows.values()] == [0.2, 0.5]


def test_history_keeps_the_last_runs(tmp_path):
    path = tmp_path / "h.json"
    for i in range(HISTORY_RUNS + 3):
        runs = append_history(path, results(row("a", 1.0 + i)))
    assert len(runs) == HISTORY_RUNS
    assert runs[0]["latency_ms"]["a/8x8/oss_fused"] == 4.0
    assert trend_chart(runs).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "content",
    [
        *([], {"runs": []}, {"format": 1}, {"format": 1, "runs": [1]}),
        {"format": 1, "runs": [{"latency_ms": {"a": "fast"}}]},
    ],
)
def test_a_file_that_is_no_history_stays_as_it_is(tmp_path, content):
    path = tmp_path / "h.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"h\.json"):
        append_history(path, results(row("a", 1.0)))
    assert json.loads(path.read_text()) == content


def test_tables_put_failures_first():
    rows = compare_results(BASE, results(row("a", 1.0), row("b", 2.0), row("c", 3.9)))
    report = make_report(rows)
    _, count, table = report.text().split("\n\n")
    assert count == "2 of 4 rows fail"
    assert table.splitlines()[1].startswith(("SLOWER", "MISSING")) and "+30.0%" in table
    assert "| SLOWER | c/8x8/oss_fused |" in report.markdown()


@pytest.mark.parametrize("change", [{"operation": 1}, {"latency_ms": "fast"}, {"error": [1]}])
def test_a_row_of_other_types_is_refused(tmp_path, change):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(results(row("a", 1.0, **change))))
    with pytest.raises(ValueError, match=rf"bad\.json: a row .*{next(iter(change))}"):
        load_results(path)


@pytest.mark.parametrize("samples", [None, [], ["x"]])
def test_a_comparison_needs_samples(tmp_path, capsys, samples):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(BASE))
    new.write_text(json.dumps(results(row("a", 1.0, samples_ms=samples))))
    assert ci_check.main(["--baseline", str(old), "--results", str(new)]) == 2
    assert "a/8x8/oss_fused of the results lacks numbers as" in capsys.readouterr().err
    assert ci_check.main(["--baseline", str(new), "--results", str(old)]) == 2
    assert "a/8x8/oss_fused of the baseline lacks numbers as" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "rows": [{"operation": "x"}]}'])
def test_bad_files_are_named(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        load_results(path)
    path.write_text(text or '{"format": 1, "rows": {"a": 3}}')
    if text != '{"format": 1, "rows": [{"operation": "x"}]}':
        with pytest.raises(ValueError, match=r"bad\.json"):
            Thresholds(path)


def write(path, document):
    path.write_text(json.dumps(document))
    return str(path)


def test_command_exit_codes(tmp_path, capsys):
    good = write(tmp_path / "good.json", BASE)
    slow = write(tmp_path / "slow.json", results(row("a", 2.0), *BASE["rows"][1:]))
    bars = str(tmp_path / "bars.json")
    assert ci_check.main(["--thresholds", bars, "--results", good, "--adapt"]) == 0
    table = str(tmp_path / "new" / "t.md")
    args = ["--thresholds", bars, "--results", slow, "--markdown", table, "--adapt"]
    before = Path(bars).read_text()
    assert ci_check.main(args) == 1
    assert Path(bars).read_text() == before
    assert "1 of 4 rows fail" in capsys.readouterr().err and "SLOWER" in Path(table).read_text()
    assert ci_check.main(["--baseline", good, "--results", slow]) == 1
    assert ci_check.main(["--baseline", good, "--results", good]) == 0
    assert ci_check.main(["--baseline", good, "--results", str(tmp_path / "none.json")]) == 2
    with pytest.raises(SystemExit) as caught:
        ci_check.main(["--thresholds", str(tmp_path / "none.json"), "--results", good])
    assert caught.value.code == 2 and "none.json: no such file" in capsys.readouterr().err
    history, plot = str(tmp_path / "h.json"), tmp_path / "folder" / "p.png"
    args = ["--baseline", good, "--results", good, "--history", history, "--plot", str(plot)]
    assert ci_check.main(args) == 0 and plot.stat().st_size > 1000
    with pytest.raises(SystemExit) as caught:
        ci_check.main(["--baseline", good, "--plot", str(plot)])
    assert caught.value.code == 2


def test_this_commit_holds_the_committed_bars(tmp_path, capsys):
    """What CI runs: the reference path, right, complete, near its yardsticks."""
    bars = ROOT / "docs" / "results" / "cpu" / "thresholds.json"
    before = bars.read_text()
    history, plot = tmp_path / "history.json", tmp_path / "trend.png"
    args = ["--thresholds", str(bars), "--history", str(history), "--plot", str(plot)]
    assert ci_check.main(args) == 0, capsys.readouterr().err
    assert "0 of 5 rows fail" in capsys.readouterr().err
    assert plot.read_bytes().startswith(b"\x89PNG") and bars.read_text() == before


def test_a_loose_default_stays_loose(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"format": 1, "default": 9.0, "rows": {}}')
    bars = Thresholds(path)
    bars.adapt(results(row("a", 1.0)))
    assert bars.rows["a/8x8/oss_fused"]["allowed"] == 9.0


def paired(ratio, error=0.01):
    both = {"ratio": ratio, "relative_error": error, "latency_ms": None}
    return {**row("a", 1.0), **both}


def test_a_ratio_and_an_error_have_bars_that_only_fall(tmp_path):
    bars = Thresholds(tmp_path / "t.json")
    bars.default = 2.0
    alone = {**row("b", 1.0), "latency_ms": None, "error": 0.5}
    assert bars.adapt(results(paired(1.0), alone)) == 2
    bars.save()
    known = Thresholds(bars.path)

    def verdict(*rows):
        return [one.verdict for one in known.check(results(*rows))]

    ok = RowVerdict.OK
    assert verdict(paired(2.9, 0.0109), alone) == [ok, ok]
    assert verdict(paired(3.1), alone)[0] is RowVerdict.SLOWER
    for error in (0.012, float("nan"), None):
        assert verdict(paired(1.0, error), alone)[0] is RowVerdict.WRONG
    assert verdict(row("a", 1.0, relative_error=0.01), alone)[0] is RowVerdict.MISSING
    assert verdict(paired(1.0), {**alone, "error": 0.6})[1] is RowVerdict.WRONG
    assert known.adapt(results(paired(1.5, 0.02), {**alone, "error": 0.9})) == 0
    assert known.adapt(results(paired(0.5, 0.005), {**alone, "error": 0.1})) == 2
    lowered = {"ratio": 0.5, "allowed": 2.0, "error": pytest.approx(0.0055)}
    assert known.rows["a/8x8/oss_fused"] == lowered


def test_a_ratio_is_of_the_least_disturbed_times(monkeypatch):
    now = 0.0
    disturbances = iter([9.0, 0.0, 0.0, 5.0, 0.0, 7.0])

    def busy(seconds):
        nonlocal now
        now += seconds + next(disturbances)

    monkeypatch.setattr(paired_times.time, "perf_counter", lambda: now)
    assert paired_times.ratio(lambda: busy(3.0), lambda: busy(1.0), 3) == 3.0


def test_the_committed_bars_catch_less_than_a_tenfold_slowdown():
    committed = Thresholds(ROOT / "docs" / "results" / "cpu" / "thresholds.json")
    timed = [bar for bar in committed.rows.values() if "ratio" in bar]
    assert len(timed) == 3 and all(bar["allowed"] <= 5 for bar in timed)
    assert sum("error" in bar for bar in committed.rows.values()) == 3


@pytest.mark.parametrize("name", paired_times.PROBLEMS)
def test_yardsticks_do_the_same_work(name):
    function, _, small = paired_times.PROBLEMS[name]
    arguments = small.make()
    expected, found = paired_times.yardstick(name)(**arguments), function(**arguments)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()
