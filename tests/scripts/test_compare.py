# SPDX-License-Identifier: MIT
"""scripts/compare.py: bad arguments, failures, results; one round trip through the real vLLM."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import compare
from harness.model_factory import get_shape, make_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compare.py"
DOUBLES = ROOT / "tests" / "harness"

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the script with doubles of server and client; returns its exit code."""
    original = compare.Comparison.__init__

    def with_doubles(self: compare.Comparison, **options: object) -> None:
        original(self, **options)
        self.serve_command = (sys.executable, str(DOUBLES / "fake_server.py"), "serve")
        self.client_command = (sys.executable, str(DOUBLES / "fake_client.py"))

    monkeypatch.setattr(compare.Comparison, "__init__", with_doubles)
    (tmp_path / "m").mkdir(exist_ok=True)

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return int(stopped.value.code or 0)

    return main


def arms(tmp_path: Path, second: str = "fast={m}") -> list[str]:
    model = str(tmp_path / "m")
    return ["--arm", f"slow={model}", "--arm", second.format(m=model)]


def test_compares_and_merges_the_summary(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, totals = tmp_path / "out", tmp_path / "summary.json"
    options = ["--concurrency", "1", "2", "--num-prompts", "2", "--rounds", "1"]
    merge = ["--summary", str(totals), "--summary-prefix", "main_job.x"]
    assert run(*arms(tmp_path), *options, *merge, "--output", str(output)) == 0
    results = json.loads((output / "results.json").read_text())
    assert results["settings"]["concurrency"] == [1, 2]
    assert len(results["measurements"]) == 4
    assert (output / "time-per-output-token.png").stat().st_size > 10_000
    assert "**2.00x** for 1 x 128:128" in (output / "report.md").read_text()
    assert "<table>" in (output / "report.html").read_text()
    assert json.loads(totals.read_text())["main_job.x.ratio_c2"] == 2.0
    assert "main_job.x.ratio_c1 = 2.0" in capsys.readouterr().err
    # again from the saved results, on another machine
    totals.unlink()
    (output / "report.md").unlink()
    assert run("--render", str(output), *merge) == 0
    assert "main_job.x.ratio_c1" in json.loads(totals.read_text())
    assert (output / "report.md").is_file()
    # further names, and what the host adds to the kernels' time
    kernels = {"decode.x.kernel_ms_b1": 5.0}
    totals.write_text(json.dumps(kernels))
    more = ["--summary-alias", "main_job.x.best=main_job.x.ratio_c2"]
    more += ["--kernel-ms", "decode.x.kernel_ms_b1"]
    assert run("--render", str(output), *merge, *more) == 0
    named, tpot = json.loads(totals.read_text()), results["cells"][0]["arms"]["fast"]["figures"]
    assert named["main_job.x.best"] == 2.0
    assert named["served.host_overhead_c1"] == round(tpot["p50_tpot_ms"] / 5.0, 4)
    assert run("--render", str(output), *merge, "--summary-alias", "a=b") == 1
    assert "--summary-alias a=b: expected one of main_job.x.tpot" in capsys.readouterr().err
    assert run("--render", str(output), *merge, "--kernel-ms", "no") == 1
    assert "--kernel-ms: expected that name in --summary" in capsys.readouterr().err
    # answers that were streamed beside
    kinds = {"whole": 20.0, "streamed": 19.0}
    results["streaming"] = {"fast": {"runs": [], "tokens_per_s": kinds, "ratio": 0.95}}
    results["settings"]["streamed"] = 200
    (output / "results.json").write_text(json.dumps(results))
    assert run("--render", str(output), *merge) == 0
    assert json.loads(totals.read_text())["main_job.x.streamed_ratio_c200"] == 0.95
    report = (output / "report.md").read_text()
    assert "Streamed and whole answers" in report and "| fast | 20 | 19 | 0.950 |" in report
    # an existing folder is kept unless asked otherwise
    assert run(*arms(tmp_path), *options, "--output", str(output)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(*arms(tmp_path), *options, "--output", str(output), "--overwrite") == 0


def test_answers_of_one_token_have_no_time_per_token(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--concurrency", "1", "--num-prompts", "2", "--rounds", "1", "--lengths", "8:1"]
    assert run(*arms(tmp_path), *options, "--output", str(output)) == 0
    report = (output / "report.md").read_text()
    assert "fast, time per output token: no ratio for 1 x 8:1" in report
    assert "fast, time to first token: **2.00x** for 1 x 8:1" in report
    # a saved comparison knows its arms
    merge = ["--summary", str(tmp_path / "s.json"), "--summary-prefix", "x"]
    assert run("--render", str(output), *merge, "--summary-arm", "slow") == 2
    assert "--summary-arm slow: expected one of fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "o"], "--arm and --output are required"),
        (["--arm", "a=/nowhere/m", "--output", "o"], "/nowhere/m: no such folder"),
        (["--arm", "a=tests/typo", "--output", "o"], "tests/typo: no such folder"),
        (["--arm", "nonsense", "--output", "o"], "expected NAME=MODEL"),
        (["--arm", "a=x/y", "--arm", "a=x/y", "--output", "o"], "names must differ"),
        (["--arm", "a=x/y", "--output", "o", "--lengths", "12"], "expected INPUT:OUTPUT"),
        (["--arm", "a=x/y", "--output", "o", "--concurrency", "0"], "expected at least 1"),
        (["--arm", "a=x/y", "--output", "o", "--port", "99999"], "expected 1 to"),
        (["--arm", "a=x/y", "--output", "o", "--summary", "s"], "needs --summary-prefix"),
        (["--arm", "a=x/y", "--output", "o", "--quality", "/nowhere"], "No such file"),
        (["--arm", "a=x/y", "--output", "o", "--quality", __file__], "cannot be read as JSON"),
        (
            ["--arm", "a=x/y", "--output", "o", "--concurrency", "1", "1"],
            "expected each value once",
        ),
        (["--arm", "a=x/y", "--output", "/proc/x/o"], "cannot be written"),
        (["--arm", "a=x/y", "--output", "/proc"], "exists; choose another"),
        (["--arm", "a=x/y", "--output", "/proc", "--overwrite"], "is no earlier comparison"),
        (["--render", "/nowhere"], "cannot be read as JSON"),
        (
            ["--arm", "a=x/y", "--output", "o", "--lengths", "8:4", "8:4@8x9"],
            "lengths: give c8 8:4 twice; expected each load once",
        ),
        (
            ["--arm", "a=x/y", "--output", "o", "--summary-alias", "new"],
            "--summary-alias new: expected NEW=NAME",
        ),
        (["--arm", "a=x/y", "--output", "o", "--kernel-ms", "k"], "need --summary"),
        (
            ["--arm", "a=x/y", "--arm", "b=x/y", "--output", "o", "--streamed", "9"],
            "No such file or directory: 'x/y/config.json'",
        ),
    ],
)
def test_bad_arguments(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_taken_port(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = run(*arms(tmp_path), "--port", str(port), "--output", str(tmp_path / "out"))
    assert code == 1
    assert f"port {port}: cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("mode", "cells"), [("dies_under_load", [1]), ("dies_at_start", [])])
def test_what_was_measured_before_a_server_died_is_kept(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, cells: list[int]
) -> None:
    loads = ["--concurrency", "1", "2", "--num-prompts", "2", "--rounds", "1"]
    second = f"fast=FAKE_MODE={mode} {{m}}"
    assert run(*arms(tmp_path, second), *loads, "--output", str(tmp_path / "out")) == 1
    message = capsys.readouterr().err
    # the load or the watch over the servers may be the first to see it
    assert re.search(r"stopped early by \w+Error: .*fast", message), message
    assert {path.name for path in tmp_path.iterdir()} == {"m", "out.incomplete"}
    results = json.loads((tmp_path / "out.incomplete" / "results.json").read_text())
    measured = [(row["arm"], row["concurrency"]) for row in results["measurements"]]
    assert measured == [("slow", 1), ("slow", 2), *(("fast", c) for c in cells)]
    assert [cell["concurrency"] for cell in results["cells"]] == cells
    report = (tmp_path / "out.incomplete" / "report.md").read_text()
    assert re.search(r"Stopped early: \w+Error: .*fast", report), report
    assert "| 2 x 128:128 | slow |" in report
    assert (tmp_path / "out.incomplete" / "throughput.png").exists() == bool(cells)


def test_results_that_no_disk_takes_are_printed_and_the_last_copy_stays(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out"
    loads = ["--concurrency", "1", "--num-prompts", "2", "--rounds", "1"]
    assert run(*arms(tmp_path), *loads, "--output", str(output)) == 0
    before = (output / "results.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("harness.compare_report.write_folder", full)
        assert run(*arms(tmp_path), *loads, "--output", str(output), "--overwrite") == 1
    said = capsys.readouterr()
    assert "No space left" in said.err
    copy = json.loads((tmp_path / "out.unfinished.json").read_text())
    assert len(copy["measurements"]) == 2 == len(json.loads(said.out)["measurements"])
    assert (output / "results.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"m", "out", "out.unfinished.json"}
    # a later run leaves that copy alone
    assert run(*arms(tmp_path), *loads, "--output", str(output), "--overwrite") == 0
    assert json.loads((tmp_path / "out.unfinished.json").read_text()) == copy


def test_overwriting_through_a_link_replaces_what_it_leads_to(run: Run, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    loads = ["--concurrency", "1", "--num-prompts", "2", "--rounds", "1"]
    assert run(*arms(tmp_path), *loads, "--output", str(link)) == 0
    first = (tmp_path / "real" / "results.json").stat().st_ino
    assert run(*arms(tmp_path), *loads, "--output", str(link), "--overwrite") == 0
    assert link.is_symlink() and (tmp_path / "real" / "results.json").stat().st_ino != first
    assert {path.name for path in tmp_path.iterdir()} == {"m", "link", "real"}


def test_a_folder_with_other_files_is_not_overwritten(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "results.json").write_text('{"kind": "oss_fused.compare"}')
    (output / "thesis.tex").touch()
    assert run(*arms(tmp_path), "--output", str(output), "--overwrite") == 2
    assert "is no earlier comparison" in capsys.readouterr().err
    assert (output / "thesis.tex").exists()


@pytest.mark.parametrize(("after", "kept"), [(5, 2), (1, 0), (0, None)])
def test_a_signal_keeps_what_was_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, kept: int | None
) -> None:
    calls = []
    original = compare.LoadClient.run

    def stopped(self: compare.LoadClient, *args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(compare.LoadClient, "run", stopped)
    loads = ["--concurrency", "1", "2", "4", "--num-prompts", "2", "--together"]
    assert run(*arms(tmp_path), *loads, "--output", str(tmp_path / "out")) == 130
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished.json").exists()
    folder = tmp_path / "out.incomplete"
    assert folder.exists() == (kept is not None)
    if kept is not None:
        results = json.loads((folder / "results.json").read_text())
        assert [cell["concurrency"] for cell in results["cells"]] == [1, 2][:kept]
        assert len(results["measurements"]) == after
        assert "Stopped early: KeyboardInterrupt" in (folder / "report.md").read_text()


@pytest.mark.skipif(
    "OSS_FUSED_LONG_TESTS" not in os.environ,
    reason="minutes, which CI's twenty lack; OSS_FUSED_LONG_TESTS=1 runs it, as make demo does",
)
@pytest.mark.serve
def test_real_round_trip_on_a_tiny_gpt_oss(tmp_path: Path) -> None:
    make_model(tmp_path / "m", get_shape("gpt-oss", "tiny"))
    # what would be compiled is no part of the trip, and takes minutes
    model = f"TORCHDYNAMO_DISABLE=1 {tmp_path / 'm'} --enforce-eager"
    command = [sys.executable, str(SCRIPT), "--arm", f"baseline={model}"]
    command += ["--arm", f"oss_fp8={model} --quantization oss_fp8", "--together"]
    command += ["--concurrency", "2", "--lengths", "24:8", "--num-prompts", "4", "--rounds", "1"]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    for run_ in results["measurements"]:
        assert run_["figures"]["completed"] == 4
        assert run_["figures"]["total_output_tokens"] == 4 * 8
        assert run_["figures"]["p99_ttft_ms"] > 0
    assert set(results["arms"]) == {"baseline", "oss_fp8"}
    assert all(arm["memory"]["kv_cache_tokens"] > 0 for arm in results["arms"].values())
