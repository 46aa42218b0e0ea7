# SPDX-License-Identifier: MIT
"""The tuner's memory: one readable JSON file, safe under concurrent writers, never fatal.

An entry's key holds everything its truth depends on: operation and kernel, ``MxNxK:dtypes``, what
was minimised, device, versions.
A writer takes a lock, merges what others wrote in the meantime and replaces the file in one step;
a reader sees the old file or the new one. A file that cannot be read is set aside, with a warning;
one of an earlier format counts as empty, since its keys do not say enough.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from oss_fused.errors import SchemeError
from oss_fused.tuning.space import Config

FORMAT = 2
_EARLIER_FORMATS = (1,)
# what reading a damaged or foreign file raises
_CORRUPT = (ValueError, KeyError, TypeError, AttributeError)


def default_path() -> Path:
    """``$XDG_CACHE_HOME/oss_fused/tuning.json``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "oss_fused" / "tuning.json"


def versions() -> str:
    """Versions that a config's speed depends on, e.g. ``torch2.11.0-triton3.6.0``."""
    found = []
    for package in ("torch", "triton"):
        try:
            found.append(f"{package}{metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package}-none")
    return "-".join(found)


@dataclass(frozen=True)
class CacheKey:
    """What a tuned config is valid for; ``str(key)`` is its name in the file.

    ``dtype`` lists the dtypes of all tensors in order, ``kernel`` is what ``kernel_identity``
    says, ``objective`` what was minimised.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    versions: str = field(default_factory=versions)
    kernel: str = ""
    objective: str = "latency"

    def __str__(self) -> str:
        """``operation|kernel|MxNxK:dtypes|objective|device|versions``."""
        sizes = "x".join(str(size) for size in self.shape)
        parts = (self.operation, self.kernel, f"{sizes}:{self.dtype}", self.objective)
        return "|".join((*parts, self.device, self.versions))

    def family(self) -> CacheKey:
        """Everything but the shape."""
        return replace(self, shape=())


@dataclass(frozen=True)
class CacheEntry:
    """A tuned config with its score (lower is better), metrics and the configs that cannot run."""

    key: CacheKey
    config: Config
    score: float
    metrics: dict[str, Any]
    impossible: tuple[Config, ...] = ()
    tuned_at: str = ""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> CacheEntry:
        """Rebuild an entry; raises TypeError, KeyError or ValueError where it is malformed."""
        key = CacheKey(**{**raw["key"], "shape": tuple(int(s) for s in raw["key"]["shape"])})
        config = {str(name): int(value) for name, value in raw["config"].items()}
        impossible = tuple(dict(c) for c in raw["impossible"])
        score = float(raw["score"])
        if score != score:
            raise ValueError("score is NaN")
        return cls(key, config, score, dict(raw["metrics"]), impossible, str(raw["tuned_at"]))


class TuningCache:
    """The entries of one cache file; reads are lazy, and again when the file has changed."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Use ``path``, by default ``default_path()``; nothing is read yet."""
        self.path = Path(path) if path is not None else default_path()
        self._entries: dict[str, CacheEntry] = {}
        self._stamp: tuple[int, int, int] | None = None

    def entries(self) -> dict[str, CacheEntry]:
        """Every valid entry by the text of its key."""
        stamp = self._file_stamp()
        if stamp != self._stamp:
            self._entries = self._read_unlocked() if stamp else {}
            self._stamp = self._file_stamp()
        return dict(self._entries)

    def read(self) -> dict[str, CacheEntry]:
        """Every entry by the text of its key; unlike ``entries``, never sets the file aside.

        Raises:
            SchemeError: the file is no cache, or cannot be read.
        """
        try:
            return self._parse()
        except (*_CORRUPT, OSError) as error:
            raise SchemeError(
                f"{self.path}: not a tuning cache ({type(error).__name__}: {error}); expected a "
                f"file that a tuner wrote"
            ) from None

    def get(self, key: CacheKey) -> CacheEntry | None:
        """The entry of exactly this key, or None."""
        return self.entries().get(str(key))

    def family(self, key: CacheKey) -> list[CacheEntry]:
        """Entries of other shapes of the same operation, nearest shape first."""
        found = [
            entry
            for entry in self.entries().values()
            if entry.key.family() == key.family() and entry.key.shape != key.shape
        ]
        return sorted(found, key=lambda entry: _shape_distance(entry.key.shape, key.shape))

    def put(self, entry: CacheEntry) -> None:
        """Store ``entry`` in the file, replacing one of the same key."""
        entry = CacheEntry(**{**_fields(entry), "tuned_at": entry.tuned_at or _now()})
        self._update({str(entry.key): entry}, keep_better=False)

    def merge(self, other: str | Path | TuningCache) -> int:
        """Take over entries of another file that are new or better; returns how many.

        Raises:
            SchemeError: the file is no cache; it is another's, and stays where it is.
        """
        if isinstance(other, TuningCache):
            return self._update(other.entries(), keep_better=True)
        return self._update(TuningCache(other).read(), keep_better=True)

    def _update(self, new: dict[str, CacheEntry], keep_better: bool) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            entries = self._read() if self.path.exists() else {}
            taken = {
                name: entry
                for name, entry in new.items()
                if not (keep_better and name in entries and entries[name].score <= entry.score)
            }
            entries.update(taken)
            self._write(entries)
            self._entries, self._stamp = entries, self._file_stamp()
        return len(taken)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.path.with_name(self.path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _file_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read_unlocked(self) -> dict[str, CacheEntry]:
        try:
            return self._parse()
        except _CORRUPT:
            # a writer may have replaced the file since: look again before it is set aside
            with self._locked():
                return self._read()

    def _read(self) -> dict[str, CacheEntry]:
        try:
            return self._parse()
        except _CORRUPT as error:
            self._set_aside(error)
            return {}

    def _parse(self) -> dict[str, CacheEntry]:
        try:
            raw = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        if raw["format"] in _EARLIER_FORMATS:
            return {}
        if raw["format"] != FORMAT:
            raise ValueError(f"format={raw['format']!r}, expected {FORMAT}")
        entries = [CacheEntry.from_json(item) for item in raw["entries"].values()]
        return {str(entry.key): entry for entry in entries}

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
        self.path.rename(aside)
        warnings.warn(
            f"{self.path}: not a tuning cache ({type(error).__name__}: {error}); "
            f"kept as {aside.name}, tuning starts empty",
            RuntimeWarning,
            stacklevel=3,
        )

    def _write(self, entries: dict[str, CacheEntry]) -> None:
        document = {
            "format": FORMAT,
            "entries": {name: asdict(entries[name]) for name in sorted(entries)},
        }
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            # a full disk leaves no half-written file beside the cache
            os.unlink(temporary)
            raise


def _fields(entry: CacheEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in CacheEntry.__dataclass_fields__}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _shape_distance(a: Sequence[int], b: Sequence[int]) -> float:
    if len(a) != len(b):
        return float("inf")
    return sum(
        abs(max(x, 1) / max(y, 1) - 1) + abs(max(y, 1) / max(x, 1) - 1) for x, y in zip(a, b)
    )
