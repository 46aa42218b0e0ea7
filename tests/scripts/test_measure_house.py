# SPDX-License-Identifier: MIT
"""scripts/measure_house.py: what counts as reached, and as a long function."""

from __future__ import annotations

import json
from pathlib import Path

import measure_house
import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "oss_fused/__init__.py": '_LAZY = {"lazy": "oss_fused.lazy"}\n',
        "oss_fused/lazy.py": 'declare("beside")\nCLASS = "oss_fused.named.Class"\n',
        "oss_fused/beside.py": "",
        "oss_fused/named.py": "",
        "oss_fused/plugin/__init__.py": "from oss_fused.plugin import hooks\n",
        "oss_fused/plugin/hooks.py": "",
        "oss_fused/of_a_script.py": "",
        "oss_fused/unreached.py": "def long():\n" + "    pass\n" * 60,
        "oss_fused/of_a_report.py": "",
        "oss_fused/of_a_page.py": "",
        "scripts/calibrate.py": "import oss_fused.of_a_script\nfrom harness import report\n",
        "scripts/harness/report.py": "import oss_fused.of_a_report\n",
        "docs/page.md": "Import `oss_fused.of_a_page.Name`.\n",
        "scripts/bench_x.py": "import oss_fused.unreached\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures(tree: Path) -> None:
    figures = measure_house.measure(tree)
    assert figures["unreached"] == ["oss_fused.unreached"]
    assert figures["package_lines_unreached_by_users"] == 61
    assert figures["functions_over_60"] == ["oss_fused.unreached.long"]
    assert figures["package_files"] == 10


def test_files(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "house.json"
    summary = tmp_path / "summary.json"
    options = ["--tree", str(tree), "--output", str(output), "--summary", str(summary)]
    assert measure_house.main(options) == 0
    assert json.loads(output.read_text())["house"]["package_files"] == 10
    assert json.loads(summary.read_text())["house.functions_over_60_lines"] == 1
    assert measure_house.main(["--tree", str(tmp_path / "nowhere")]) == 2
    assert "--tree=" in capsys.readouterr().err
