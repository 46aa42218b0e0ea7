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

FILES = {
    "list.json": [1],
    "empty.json": {},
    "runs.json": {"runs": [1]},
    "texts.json": {"texts": [1]},
    "curves.json": {"curves": [1]},
    "roof.json": {"ceilings": {"device": "d", "bandwidth_gbps": "x", "tflops": {"bfloat16": 1}}},
    "rows.json": {
        "ceilings": {"device": "d", "bandwidth_gbps": 1.0, "tflops": {"bfloat16": 1.0}},
        "rows": [1],
    },
    "key.yaml": "1: 2",
    "ok.json": {"rows": [{"name": "a", "status": "ok"}]},
    "untimed.json": {"rows": [{"name": "a", "status": "ok", "latency_ms": 0}]},
    "bare/results.json": {"measurements": []},
    "unmade/results.json": {
        "measurements": [],
        "arms": {},
        "settings": {"together": False, "rounds": 1, "repeats": 1},
    },
    "broken/config.json": "no JSON",
    "sizes/config.json": {"model_type": "llama", "hidden_size": "wide"},
}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor.py --smoke", "--smoke: loads a model; expected MODEL"),
        ("doctor.py --self-check", "--self-check: loads a model; expected MODEL"),
        ("measure_communication.py --ranks 1 --output x.json", "--ranks 1: expected at least 2"),
        (
            "measure_communication.py --ranks 2 4 --bytes 24 --output x.json",
            "--bytes 24: expected a multiple of 16, 4 ranks'",
        ),
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
        (
            "bench_streaming.py {tiny} --lengths 8:4@2 --output x.json",
            "--lengths: expected IN:OUT; all --requests come at once",
        ),
        (
            "bench_streaming.py {tiny} --startup-timeout nan --output x.json",
            "--startup-timeout: nan: expected a number above 0",
        ),
        ("bench_monitor.py {tiny} --tokens 961 --output x", "--tokens 961: expected at most 960"),
        (
            "bench_monitor.py {tiny} --tokens 20 --output x",
            "--every 50: expected at most --tokens, 20",
        ),
        (
            "bench_scheduler.py --contexts 131072 --output x",
            "--contexts 131072 --steps 96: expected sequences of at most 131072 positions",
        ),
        (
            "bench_scheduler.py --steps 70000 --output x",
            "--steps 70000: expected sequences of at most 131072 positions, 65536 of them decoded",
        ),
        ("soak.py nowhere --output x.json", "model nowhere: no such folder"),
        ("analyze_model.py {tiny} --suite roof.json", "--suite='roof.json': expected a suite"),
        ("analyze_model.py {tiny} --suite rows.json", "--suite='rows.json': expected a suite"),
        ("analyze_model.py {tiny} --accuracy texts.json", "--accuracy='texts.json': expected a"),
        ("analyze_model.py {tiny} --accuracy list.json", "--accuracy='list.json': expected a"),
        (
            "analyze_model.py {tiny} --history runs.json",
            "--history='runs.json': expected a",
        ),
        (
            "analyze_model.py {tiny} --history list.json",
            "--history='list.json': expected a",
        ),
        ("analyze_model.py broken", "MODEL='broken': expected a config.json"),
        ("analyze_model.py sizes", "MODEL='sizes': expected a config.json"),
        ("ci_check.py --thresholds list.json --history runs.json", "runs.json: not a history file"),
        (
            "calibrate.py {tiny} --output o --trend runs.json",
            "--trend: runs.json: is no trend",
        ),
        ("calibrate.py {tiny} --output o --device cpu:x", "--device='cpu:x': expected 'cpu'"),
        ("calibrate.py {tiny} --output o --recipe key.yaml", "1=1: Keys should be strings"),
        ("generate_fp8_report.py curves.json", "ACCURACY='curves.json': expected a result of"),
        ("generate_fp8_report.py empty.json", "ACCURACY='empty.json': expected a result of"),
        (
            "make_model.py --output o --seed 18446744073709551616",
            "--seed: 1844674407",
        ),
        ("make_model.py --output {long}", "--output: 'xxxxx"),
        ("calibrate.py {long} --output o", "MODEL: 'xxxxx"),
        ("calibrate.py {tiny} --output {long}", "--output: 'xxxxx"),
        ("calibrate.py {tiny} --output o --adapter {long}", "--adapter: 'xxxxx"),
        ("compare.py --render bare", "--render='bare/results.json': expected a results.json"),
        ("compare.py --render unmade", "--render='unmade/results.json': expected a results.json"),
        (
            "compare_accuracy_performance.py --output o --baseline ok.json",
            "--baseline ok.json: expected an accuracy_performance.json (KeyError('latency_ms'))",
        ),
        (
            "compare_accuracy_performance.py --output o --baseline untimed.json",
            "--baseline untimed.json: expected an accuracy_performance.json",
        ),
        (
            "generate_fp8_report.py curves.json --thresholds none.json",
            "--thresholds none.json: no such file",
        ),
        (
            "eval_attention_accuracy.py --fp8 --thresholds none.json",
            "--thresholds none.json: no such file; --write-adaptive-thresholds makes it",
        ),
        ("make_model.py --output o --device meta", "device='meta': expected 'cpu'"),
        ("make_model.py --draft peagle --output o --device meta", "device='meta': expected 'cpu'"),
        (
            "train_tiny_gpt_oss.py --output o --seed 18446744073709551616",
            "--seed: 1844674407",
        ),
        ("tune.py --list --cache list.json", "--cache: list.json: not a tuning cache"),
        ("tune.py --differences a b --cache list.json", "--cache: list.json: not a tuning cache"),
        ("tune.py --list --cache sizes", "--cache: sizes: not a tuning cache"),
        (
            "tune.py simulate --device low_bw --sizes 64x64x64 --cache list.json",
            "--cache: list.json: not a tuning cache",
        ),
        (
            "tune.py simulate --device low_bw --sizes 64x64x64 --cache sizes",
            "--cache: 'sizes': is a folder",
        ),
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
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    script, *arguments = command.format(tiny=TINY, long="x" * 300).split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert files(tmp_path) == before


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
