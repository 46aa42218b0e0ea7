# SPDX-License-Identifier: MIT
"""The tuning cache: keys, persistence, merging, concurrent writers, damaged files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from oss_fused.errors import SchemeError
from oss_fused.tuning.cache import CacheEntry, CacheKey, TuningCache, default_path

KEY = CacheKey("gemm", (128, 256, 64), "bfloat16", "NVIDIA H200", "v1")


def entry(key=KEY, score=1.0, **config):
    return CacheEntry(key, config or {"BLOCK_M": 64}, score, {"latency_ms": 0.5})


def test_key_text_holds_all_it_depends_on():
    assert str(KEY) == "gemm||128x256x64:bfloat16|latency|NVIDIA H200|v1"
    full = CacheKey("g", (1, 2), "float32,int8", "cpu", "v1", "m.f@12", "0.5memory")
    assert str(full) == "g|m.f@12|1x2:float32,int8|0.5memory|cpu|v1"


def test_entry_survives_the_file(tmp_path):
    path = tmp_path / "deep" / "tuning.json"
    TuningCache(path).put(entry(BLOCK_M=32))
    found = TuningCache(path).get(KEY)
    assert found is not None and found.config == {"BLOCK_M": 32} and found.tuned_at
    assert str(KEY) in json.loads(path.read_text())["entries"]


@pytest.mark.parametrize(
    "field", ["operation", "dtype", "device", "versions", "kernel", "objective"]
)
def test_another_key_is_a_miss(tmp_path, field):
    cache = TuningCache(tmp_path / "c.json")
    cache.put(entry())
    other = CacheKey(**{**KEY.__dict__, field: "other"})
    assert cache.get(other) is None
    assert cache.get(KEY) is not None


def test_a_cache_sees_what_another_wrote(tmp_path):
    first, second = TuningCache(tmp_path / "c.json"), TuningCache(tmp_path / "c.json")
    assert first.get(KEY) is None
    second.put(entry())
    assert first.get(KEY) is not None


@pytest.mark.parametrize("content", ["", "[1]", '{"format": 9}', "\x00"])
def test_a_file_to_merge_that_is_no_cache_stays_as_it_is(tmp_path, content):
    theirs = tmp_path / "theirs.json"
    theirs.write_text(content)
    with pytest.raises(SchemeError, match=r"theirs\.json: not a tuning cache"):
        TuningCache(tmp_path / "ours.json").merge(theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.json"]
    assert theirs.read_text() == content


def test_merge_takes_new_and_better_only(tmp_path):
    ours, theirs = TuningCache(tmp_path / "a.json"), TuningCache(tmp_path / "b.json")
    second = CacheKey("gemm", (1, 2, 3), "bfloat16", "NVIDIA H200", "v1")
    third = CacheKey("norm", (1, 2), "bfloat16", "NVIDIA H200", "v1")
    ours.put(entry(score=1.0, BLOCK_M=16))
    ours.put(entry(second, score=9.0, BLOCK_M=16))
    for key, score in ((KEY, 2.0), (second, 3.0), (third, 5.0)):
        theirs.put(entry(key, score, BLOCK_M=128))
    assert ours.merge(tmp_path / "b.json") == 2
    configs = {str(k): e.config["BLOCK_M"] for k, e in ours.entries().items()}
    assert configs == {str(KEY): 16, str(second): 128, str(third): 128}


def test_family_is_nearest_shape_first(tmp_path):
    cache = TuningCache(tmp_path / "c.json")
    for m in (8192, 120, 1):
        cache.put(entry(CacheKey("gemm", (m, 256, 64), "bfloat16", "NVIDIA H200", "v1")))
    cache.put(entry(CacheKey("norm", (128, 256, 64), "bfloat16", "NVIDIA H200", "v1")))
    assert [e.key.shape[0] for e in cache.family(KEY)] == [120, 8192, 1]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 99, "entries": {}}', '{"format": 2, "entries": {"x": {"key": 3}}}'],
)
def test_damaged_file_is_set_aside_not_fatal(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    cache = TuningCache(path)
    with pytest.warns(RuntimeWarning, match="not a tuning cache"):
        assert cache.entries() == {}
    aside = list(tmp_path.glob("c.json.corrupt-*"))
    assert len(aside) == 1 and aside[0].read_text() == text
    cache.put(entry())
    assert TuningCache(path).get(KEY) is not None


def test_reading_leaves_a_file_that_is_no_cache_and_refuses_a_folder(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("[1]")
    for place in (path, tmp_path):
        with pytest.raises(SchemeError, match="not a tuning cache"):
            TuningCache(place).read()
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]
    assert TuningCache(tmp_path / "none.json").read() == {}


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "c.json"
    code = (
        "import sys\n"
        "from oss_fused.tuning.cache import CacheEntry, CacheKey, TuningCache\n"
        "cache = TuningCache(sys.argv[1])\n"
        "for i in range(15):\n"
        "    key = CacheKey('w' + sys.argv[2], (i,), 'float32', 'cpu', 'v1')\n"
        "    cache.put(CacheEntry(key, {'BLOCK_M': i}, 1.0, {}))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(w)]) for w in range(3)]
    assert [w.wait(timeout=60) for w in writers] == [0, 0, 0]
    assert len(TuningCache(path).entries()) == 45
    assert list(tmp_path.glob("c.json?*")) == [tmp_path / "c.json.lock"]


def test_default_path_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "oss_fused" / "tuning.json"


def test_a_file_of_an_earlier_format_counts_as_empty(tmp_path, recwarn):
    """Its keys do not say which kernel, objective and dtypes they are for."""
    path = tmp_path / "c.json"
    key = {"operation": "gemm", "shape": [1], "dtype": "bfloat16", "device": "d", "versions": "v"}
    old = {"key": key, "config": {"B": 1}, "score": 1.0, "metrics": {}}
    document = {"format": 1, "entries": {"gemm": {**old, "impossible": [], "tuned_at": ""}}}
    path.write_text(json.dumps(document))
    cache = TuningCache(path)
    assert cache.entries() == {} and not recwarn.list
    cache.put(entry())
    assert [*json.loads(path.read_text())["entries"]] == [str(KEY)]
    assert [file.name for file in tmp_path.glob("*corrupt*")] == []


def test_a_full_disk_leaves_the_cache_as_it_was(tmp_path, monkeypatch):
    cache = TuningCache(tmp_path / "c.json")
    cache.put(entry())
    before = cache.path.read_bytes()

    def full(document, file, **options):
        file.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        cache.put(entry(score=2.0))
    assert cache.path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.json.lock"]
