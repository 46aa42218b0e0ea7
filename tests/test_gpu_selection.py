# SPDX-License-Identifier: MIT
"""What `make test-gpu` selects."""

import subprocess
import sys
from pathlib import Path

_COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def collected(*arguments):
    """Names that pytest selects where PyTorch sees a GPU."""
    files = (
        "tests/kernels/test_mlp.py",
        "tests/kernels/test_gluon.py",
        "tests/test_architecture.py",
    )
    command = [sys.executable, "-c", _COLLECT, *files, *arguments]
    root = Path(__file__).parents[1]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return {line for line in ran.stdout.splitlines() if "::" in line}


def test_operators_and_marked_tests_are_those_of_a_gpu():
    every, of_gpu = collected(), collected("-m", "gpu")
    names = {name.partition("[")[0].partition("::")[2] for name in of_gpu}
    assert {"test_silu_of_every_magnitude", "test_act_mul_quant_edges"} <= names
    assert any("test_gluon.py" in name for name in of_gpu)
    assert {name for name in every - of_gpu if "test_architecture.py" in name}
    assert not {name for name in of_gpu if "test_architecture.py" in name}
