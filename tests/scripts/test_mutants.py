# SPDX-License-Identifier: MIT
"""scripts/mutants.py: every listed change applies, and outcomes are told apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.loading import load_script

mutants = load_script("mutants")


def test_listed_mutants_apply() -> None:
    """Each text stands once in its file, each test file exists, each name is unique."""
    assert mutants.load(mutants.ROOT / "tests" / "mutants")


def write(folder: Path, **changes: object) -> Path:
    entry = {
        "name": "one",
        "file": "tests/data/prose.txt",
        "old": "a text that stands nowhere",
        "new": "x",
        "tests": ["tests/test_specs.py"],
        **changes,
    }
    lines = [f"{key} = {value!r}" for key, value in entry.items() if value is not None]
    (folder / "area.toml").write_text("[[mutant]]\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "stands 0 times"),
        ({"file": "no/such/file"}, "stands 0 times in no/such/file"),
        ({"old": None}, "no old"),
        ({"extra": "x"}, "extra='x'"),
        ({"tests": ["-k", "x"], "file": "Makefile", "old": ".PHONY"}, "expected paths of tests"),
        (
            {"tests": ["tests/nowhere.py"], "file": "Makefile", "old": ".PHONY"},
            "expected paths of tests",
        ),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(mutants.MutantError, match=message):
        mutants.load(write(tmp_path, **changes))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import module\n\n"
        "def test_right():\n    assert module.double(3) == 6\n\n"
        "def test_blind():\n    assert module.double(0) == 0\n\n"
        "def test_red():\n    assert False\n\n"
        "def test_long():\n    import time\n    time.sleep(60)\n"
    )
    return tmp_path


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mutants.Worker]:
    worker = mutants.Worker(tmp_path_factory.mktemp("copy"), 60, modules=["pytest"])
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("test", "new", "outcome"),
    [
        ("test_right", "3 * x", "caught"),
        ("test_blind", "3 * x", "survived"),
        ("test_red", "3 * x", "broken"),
        ("test_right", "2 *", "broken"),  # not Python: the test does not run
        ("test_nowhere", "3 * x", "broken"),
    ],
)
def test_outcomes(worker: mutants.Worker, copy: Path, test: str, new: str, outcome: str) -> None:
    mutant = mutants.Mutant("a", "m", "module.py", "2 * x", new, ("tests/test_it.py", "-k", test))
    worker.copy = copy
    assert mutants.run_one(mutant, worker, set())[0] == outcome
    assert "2 * x" in (copy / "module.py").read_text()


def test_a_hang_is_ended_and_counts_as_caught(worker: mutants.Worker, copy: Path) -> None:
    worker.copy, worker.timeout = copy, 1
    code, tail = worker.run(["tests/test_it.py", "-k", "test_long"])
    assert code == mutants.TESTS_FAILED and tail == "FAILED no end after 1 s"


def test_results_of_other_sources_are_run_again(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", copy)
    path = tmp_path / "r.json"
    mutant = mutants.Mutant("a", "m", "module.py", "2 * x", "x", ("tests/test_it.py",))
    mutants.Results(path, {}, [mutant]).add(mutant, "caught", 1.0, "")
    known = mutants.json.loads(path.read_text())["mutants"]
    assert mutants.Results(path, known, [mutant]).mutants
    assert not mutants.Results(path, known, [replace(mutant, new="3 * x")]).mutants
    for name in ("module.py", "tests/test_it.py"):
        before = (copy / name).read_text()
        (copy / name).write_text(before + "\n")
        assert not mutants.Results(path, known, [mutant]).mutants, name
        (copy / name).write_text(before)


@pytest.mark.parametrize("flags", [["--area", "a"], ["--name", "b"], ["--gpu-only"]])
def test_a_part_of_the_mutants_is_no_total(tmp_path: Path, capsys, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        mutants.parse(["--summary", str(tmp_path / "s.json"), *flags])
    assert stop.value.code == 2
    assert "--summary: counts all mutants; expected no" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"mutants": [1]}', '{"mutants": {"m": {}}}'])
def test_another_file_is_no_result(tmp_path: Path, capsys, monkeypatch, text: str) -> None:
    mutant = mutants.Mutant("a", "m", "Makefile", ".PHONY", "x", ("tests/test_specs.py",))
    monkeypatch.setattr(mutants, "load", lambda _: [mutant])
    path = tmp_path / "r.json"
    path.write_text(text)
    assert mutants.main(["--output", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"mutants: --output={str(path)!r}: expected a JSON file that this script wrote" in said
    assert path.read_text() == text


def test_each_outcome_is_kept_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mutant may take minutes; a kill must not lose what others have found by then."""
    names = ("slow", "quick")
    todo = [
        mutants.Mutant("a", name, "Makefile", ".PHONY", "x", ("tests/test_specs.py",))
        for name in names
    ]
    results = mutants.Results(tmp_path / "r.json", {}, todo)
    written = threading.Event()
    add = results.add

    def note(mutant: mutants.Mutant, *outcome: object) -> None:
        add(mutant, *outcome)
        written.set()

    def run_one(mutant: mutants.Mutant, worker: object, green: object) -> tuple[str, float, str]:
        if mutant.name == "slow":
            return ("caught" if written.wait(20) else "broken"), 1.0, ""
        return "caught", 1.0, ""

    monkeypatch.setattr(results, "add", note)
    monkeypatch.setattr(mutants, "run_one", run_one)
    monkeypatch.setattr(mutants, "_copy", lambda folder: folder)
    monkeypatch.setattr(mutants, "Worker", lambda *_: SimpleNamespace(close=lambda: None))
    mutants.run_all(todo, results, jobs=2, timeout=60)
    assert {name: results.mutants[name]["outcome"] for name in names} == dict.fromkeys(
        names, "caught"
    )


def test_unknown_names_are_told_and_gpu_only_leaves_out_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [
        mutants.Mutant("a", name, "Makefile", ".PHONY", "x", ("tests/test_specs.py",), gpu)
        for name, gpu in (("here", False), ("there", True))
    ]
    monkeypatch.setattr(mutants, "load", lambda _: known)
    monkeypatch.setattr(mutants, "has_gpu", lambda: False)
    monkeypatch.setattr(mutants, "run_all", lambda *_: None)
    output = ["--output", str(tmp_path / "r.json")]
    assert mutants.main(["--name", "here", "typo", *output]) == 2
    assert "--name: no such name: typo" in capsys.readouterr().err
    assert mutants.main(["--gpu-only", *output]) == 0
    assert "need a GPU, not run: there\n" in capsys.readouterr().out
