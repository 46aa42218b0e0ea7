# SPDX-License-Identifier: MIT
"""Values that a script cannot work with are refused before its work, by name."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_gpt_oss"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor.py --smoke", "--smoke: loads a model; expected MODEL"),
        ("doctor.py --self-check", "--self-check: loads a model; expected MODEL"),
        ("measure_communication.py --ranks 1 --output x.json", "--ranks 1: expected at least 2"),
        ("vllm_hooks.py --against list.json", "--against='list.json': expected a file of --output"),
        ("bench_kernels.py --from-json list.json --output o", "--from-json list.json: expected"),
        ("analyze_model.py {tiny} --suite empty.json", "--suite='empty.json': expected a suite"),
        ("bench_library.py --output o --device foo", "--device foo: expected cpu, cuda or cuda:N"),
        ("bench_library.py --output o --render", "--render: no file o/library-suite.json"),
        ("eval_attention_accuracy.py --clip-target -1", "--clip-target: -1.0: expected 0 to 1"),
        ("measure_resume.py {tiny} --output x --kills -1", "--kills: -1: expected at least 1"),
        ("compare_accuracy_performance.py --hourly 0", "--hourly: 0: expected at least 1"),
        ("demo.py --rounds 0", "--rounds 0: expected at least 1"),
        ("bench_streaming.py nowhere --output x.json", "model nowhere: no such folder"),
        ("soak.py nowhere --output x.json", "model nowhere: no such folder"),
        (
            "evaluate_logits.py --model {tiny} --arm a= --length 0 --output x.json",
            "--length 0: expected at least 1",
        ),
        (
            "evaluate_logits.py --model {tiny} --arm a= --output x --summary s --summary-name kl=b",
            "--summary-name kl=b: expected FIGURE=ARM",
        ),
    ],
)
def test_is_refused(command: str, message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    for name, content in {"list.json": [1], "empty.json": {}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    script, *arguments = command.format(tiny=TINY).split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
