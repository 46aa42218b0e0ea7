# SPDX-License-Identifier: MIT
"""Every hostile checkpoint is refused by the doctor and by vLLM's loader, with its reason."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.deploy.hostile import CASES, Case, doctor_says, loader_says, make, make_bases
from tests.plugin.conftest import set_quantization
from tests.plugin.cpu_kind import tell_vllm

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


def test_there_are_enough() -> None:
    assert len(CASES) >= 25


def test_good_checkpoints_pass(bases) -> None:
    for base in bases.values():
        assert doctor_says(base) == ""
    assert loader_says(bases["llama"], Case(print, "")) == ""


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name, bases, tmp_path, monkeypatch) -> None:
    # a processor for which vLLM has kernels of its own refuses no less
    tell_vllm(monkeypatch, amx=CASES[name].base == "gpt_oss")
    case = CASES[name]
    folder = make(name, bases, tmp_path)
    for answer in (doctor_says(folder), loader_says(folder, case)):
        assert re.search(case.reason, answer), answer


def test_links_of_the_hub_cache_are_welcome(bases, tmp_path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in bases["llama"].iterdir():
        shutil.copy(path, blobs / f"sha-{path.name}")
        (snapshot / path.name).symlink_to(blobs / f"sha-{path.name}")
    assert doctor_says(snapshot) == ""


def test_another_quantisation_is_not_judged_by_our_rules(bases, tmp_path) -> None:
    folder = shutil.copytree(bases["llama"], tmp_path / "other")
    set_quantization(folder, {"quant_method": "compressed-tensors", "ignore": ["re:(("]})
    assert doctor_says(folder) == ""
