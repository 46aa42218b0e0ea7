# SPDX-License-Identifier: MIT
"""scripts/bench_layers.py without a GPU: its command line, and its processes in turn."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.loading import load_script

PATH = Path(__file__).resolve().parents[2] / "scripts" / "bench_layers.py"
# stands for a worker: the package that it imports says how long its layers take
WORKER = """
import sys
from oss_fused import scale
for turn, line in enumerate(sys.stdin):
    print(999.0 if turn == 0 else scale + turn / 10, flush=True)
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PATH.parent))
    return load_script("bench_layers")


def test_checkouts_take_turns(script, tmp_path, monkeypatch, capsys):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(script, "__file__", str(worker))
    monkeypatch.setattr(sys, "argv", ["bench_layers.py"])
    arguments = script.build_parser().parse_args(["--tokens", "8", "--turns", "3"])
    roots = {"here": tmp_path / "fast", "against": tmp_path / "slow"}
    for root, scale in zip(roots.values(), (10.0, 20.0), strict=True):
        (root / "oss_fused").mkdir(parents=True)
        (root / "oss_fused" / "__init__.py").write_text(f"scale = {scale}")
    # as where the package is installed
    monkeypatch.setenv("PYTHONPATH", str(PATH.parents[1]))
    kept = []
    (row,) = script.measure(arguments, roots, lambda rows: kept.append(list(rows)))
    assert kept == [[row]]
    # the first turn, which compiles, does not count
    assert row["here"] == {"us": 10.2, "min": 10.1, "max": 10.3}
    assert row["against"]["us"] == 20.2
    assert "1.980x" in capsys.readouterr().out


def test_another_package_than_the_checkout_is_refused(script, tmp_path):
    """Both processes would time the same one."""
    arguments = script.build_parser().parse_args(["--worker", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"expected {tmp_path}"):
        script.work(arguments)


def test_models_are_those_that_have_a_shape(script):
    """The command line is read without PyTorch, and so names them itself."""
    from harness.layers import SHAPES

    assert set(script.MODELS) == set(SHAPES)


def test_a_process_that_ends_is_named(script):
    worker = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit(3)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(RuntimeError, match="ended with 3"):
        script.ask(worker, 1)


def test_a_folder_without_the_package_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.build_parser().parse_args(["--against", str(tmp_path)])
    assert "expected a folder that holds oss_fused" in capsys.readouterr().err


def test_rows_before_a_failure_are_written(script, tmp_path, monkeypatch):
    def ask(worker, tokens):
        if tokens == 8:
            raise RuntimeError("gone")
        return 5.0

    worker = SimpleNamespace(kill=lambda: None, wait=lambda: None)
    monkeypatch.setattr(script, "_start", lambda root: worker)
    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    output = tmp_path / "o.json"
    options = ["--tokens", "1", "8", "--turns", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench_layers.py", *options])
    monkeypatch.setattr("oss_fused.environment.fingerprint", dict)
    assert script.main() == 1
    written = json.loads(output.read_text())
    assert [row["tokens"] for row in written["rows"]] == [1]
    assert written["settings"]["turns"] == 1 and written["settings"]["layers"] == 4
