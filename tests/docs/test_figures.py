# SPDX-License-Identifier: MIT
"""Every measured figure of README and docs is the one in its JSON.

``STATED`` has a template per passage, filled from the JSON files: the filled text must stand in the
page. What of a page's figures with a unit no template covers must be in ``NOT_MEASURED``: a
setting, a target, arithmetic from shapes, or a fact about a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs import (
    calibration_page,
    decode_pages,
    kernel_pages,
    moe_page,
    scaling_page,
    serving_page,
)
from tests.docs.readers import ROOT, text_of

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
STATED = {
    "README.md": decode_pages.readme,
    "docs/decode.md": decode_pages.decode,
    "docs/moe.md": moe_page.moe,
    "docs/scaling.md": scaling_page.scaling,
    "docs/serving.md": serving_page.serving,
    "docs/calibration.md": calibration_page.calibration,
    "docs/gemm.md": kernel_pages.gemm,
    "docs/kernels.md": kernel_pages.kernel_page,
    "docs/operators.md": kernel_pages.operators,
    "docs/tuning.md": kernel_pages.tuning,
    "docs/analysis.md": kernel_pages.analysis,
}


def words(text: str) -> str:
    return " ".join(text.split())


def passages(page: str) -> Iterator[str]:
    for template, values in STATED[page]() if page in STATED else ():
        yield words(template.format(*values))


@pytest.mark.parametrize("page", STATED)
def test_stated_figures_are_those_of_the_json(page):
    text = words((ROOT / page).read_text())
    missing = [passage for passage in passages(page) if passage not in text]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_the_present(page):
    text = words((ROOT / page).read_text()).lower()
    assert [phrase for phrase in ("since then", "no longer") if phrase in text] == []


# page -> figure -> what it is
NOT_MEASURED: dict[str, dict[str, str]] = {
    "docs/calibration.md": {
        "1 GiB": "target",
        "1.0264 GiB": "target, from the shapes",
        "15 %": "setting",
        "2.6 %": "a property of the format",
    },
    "docs/comparing.md": {"10 %": "setting", "30 %": "setting"},
    "docs/decode.md": {"5 ms": "setting", "10 ms": "example"},
    "docs/serving.md": {"5 ms": "setting", "2.5 ms": "shapes", "4.3 TB/s": "copy bandwidth"},
    "docs/gemm.md": {"1979 TFLOPS": "datasheet", "2 %": "setting"},
    "docs/kernels.md": {"0.6x": "target", "0.4x": "target"},
    "docs/measuring.md": {"5 %": "setting"},
    "docs/tuning.md": {"2 %": "setting"},
    "docs/operators.md": {"5 %": "setting", "99 %": "a quantile", "2 GiB": "setting"},
    "docs/operations.md": {"100 %": "what nvidia-smi shows"},
    "docs/scaling.md": {
        **dict.fromkeys(("94 %", "4.8 TB/s", "0.77 ms", "0.52 ms", "1.04 ms", "0.72 ms"), "shapes"),
        **dict.fromkeys(("4 GiB", "50 GB/s"), "assumption"),
        **{"90 %": "setting", "95 %": "threshold"},
        **dict.fromkeys(("8 MiB", "64 MiB", "32 MiB", "4 MiB"), "setting"),
    },
}

# a number with a unit of a measurement, or a ratio
_FIGURE = re.compile(
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?"
    r"(?:x|(?: ?(?:ms|us|microseconds|GiB|MiB|[TGM]B/s|TFLOPS|TFLOP/s|%)))(?!\w)"
)


def unstated(page: str) -> list[str]:
    """Figures of a page outside code and the passages that come from JSON files."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    text = words(re.sub(r"`[^`\n]*`", "", text))
    for passage in passages(page):
        text = text.replace(words(re.sub(r"`[^`]*`", "", passage)), "")
    return _FIGURE.findall(text)


@pytest.mark.parametrize("page", PAGES)
def test_other_figures_are_known_not_to_be_measured(page):
    known = NOT_MEASURED.get(page, {})
    found = unstated(page)
    assert [figure for figure in found if figure not in known] == []
    assert [figure for figure in known if figure not in found] == [], "gone from the page"


TUTORIAL = ROOT / "docs" / "tutorial"
TUTORIAL_PAGES = [*sorted(TUTORIAL.glob("[0-9]*.py")), *sorted(TUTORIAL.rglob("*.md"))]
# limits, statements about limits, examples and exercises of the tutorial: measured figures stand in
# the tables that its chapters print
NOT_MEASURED_THERE = {
    *("1 %", "2 %", "3 %", "5 %", "30 %", "40 %", "70 %", "80 %", "90 %", "95 %", "99 %"),
    *("1.3x", "2x", "0.18 ms", "0.5 ms", "100 us", "5 us", "1 GiB"),
}


@pytest.mark.parametrize("page", TUTORIAL_PAGES, ids=lambda path: path.name)
def test_the_text_of_the_tutorial_states_no_measurement(page):
    assert set(_FIGURE.findall(words(text_of(page)))) <= NOT_MEASURED_THERE
