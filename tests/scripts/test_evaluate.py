# SPDX-License-Identifier: MIT
"""scripts/evaluate.py: arguments, files it writes; one run through the real vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from harness import evaluate
from harness.model_factory import get_shape, make_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "evaluate.py"
TEXT = ROOT / "tests" / "data" / "prose.txt"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    worker = (sys.executable, str(ROOT / "tests" / "harness" / "fake_worker.py"))
    original = evaluate.Scorer.__init__

    def with_double(self: evaluate.Scorer, *values: object) -> None:
        original(self, *values)
        self.worker = self.task_worker = worker

    with monkeypatch.context() as patch:
        patch.setattr(evaluate.Scorer, "__init__", with_double)
        patch.setattr(sys, "argv", ["evaluate.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(stopped.value.code or 0)


def test_writes_json_table_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "worse"):
        (tmp_path / name).mkdir()
    other = tmp_path / "b.txt"
    other.write_text("words")
    output, totals = tmp_path / "r" / "q.json", tmp_path / "summary.json"
    code = run(
        monkeypatch,
        *("--baseline", str(tmp_path / "good"), "--candidate", str(tmp_path / "worse")),
        *("--candidate", f"again=X=1 {tmp_path / 'good'} --kv-cache-dtype fp8"),
        *("--text", str(TEXT), str(other), "--output", str(output)),
        *("--summary", str(totals), "--summary-name", "main_job.smollm2.ppl_factor", "again"),
    )
    assert code == 0
    results = json.loads(output.read_text())
    assert [model["name"] for model in results["models"]] == ["good", "worse", "again"]
    assert results["models"][2]["flags"] == ["--kv-cache-dtype", "fp8"]
    assert results["environment"]["versions"]["torch"] and "unfinished" not in results
    figures = json.loads(totals.read_text())
    assert figures["again"] == 1.0
    assert figures["main_job.smollm2.ppl_factor"] == pytest.approx(1.10517)
    shown = capsys.readouterr().err
    assert re.search(r"prose.txt +worse +2.210 +1.1052", shown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--text": "/nowhere.txt"}, "/nowhere.txt: cannot be read"),
        ({"--text": sys.executable}, "cannot be read as UTF-8"),
        ({"--text": "/dev/null"}, "--text /dev/null: is empty"),
        ({"--summary": "s.json", "--summary-name": "a b"}, "--summary-name a b: expected 1"),
        ({"--baseline": "/nowhere"}, "model /nowhere: no such folder"),
        ({"--candidate": "--flag"}, "names no model"),
        ({"--window": "1"}, "--window 1: expected at least 2"),
        ({"--output": "/"}, "is a folder"),
        ({"--summary": "s.json"}, "needs --summary-name"),
        ({"--lm-eval": "/nowhere.yaml"}, "/nowhere.yaml: no such file"),
    ],
)
def test_bad_arguments(
    changes: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"--baseline": str(tmp_path), "--candidate": f"b={tmp_path}"}
    options |= {"--text": str(TEXT), "--output": str(tmp_path / "q.json"), **changes}
    words = [f"{flag}={value}" for flag, value in options.items() if flag != "--summary-name"]
    words += ["--summary-name", *names.split()] if (names := options.get("--summary-name")) else []
    assert run(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_lm_eval_tasks_run_on_every_model_or_say_what_is_missing(
    installed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("good", "worse"):
        (tmp_path / name).mkdir()
    task = tmp_path / "arithmetic.yaml"
    task.write_text("task: arithmetic\n")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if installed else None) if name == "lm_eval" else find_spec(name),
    )
    output = tmp_path / "q.json"
    code = run(
        monkeypatch,
        *("--baseline", str(tmp_path / "good"), "--candidate", str(tmp_path / "worse")),
        *("--text", str(TEXT), "--output", str(output)),
        *("--lm-eval", str(task), "--lm-eval-limit", "7"),
    )
    shown = capsys.readouterr().err
    if not installed:
        assert code == 2
        assert "pip install lm-eval" in shown
        return
    assert code == 0
    rows = json.loads(output.read_text())["lm_eval"]
    assert rows[1] == {"name": "worse", "tasks": {"arithmetic": {"acc": 0.5, "limit": 7}}}
    assert re.search(r"worse +arithmetic +acc +0.5000", shown)


def test_failing_model_ends_with_1_and_loses_none_that_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "worse", "broken"):
        (tmp_path / name).mkdir()
    output, totals = tmp_path / "q.json", tmp_path / "summary.json"
    words = ["--baseline", str(tmp_path / "good"), "--text", str(TEXT), "--output", str(output)]
    for name in ("worse", "broken", "again"):
        words += ["--candidate", f"{name}={tmp_path / name.replace('again', 'good')}"]
    words += ["--summary", str(totals), "--summary-name", "a", "b", "c"]
    assert run(monkeypatch, *words) == 1
    assert "weights are upside down" in capsys.readouterr().err
    # demo.py takes the output for the sign of a finished step
    assert not output.exists() and not totals.exists()
    results = json.loads((tmp_path / "q.unfinished.json").read_text())
    assert results["unfinished"] == ["broken", "again"]
    assert [model["name"] for model in results["models"]] == ["good", "worse"]
    (candidate,) = results["texts"][0]["candidates"]
    assert candidate["name"] == "worse" and candidate["perplexity_factor"] > 1.1
    words[words.index(f"broken={tmp_path / 'broken'}")] = f"broken={tmp_path / 'worse'}"
    assert run(monkeypatch, *words) == 0
    assert output.exists() and totals.exists()
    assert not (tmp_path / "q.unfinished.json").exists()


@pytest.mark.skipif(
    "OSS_FUSED_LONG_TESTS" not in os.environ,
    reason="minutes, which CI's twenty lack; OSS_FUSED_LONG_TESTS=1 runs it, as make demo does",
)
@pytest.mark.serve
def test_real_run_on_a_tiny_llama(tmp_path: Path) -> None:
    make_model(tmp_path / "m", get_shape("llama", "tiny"))
    # what would be compiled is no part of the run, and takes most of its time
    model = f"TORCHDYNAMO_DISABLE=1 {tmp_path / 'm'} --enforce-eager"
    command = [sys.executable, str(SCRIPT), "--baseline", model]
    command += ["--candidate", f"fp8={model} --quantization oss_fp8"]
    command += ["--text", str(TEXT), "--max-tokens", "200", "--window", "64"]
    command += ["--output", str(tmp_path / "q.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (text,) = json.loads((tmp_path / "q.json").read_text())["texts"]
    (candidate,) = text["candidates"]
    assert text["tokens"] == 200 - 4  # the first token of each window is not predicted
    # random weights predict nothing, but FP8 must stay close to them
    assert text["baseline"]["perplexity"] > 100
    assert 0 < candidate["kl_divergence"] < 0.05
    assert candidate["top1_agreement"] > 0.6
