# SPDX-License-Identifier: MIT
"""The container's entry point, run as the container runs it (no Docker daemon needed)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from harness import processes
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.conftest import ROOT
from tests.deploy.hostile import make, make_bases


@pytest.mark.parametrize(
    "flags", [["--shutdown-timeout", "3"], ["--shutdown_timeout=3"], ["--config", "CONFIG"]]
)
def test_what_the_user_says_stays(entrypoint, tmp_path, flags) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("shutdown_timeout: 3\nport: 9\napi-key: [k]\n")
    flags = [flag.replace("CONFIG", str(config)) for flag in flags]
    if "--config" not in flags:
        os.environ["AUTH"] = "off"
    entrypoint.main(["m", *flags, "--host", "::1"])
    (command,) = entrypoint.started
    assert str(entrypoint.shutdown_seconds()) not in command
    assert command.count("--host") == 1 and ("--port" in command) == ("--config" not in flags)


def test_stop_ends_the_pre_flight(image, tmp_path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(image / "entrypoint.py", tmp_path)
    child = tmp_path / "pid"
    (tmp_path / "scripts/doctor.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(child)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"AUTH": "off", "SERVER_FILE": str(tmp_path / "server.json")}
    command = [sys.executable, str(tmp_path / "entrypoint.py"), "m"]
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 30
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        # 128 + SIGTERM: its own answer, since process 1 has no default one
        assert process.wait(timeout=10) == 143
    assert not processes.is_alive(int(child.read_text()))


def test_arguments_of_the_pre_flight(entrypoint) -> None:
    flags = ["--quantization=oss_fp8", "--max_model_len", "64", "--seed", "1", "-tp", "2"]
    assert entrypoint.doctor_flags(flags) == [
        "--quantization",
        "oss_fp8",
        "--tensor-parallel-size",
        "2",
        "--max-model-len",
        "64",
    ]
    assert entrypoint.doctor_flags(["--quantization", "fp8", "--max-model-len", "32k"]) == []
    assert entrypoint.main(["--seed"]) == 2
    # a short flag ends the values of the flag before it
    flags = ["--max-model-len", "8192", "-pp", "2", "-tp", "2", "-ep", "--seed", "-1"]
    assert entrypoint.doctor_flags(flags) == [
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "2",
        "--max-model-len",
        "8192",
    ]
    assert entrypoint.flags_of(flags)["--seed"] == ["-1"]


def test_every_short_flag_of_vllm_is_seen(entrypoint) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    # those that the entry point reads have their long names
    read = {*entrypoint.SHARED_FLAGS, "--api-server-count", "--data-parallel-size"}
    for action in parser._actions:
        long = next((flag for flag in action.option_strings if flag in read), None)
        for flag in action.option_strings:
            if not flag.startswith("--"):
                assert entrypoint.flags_of(["--api-key", "k", flag])["--api-key"] == ["k"], flag
                assert long is None or entrypoint.ALIASES[flag] == long


def test_flags_of_a_file_that_are_off(entrypoint, tmp_path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("trust-remote-code: false\nquantization: oss_fp8\n")
    flags = ["--config", str(config)]
    assert entrypoint.doctor_flags(flags) == ["--quantization", "oss_fp8"]
    config.write_text("trust_remote_code: true\n")
    assert entrypoint.doctor_flags(flags) == ["--trust-remote-code"]


@pytest.mark.serve
def test_bad_checkpoint_keeps_the_container_from_serving(image, tmp_path) -> None:
    folder = make("scale_zero", make_bases(tmp_path), tmp_path)
    done = subprocess.run(
        [sys.executable, str(image / "entrypoint.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTH": "off", "SERVER_FILE": f"{tmp_path}/s"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "not fit: checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
