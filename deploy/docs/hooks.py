# SPDX-License-Identifier: MIT
"""Hooks of MkDocs: chapters become pages with what they showed; links stay inside the site.

Runs in .venv-docs. A chapter is a script in percent format, which jupytext reads. What it showed
when it ran is in results/tutorial, a line of JSON per table or chart.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RECORDS = ROOT / "results" / "tutorial"
# pages from outside docs/ -> their file
OUTSIDE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```+|~~~+)")
_NOT_SHOWN = re.compile(r"# SPDX-License-Identifier: \S+\n?")


def on_config(config: Any) -> Any:
    """Fill the two parts of the navigation that follow from files."""
    for entry in config["nav"]:
        if "Tutorial" in entry:
            entry["Tutorial"] = tutorial_nav()
        if "Results" in entry:
            entry["Results"] = results_nav(sorted((DOCS / "results").rglob("*.md")))
    return config


def results_nav(reports: list[Path]) -> list[Any]:
    """Reports by their device, named for their folder or file: titles repeat. Notes have titles."""
    groups: dict[str, list[Any]] = {}
    for path in reports:
        device, *folders, file = path.relative_to(DOCS / "results").parts
        page = path.relative_to(DOCS).as_posix()
        name = folders[-1] if folders else Path(file).stem
        group = groups.setdefault(device, [])
        group.append(page if device == "notes" else {name.replace("_", " "): page})
    return [{name: pages} for name, pages in groups.items()]


def tutorial_nav() -> list[Any]:
    """Chapters, appendices, templates, answers."""
    folder = DOCS / "tutorial"
    chapters = [f"tutorial/{path.stem}.md" for path in sorted(folder.glob("[0-9][0-9]-*.py"))]
    parts = {
        "Appendices": sorted(folder.glob("appendix-*.md")),
        "Templates": sorted(folder.glob("templates/*.md")),
        "Answers": sorted(folder.glob("answers/*.py")),
    }
    return chapters + [
        {name: [p.relative_to(DOCS).with_suffix(".md").as_posix() for p in paths]}
        for name, paths in parts.items()
    ]


def on_files(files: Files, config: Any) -> Files:
    """Add the chapters, the pages from outside docs/, charts and the style sheet."""
    for path in sorted((DOCS / "tutorial").rglob("[0-9][0-9]-*.py")):
        name = path.relative_to(DOCS)
        script = files.get_file_from_path(name.as_posix())
        if script is not None:
            files.remove(script)
        page = name.with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=chapter_page(path)))
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for plot in sorted(RECORDS.glob("*.png")):
        place = f"tutorial/plots/{plot.name}"
        files.append(File.generated(config, place, abs_src_path=str(plot)))
    style = Path(__file__).with_name("site.css")
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(style)))
    return files


def chapter_page(path: Path) -> str:
    """The Markdown of a chapter: its cells, and below each what it showed."""
    text = path.read_text()
    record = RECORDS / f"{path.stem}.jsonl"
    shown = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    )
    if path.parent.name == "answers":
        shown = []
    parts = []
    for cell, first, last in cells(text):
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        code = _NOT_SHOWN.sub("", cell["source"]).strip("\n")
        if code:
            parts.append(f"````python\n{code}\n````")
        parts += [output(entry) for entry in shown if first <= entry["line"] <= last]
    return "\n\n".join(parts) + "\n"


def cells(text: str) -> Iterator[tuple[Any, int, int]]:
    """Cells of a script in percent format, with first and last line in the file."""
    notebook = jupytext.reads(text, fmt="py:percent")
    starts = [i for i, line in enumerate(text.splitlines(), 1) if line.startswith("# %%")]
    # what stands above the first marker is a cell of its own
    starts = [1, *starts] if len(starts) < len(notebook.cells) else starts
    ends = [*(start - 1 for start in starts[1:]), len(text.splitlines())]
    yield from zip(notebook.cells, starts, ends, strict=True)


def output(entry: dict[str, Any]) -> str:
    """What a cell showed, as Markdown."""
    if "plot" in entry:
        return f"![chart](plots/{entry['plot']})"
    return f'<div class="output" markdown="1">\n\n{entry["text"]}\n\n</div>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; a link to source code becomes its text."""
    here = page.file.src_uri
    lines, fence = [], ""
    for line in markdown.splitlines():
        if found := _FENCE.match(line):
            fence = "" if fence and line.startswith(fence) else fence or found[1]
        if not fence:
            # GitHub reads Markdown inside, MkDocs where it is told
            line = line.replace("<details>", '<details markdown="1">')
            line = _LINK.sub(lambda link: rewritten(link, here, files), line)
        lines.append(line)
    return "\n".join(lines)


def rewritten(link: re.Match[str], here: str, files: Files) -> str:
    """A link of the page ``here``, as it must stand in the site."""
    mark, text, target = link.groups()
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    path, hash_, anchor = target.partition("#")
    source = OUTSIDE.get(here)
    folder = posixpath.dirname(here) if source is None else ".."
    place = posixpath.normpath(posixpath.join(folder, path))
    # places are relative to docs/: a page from outside stands one above
    if place.startswith("../docs/"):
        place = place.removeprefix("../docs/")
    outside = {f"../{file}": page for page, file in OUTSIDE.items()}
    place = outside.get(place, place)
    if place.startswith("tutorial/") and place.endswith(".py"):
        place = f"{place.removesuffix('.py')}.md"
    if files.get_file_from_path(place) is None:
        return text
    relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
    return f"{mark}[{text}]({relative}{hash_}{anchor})"
