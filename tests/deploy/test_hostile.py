# SPDX-License-Identifier: MIT
"""Every hostile checkpoint is refused by the doctor and by vLLM's loader, with its reason."""

from __future__ import annotations

import re

import pytest

from tests.deploy.hostile import CASES, Case, doctor_says, loader_says, make, make_bases

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
def test_is_refused(name, bases, tmp_path) -> None:
    case = CASES[name]
    folder = make(name, bases, tmp_path)
    for answer in (doctor_says(folder), loader_says(folder, case)):
        assert re.search(case.reason, answer), answer
