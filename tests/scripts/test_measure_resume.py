# SPDX-License-Identifier: MIT
"""Trials of killing and resuming, with a stand-in for calibrate.py that starts in no time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.loading import load_script
from tests.quant.conftest import make_model

# ten steps, each noted, and a folder that appears at the end
STAND_IN = """
import sys, time
from pathlib import Path
output = Path(sys.argv[sys.argv.index("--output") + 1])
partial = output.with_name(f"{output.name}.partial-x")
journal = partial / "state" / "journal.jsonl"
journal.parent.mkdir(parents=True, exist_ok=True)
done = journal.read_text().count("\\n") if journal.exists() else 0
for step in range(done, 10):
    time.sleep(0.03)
    journal.open("a").write("step\\n")
(partial / "result").write_text("RESUMED" if done else "result")
journal.unlink()
journal.parent.rmdir()
partial.rename(output)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_resume")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(("resumed", "code"), [("result", 0), ("another", 1)])
def test_outputs_of_killed_runs_are_compared(
    script, model, tmp_path, monkeypatch, resumed, code
) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.replace("RESUMED", resumed))
    monkeypatch.setattr(script, "CALIBRATE", stand_in)
    (tmp_path / "work").mkdir()
    words = ["--output", str(tmp_path / "x.json"), "--work", str(tmp_path / "work"), "--kills", "3"]
    assert script.main([str(model), *words, "--apart", "4", "--", "--seed", "3"]) == code
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["flags"] == ["--seed", "3"]
    assert found["identical"] is (code == 0) and list(found["files"]) == ["result"]
    assert len(found["trials"]) == 5 and found["kills"] >= 2
    steps = [kill["steps_done"] for trial in found["trials"] for kill in trial["kills"]]
    assert max(steps) > 0 and all(trial["left"] == [] for trial in found["trials"])
    assert 0 < found["peak_anonymous_gib"] <= found["peak_resident_gib"]
    parameters = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert found["largest_layer_gib"] * 2**30 == 4 * parameters
    assert list((tmp_path / "work").iterdir()) == []


def test_a_failure_and_bad_input_are_told(script, model, tmp_path, monkeypatch, capsys) -> None:
    words = ["--output", str(tmp_path / "x.json")]
    assert script.main([str(tmp_path / "none"), *words]) == 2
    assert "no such folder" in capsys.readouterr().err
    monkeypatch.setattr(script, "CALIBRATE", tmp_path / "absent.py")
    assert script.main([str(model), *words]) == 1
    assert "calibrate.py failed" in capsys.readouterr().err
