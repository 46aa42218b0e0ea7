# SPDX-License-Identifier: MIT
"""The command line of scripts/bench_moe.py, without a GPU."""

from __future__ import annotations

import pytest

from tests.loading import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("bench_moe")


@pytest.mark.parametrize("option", [["--layers", "0"], ["--batches", "0"], ["--experts", "-1"]])
def test_bad_input_exits_with_two(script, capsys, tmp_path, option):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--output", str(tmp_path), *option])
    assert stopped.value.code == 2
    assert "expected >= 1" in capsys.readouterr().err


def test_vllm_without_cuda_is_left_out(script, capsys):
    assert script.vllm_baselines([object()]) == {}
    assert "without triton_kernels" in capsys.readouterr().err
