# SPDX-License-Identifier: MIT
"""Links of the pages and chapters lead to files and headings; sources that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.readers import ROOT, text_of

TUTORIAL = ROOT / "docs" / "tutorial"
SOURCES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(TUTORIAL.rglob("[0-9][0-9]-*.py")),
]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def headings(path: Path) -> set[str]:
    """Anchors of a page, as GitHub and MkDocs make them."""
    text = re.sub(r"^(```+).*?^\1", "", path.read_text(), flags=re.M | re.S)
    if path.suffix == ".py":
        text = re.sub(r"(?m)^# ?", "", text)
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    plain = [re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {title.replace(" ", "-") for title in plain}


def broken(path: Path, text: str) -> list[str]:
    """Links of ``text``, which stands in ``path``, that lead nowhere."""
    found = []
    for target in _LINK.findall(text):
        if re.match(r"https?:|mailto:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists() or (anchor and anchor not in headings(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert broken(path, text_of(path)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One heading\n")
    text = "[a](page.md) [b](page.md#one-heading) [c](none.md) [d](#two) [e](https://x.example)"
    assert broken(page, text) == ["none.md", "#two"]


def test_a_chapter_is_searched_in_its_text_only(tmp_path):
    chapter = tmp_path / "01-x.py"
    chapter.write_text("# %% [markdown]\n# [a](none.md)\n\n# %%\nx = '[b](none.py)'\n")
    assert broken(chapter, text_of(chapter)) == ["none.md"]


# sources of vLLM and of Python's library
ELSEWHERE = {
    "model_states/default.py",
    "rejection_sampler.py",
    "sampler.py",
    "single_type_kv_cache_manager.py",
    "speculator.py",
    "tarfile.py",
    "textwrap.py",
}
# results and their notes have the names of their day
PAGES = [path for path in SOURCES if path.suffix == ".md" and "results" not in path.parts]
CODE = [
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in ("deploy", "docs", "examples", "oss_fused", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


def unknown_sources(text: str) -> set[str]:
    """Python files that ``text`` names and that this repository does not have."""
    names = set(re.findall(r"`([\w./-]+\.py)`", text)) - ELSEWHERE
    return {name for name in names if not any(path.endswith(f"/{name}") for path in CODE)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_sources_exist(path):
    assert not unknown_sources(path.read_text())


def test_an_unknown_source_is_found():
    text = "`gemm/portable.py` `portable.py` `gemm/swap.py` `sampler.py` swap.py"
    assert unknown_sources(text) == {"gemm/swap.py"}


def test_the_templates_and_appendices_are_searched():
    names = {path.name for path in SOURCES}
    assert {
        "kernel-report.md",
        "appendix-glossary.md",
        "17-fp8-calibration-and-serving.py",
    } <= names
