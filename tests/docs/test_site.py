# SPDX-License-Identifier: MIT
"""What makes the site of `make docs`, without MkDocs: links, cells, navigation, the lock."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
import yaml

from tests.docs.readers import ROOT
from tests.loading import load_script

SITE = ROOT / "deploy" / "docs"


class Files:
    """The pages of a site, by their place below docs/."""

    def __init__(self, *places):
        self.places = places

    def get_file_from_path(self, place):
        return place if place in self.places else None


@pytest.fixture
def hooks(monkeypatch):
    # jupytext and MkDocs are in an environment of their own
    jupytext, structure = types.ModuleType("jupytext"), types.ModuleType("mkdocs.structure.files")
    structure.File = structure.Files = object
    for name, module in (
        ("jupytext", jupytext),
        ("mkdocs", types.ModuleType("mkdocs")),
        ("mkdocs.structure", types.ModuleType("mkdocs.structure")),
        ("mkdocs.structure.files", structure),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return load_script("hooks", SITE)


PAGES = Files("index.md", "gemm.md", "tutorial/06-matmul.md", "results/h200/a.json", "x.png")


@pytest.mark.parametrize(
    ("here", "link", "wanted"),
    [
        ("tutorial/05-a.md", "[m](06-matmul.py)", "[m](06-matmul.md)"),
        ("tutorial/answers/05-a.md", "[m](../06-matmul.py#v0)", "[m](../06-matmul.md#v0)"),
        ("tutorial/05-a.md", "[start](../../README.md)", "[start](../index.md)"),
        ("index.md", "[g](docs/gemm.md#a)", "[g](gemm.md#a)"),
        ("index.md", "![chart](docs/x.png)", "![chart](x.png)"),
        ("gemm.md", "[f](results/h200/a.json)", "[f](results/h200/a.json)"),
        ("gemm.md", "[code](../oss_fused/errors.py)", "code"),
        ("gemm.md", "[folder](results)", "folder"),
        ("gemm.md", "<details><summary>", '<details markdown="1"><summary>'),
        (
            "gemm.md",
            "[far](https://a.example/b) [near](#c)",
            "[far](https://a.example/b) [near](#c)",
        ),
    ],
)
def test_links_stay_inside_the_site(hooks, here, link, wanted):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=here))
    assert hooks.on_page_markdown(link, page, None, PAGES) == wanted
    code = f"```\n{link}\n```"
    assert hooks.on_page_markdown(code, page, None, PAGES) == code


def test_a_page_has_what_its_chapter_showed_below_the_cell(hooks, tmp_path, monkeypatch):
    text = "# SPDX-License-Identifier: MIT\n# %% [markdown]\n# # T\n\n# %%\nx = 1\n"
    path = tmp_path / "01-x.py"
    path.write_text(text)
    (tmp_path / "01-x.jsonl").write_text(
        json.dumps({"line": 6, "text": "| a |"}) + "\n" + json.dumps({"line": 6, "plot": "p.png"})
    )
    cells = [("code", text[:31]), ("markdown", "# T"), ("code", "x = 1")]
    notebook = [{"cell_type": kind, "source": source} for kind, source in cells]
    hooks.jupytext.reads = lambda text, fmt: types.SimpleNamespace(cells=notebook)
    monkeypatch.setattr(hooks, "RECORDS", tmp_path)
    page = hooks.chapter_page(path)
    places = [page.index(part) for part in ("# T", "x = 1", "| a |", "plots/p.png")]
    assert places == sorted(places) and "SPDX" not in page


def test_the_navigation_names_every_page_once():
    text = (SITE / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text)["nav"]
    pages = [
        page for part in nav for pages in part.values() if isinstance(pages, list) for page in pages
    ]
    names = [name for page in pages for name in page.values()]
    assert sorted(n for n in names if n.islower()) == sorted(
        path.name for path in (ROOT / "docs").glob("*.md")
    )


def test_reports_are_named_apart(hooks):
    pages = sorted((ROOT / "docs/results").rglob("*.md"))
    groups = hooks.results_nav(pages)
    names = {next(iter(group)): next(iter(group.values())) for group in groups}
    assert set(names) == {"h100", "h200", "h200x2", "notes"}
    assert sum(map(len, names.values())) == len(pages)
    for device in ("h100", "h200", "h200x2"):
        titles = [title for page in names[device] for title in page]
        assert len(set(titles)) == len(titles) and "decode gpt oss 20b" in titles
    assert "results/notes/calibration.md" in names["notes"]


def test_the_lock_is_complete_and_pinned():
    lines = (SITE / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", line) for line in pins)
    names = {line.partition("==")[0].lower() for line in pins}
    wanted = (SITE / "requirements.in").read_text().split()
    assert set(wanted) <= names
