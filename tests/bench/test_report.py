# SPDX-License-Identifier: MIT
"""Reports: the same blocks as text, Markdown and HTML; charts whose legends cover no data."""

from __future__ import annotations

import re

import pytest

from oss_fused.bench import charts
from oss_fused.bench.report import Report
from tests.tags import Tags


@pytest.fixture
def report() -> Report:
    made = Report("a <b> & `code`")
    made.paragraph("**2.0x** faster")
    made.paragraph("")
    made.table(
        ("name", "ms", "never", "note"), [["x|y", "1.5", "", "up"], ["z", "**0.5**", "", ""]]
    )
    made.table(("name", "ms"), [])
    made.table(("name", "ms", "note"), [["w", "failed: a\nb"], ["v", "1", "x"]], "all of them")
    made.heading("Charts")
    made.charts({"one two": b"\x89PNG1", "three": b"\x89PNG2"})
    made.items(["first", "second"])
    return made


def test_markdown_has_tables_charts_and_no_empty_columns(report, tmp_path):
    text = report.markdown(tmp_path, "r-")
    assert "| name | ms | note |\n| :-- | --: | :-- |\n| x\\|y | 1.5 | up |" in text
    assert "never" not in text and text.count(":--") == 4, "two tables, one of three had no rows"
    assert "| w | failed: a b |  |" in text
    assert "![one two](r-one-two.png)" in text
    assert (tmp_path / "r-three.png").read_bytes() == b"\x89PNG2"
    assert "![" not in report.markdown()


def test_html_nests_escapes_and_fits_a_narrow_window(report):
    page = report.html()
    tags = Tags(page)
    assert (tags.seen["table"], tags.seen["details"], tags.seen["img"]) == (2, 1, 2)
    assert "a &lt;b&gt; &amp; <code>code</code>" in page and "<b>2.0x</b>" in page
    # tables scroll in themselves, charts wrap: the page is never wider than its window
    assert page.count('<div class="scroll">') == 2 and page.count('<div class="charts">') == 1
    assert 'name="viewport"' in page and "flex-wrap" in page
    assert not re.search(r'(src|href)="(?!data:)', page), "no outside files"
    assert 'colspan="2">failed' in page


def test_text_is_aligned_and_stars_the_best(report):
    text = report.text()
    assert "name  ms     note\nx|y   1.5    up\nz     0.5 *\n" in text
    assert "**" not in text and "`" not in text


def test_what_is_empty_leaves_no_trace():
    report = Report("t")
    report.heading("layers")
    report.table(("layer", "error", "scale"), [["0", "", ""], ["1", "", ""]])
    report.heading("part")
    report.heading("empty part", 3)
    report.heading("full part", 3)
    report.paragraph("text")
    report.heading("charts")
    report.charts({"c": b""})
    report.heading("end")
    assert report.markdown() == "# t\n\n## part\n\n### full part\n\ntext\n"
    assert "charts" in report.html() and "end" not in report.html()


def test_roofline_tells_kernels_and_problems_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(charts, "png", lambda figure: seen.append(figure) or b"")
    points = [(f"k{i}", f"p{j}", 10.0 * i + j, 5.0 + i) for i in range(1, 4) for j in range(3)]
    charts.roofline(points, 4000.0, {"bfloat16": 700.0, "float8": 1300.0})
    (axis,) = seen.pop().axes
    drawn = [line for line in axis.lines if len(line.get_xdata()) == 1]
    styles = {(line.get_color(), line.get_marker()) for line in drawn}
    assert len(drawn) == len(styles) == 9, "every point has a style of its own"
    assert len(axis.texts) == 0, "labels beside points covered their neighbours"
    legend = axis.get_legend()
    assert len(legend.get_texts()) == 2 + 3 + 3
    assert legend.get_bbox_to_anchor().x0 >= axis.bbox.x1, "beside the panel"
    # more problems than markers: the marker follows the kernel
    many = [(f"k{i}", f"p{j}", 1.0 + j, 5.0 + i) for i in range(2) for j in range(40)]
    charts.roofline(many, 4000.0, {"bfloat16": 700.0})
    assert len(seen.pop().axes[0].get_legend().get_texts()) == 1 + 2


def test_groups_keep_missing_values_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(charts, "png", lambda figure: seen.append(figure) or b"")
    charts.groups(
        ["a", "b"], {"x": [1.0, None], "y": [2.0, 3.0]}, "ms", tops={"x": [1.5, None], "y": [2, 4]}
    )
    (axis,) = seen[0].axes
    assert sorted(patch.get_height() for patch in axis.patches) == [1.0, 2.0, 3.0]
    assert axis.get_ylabel() == "ms" and axis.get_legend().get_bbox_to_anchor().x0 >= axis.bbox.x1


def test_the_same_chart_gives_the_same_bytes():
    series = {"a": [(0, 1.0), (1, 2.0)]}
    made = [charts.lines(series, "run", "ms") for _ in range(2)]
    assert made[0] == made[1] and made[0].startswith(b"\x89PNG")


def test_own_series_has_one_colour_in_every_chart():
    two, three = charts.colours(["baseline", "oss_fp8"]), charts.colours(["a", "b", "oss_fp8"])
    assert two["oss_fp8"] == three["oss_fp8"] == charts.colours(["oss_fused", "a"])["oss_fused"]
    for chosen in (two, three, charts.colours([*"abcdefghi", "oss_fp8"])):
        assert len(set(chosen.values())) == len(chosen)
    assert list(charts.colours(["a", "b"]).values()) == list(charts.COLOURS[:2])


def test_exponents_are_numbers():
    report = Report("t")
    report.table(("form", "clipped"), [("a", "6.1e-05"), ("b", "0"), ("c", "-1e+10x")])
    assert "| :-- | --: |" in report.markdown()
