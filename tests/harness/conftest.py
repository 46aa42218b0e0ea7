# SPDX-License-Identifier: MIT
"""Doubles of `vllm serve` and of the load client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.arms import Arm
from harness.compare import Comparison
from harness.grid import Lengths, make_grid

HERE = Path(__file__).parent
FAKE_SERVE = (sys.executable, str(HERE / "fake_server.py"), "serve")
FAKE_CLIENT = (sys.executable, str(HERE / "fake_client.py"))


@pytest.fixture
def fake_plan() -> Callable[..., Comparison]:
    def make(**changes: object) -> Comparison:
        options = {
            "arms": [Arm("slow", "/models/m"), Arm("fast", "/models/m", ("--quantization", "q"))],
            "grid": make_grid([Lengths(8, 4)], [1, 2], [2]),
            "rounds": 2,
            "serve_command": FAKE_SERVE,
            "client_command": FAKE_CLIENT,
            "startup_timeout": 60.0,
            "say": lambda text: None,
        }
        return Comparison(**{**options, **changes})

    return make
