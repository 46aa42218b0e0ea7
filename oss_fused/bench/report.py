# SPDX-License-Identifier: MIT
"""A report as a list of blocks, written as plain text, Markdown or one HTML page.

Paragraphs, list items and cells may hold ``**bold**`` and `` `code` ``, as in Markdown.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CSS = """
body{font-family:system-ui,sans-serif;line-height:1.45;color:#1c1e21;margin:0 auto;
padding:1em 1.5em;
max-width:76em}
h1{font-size:1.6em}h2{font-size:1.25em;margin-top:1.8em;border-bottom:1px solid #ddd}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9em;margin:.6em 0}
td,th{padding:.25em .55em;border-bottom:1px solid #e2e2e2;text-align:left;white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}th{background:#f5f6f7}
td b{background:#e2f2e2;padding:0 .25em}td.long{white-space:normal;min-width:18em}
.charts{display:flex;flex-wrap:wrap;gap:1em}
figure{margin:0;flex:0 1 auto;max-width:100%}
img{max-width:100%;height:auto}code{background:#f5f6f7;overflow-wrap:anywhere}
"""
# cells of a column of figures: a number, with what may stand around it; or nothing
_NUMBER = re.compile(r"[-+~]?[\d.,]+(e[-+]\d+)?[%x]?( (to |noisy|not |\*|[(\[/]).*)?|-|")
_LONG_CELL = 60


@dataclass(frozen=True)
class _Text:
    text: str
    level: int = 0  # of a heading; 0: a paragraph


@dataclass(frozen=True)
class _List:
    items: tuple[str, ...]


@dataclass(frozen=True)
class _Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    summary: str = ""  # shown in place of the table until it is opened


@dataclass(frozen=True)
class _Chart:
    name: str
    label: str
    png: bytes


_Block = _Text | _List | _Table | _Chart


class Report:
    """Collects blocks.

    What has no content leaves no trace: a table without rows or with nothing beside its first
    column, a heading with nothing below it.
    """

    def __init__(self, title: str) -> None:
        """A report with the heading ``title``."""
        self.title = title
        self._blocks: list[_Block] = []

    def heading(self, text: str, level: int = 2) -> None:
        """A heading below the title, which is of level 1."""
        self._blocks.append(_Text(text, level))

    def paragraph(self, text: str) -> None:
        """A paragraph, if there is any text."""
        if text:
            self._blocks.append(_Text(text))

    def items(self, lines: Sequence[str]) -> None:
        """A list of lines."""
        if lines:
            self._blocks.append(_List(tuple(lines)))

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], summary: str = ""
    ) -> None:
        """A table without its empty columns.

        Args:
            header: names of the columns.
            rows: cells; a short row is a note that runs to the end of its line.
            summary: if given, the HTML page folds the table under this line.
        """
        kept = [i for i in range(len(header)) if any(len(r) > i and r[i] for r in rows)]
        if kept and max(kept) > 0:
            cut = tuple(tuple(row[i] for i in kept if i < len(row)) for row in rows)
            self._blocks.append(_Table(tuple(header[i] for i in kept), cut, summary))

    def charts(self, drawn: Mapping[str, bytes]) -> None:
        """Charts side by side where there is room: name -> PNG."""
        self._blocks += [_Chart(name.replace(" ", "-"), name, png) for name, png in drawn.items()]

    def _visible(self, charts: bool) -> list[_Block]:
        """The blocks without headings of empty sections."""
        shown: list[_Block] = []
        level = 0  # of the block below, where it is a heading
        for block in reversed(self._blocks):
            if isinstance(block, _Chart) and not charts:
                continue
            heading = block.level if isinstance(block, _Text) else 0
            if heading and (not shown or (0 < level <= heading)):
                continue
            shown.append(block)
            level = heading
        return shown[::-1]

    def text(self) -> str:
        """Plain text: aligned columns, no charts."""
        parts = [_plain(self.title)]
        for block in self._visible(charts=False):
            if isinstance(block, _Text):
                parts.append(_plain(block.text))
            elif isinstance(block, _List):
                parts.append("\n".join(f"- {_plain(item)}" for item in block.items))
            elif isinstance(block, _Table):
                parts.append(text_table(block.header, block.rows))
        return "\n\n".join(parts) + "\n"

    def markdown(self, folder: Path | None = None, prefix: str = "") -> str:
        """Markdown.

        Args:
            folder: where to write the charts, as ``<prefix><name>.png``; None leaves them out.
            prefix: of their files' names.
        """
        parts = [f"# {self.title}"]
        for block in self._visible(charts=folder is not None):
            if isinstance(block, _Text):
                parts.append(f"{'#' * block.level} {block.text}".lstrip())
            elif isinstance(block, _List):
                parts.append("\n".join(f"- {item}" for item in block.items))
            elif isinstance(block, _Table):
                parts.append(markdown_table(block.header, block.rows))
            elif folder is not None:  # charts are not visible without one
                name = f"{prefix}{block.name}.png"
                (folder / name).write_bytes(block.png)
                parts.append(f"![{block.label}]({name})")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path, name: str = "report", prefix: str = "") -> None:
        """Write ``<name>.md`` with its charts (see ``markdown``) and ``<name>.html``."""
        (folder / f"{name}.md").write_text(self.markdown(folder, prefix))
        (folder / f"{name}.html").write_text(self.html())

    def html(self) -> str:
        """One page without outside files."""
        parts = [f"<h1>{_inline(self.title)}</h1>"]
        blocks = self._visible(charts=True)
        for i, block in enumerate(blocks):
            if isinstance(block, _Text):
                tag = f"h{block.level}" if block.level else "p"
                parts.append(f"<{tag}>{_inline(block.text)}</{tag}>")
            elif isinstance(block, _List):
                lines = "".join(f"<li>{_inline(item)}</li>" for item in block.items)
                parts.append(f"<ul>{lines}</ul>")
            elif isinstance(block, _Table):
                parts.append(_html_table(block))
            else:
                before, after = blocks[max(i - 1, 0) : i], blocks[i + 1 : i + 2]
                opens = not before or not isinstance(before[0], _Chart)
                closes = not after or not isinstance(after[0], _Chart)
                parts.append('<div class="charts">' * opens + _image(block) + "</div>" * closes)
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(_plain(self.title))}</title><style>{_CSS}</style>"
        )
        body = "\n".join(parts)
        return f'<!doctype html><html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; a row with fewer cells than the header may run on."""
    table = [[_plain(cell) for cell in row] for row in (header, *rows)]
    full = [line for line in table if len(line) == len(header)]
    widths = [max(len(line[i]) for line in full) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers are right-aligned."""
    marks = ["--:" if number else ":--" for number in _numeric(header, rows)]
    lines = [header, marks]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append([*cells, *[""] * (len(header) - len(cells))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _numeric(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each column, the first excepted, holds numbers."""
    full = [row for row in rows if len(row) == len(header)]
    return [
        i > 0 and bool(full) and all(_NUMBER.fullmatch(_plain(row[i])) for row in full)
        for i in range(len(header))
    ]


def _html_table(block: _Table) -> str:
    numeric = _numeric(block.header, block.rows)

    def cell(tag: str, text: str, number: bool, span: int = 1) -> str:
        kind = "number" if number else "long" if len(text) > _LONG_CELL else ""
        wide = f' colspan="{span}"' if span > 1 else ""
        return f"<{tag}{f' class={kind!r}' if kind else ''}{wide}>{_inline(text)}</{tag}>"

    lines = ["".join(cell("th", t, n) for t, n in zip(block.header, numeric))]
    for row in block.rows:
        cells = [cell("td", text, number) for text, number in zip(row, numeric)]
        missing = len(block.header) - len(row)
        if missing:
            cells[-1] = cell("td", row[-1], False, missing + 1)
        lines.append("".join(cells))
    table = "\n".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<div class="scroll"><table>\n{table}\n</table></div>'
    if block.summary:
        table = f"<details><summary>{_inline(block.summary)}</summary>{table}</details>"
    return table


def _image(chart: _Chart) -> str:
    data = base64.b64encode(chart.png).decode()
    label = html.escape(chart.label)
    return f'<figure><img alt="{label}" src="data:image/png;base64,{data}"></figure>'


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text, quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _plain(text: str) -> str:
    # the best of a row keeps a star
    return re.sub(r"\*\*(.+?)\*\*", r"\1 *", text).replace("`", "")
