# SPDX-License-Identifier: MIT
"""Texts for evaluation and calibration: disjoint, long enough, a missing package named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import texts

from oss_fused.errors import DatasetError


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="package apache-tvm-ffi is not installed"):
        texts.evaluation_texts()


def test_no_work_is_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    plays = {name: f"{name} speaks. " * 4000 for name in (texts._PLAY, "a.md", "b.md")}
    for name, play in plays.items():
        path = package / "plays" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(play)
    opticks = package / "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
    opticks.parent.mkdir(parents=True)
    opticks.write_text("licence\nTHE FIRST BOOK OF OPTICKS\n" + "Light is refrangible. " * 6000)
    (opticks.parent / "dwarf.c").write_text("int value;\n" * 10000)
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    texts.write_texts(tmp_path / "texts")
    judged = [(tmp_path / "texts" / f"{kind}.txt").read_text() for kind in texts.KINDS]
    assert all(len(text) > 100_000 for text in judged)
    lines = (tmp_path / "texts" / "calibration.jsonl").read_text().splitlines()
    samples = [json.loads(line)["text"] for line in lines]
    assert len(samples) > 50 and set(map(len, samples)) == {3000}
    assert not any(sample[1000:1300] in text for sample in samples for text in judged)
