# SPDX-License-Identifier: MIT
"""Reads an HF checkpoint folder lazily: one tensor at a time, each checked as it is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oss_fused.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_NAME = 512
_CHUNK = 1 << 26  # elements checked at once, so that the check needs little memory
# the NaN of e8m0, the exponents of MXFP4 blocks
_E8M0_NAN = 255
_HASHED = 1 << 24  # bytes read at once for the digest
SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_KNOWN_DTYPES = {**SOURCE_DTYPES, "U8": torch.uint8, "I64": torch.int64, "I32": torch.int32}
_FP8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn}


class CheckpointReader:
    """The tensors of a folder with ``model.safetensors`` or shards and their index."""

    def __init__(
        self,
        folder: str | Path,
        quantised: bool = False,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Open the shards and read their headers.

        Args:
            folder: the checkpoint.
            quantised: FP8 tensors are welcome.
            config: the model's; read from config.json, if None.

        Raises:
            CheckpointError: the folder, its config, index or a shard is missing or damaged; names
                file and tensor.
        """
        self.folder = Path(folder)
        self._quantised = quantised
        self._known = {**_KNOWN_DTYPES, **(_FP8_DTYPES if quantised else {})}
        if not self.folder.is_dir():
            raise CheckpointError(
                f"MODEL={str(folder)!r}: no such folder; expected a local Hugging Face checkpoint "
                f"(fetch one with: hf download ORG/NAME --local-dir DIR)"
            )
        for name in ("config.json", INDEX):
            check_link(self.folder, self.folder / name)
        self.config = read_json(self.folder / "config.json") if config is None else config
        self._files: dict[str, str] = self._locate()
        self._open: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._check_shards()

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._files)

    def stored_names(self) -> list[str]:
        """Every tensor's name in the files, sorted; a subclass may show them under others."""
        return sorted(self._files)

    def __contains__(self, name: object) -> bool:
        """True if the checkpoint holds a tensor of that name."""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the shard's header."""
        self._file_of(name)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the shard's header."""
        path = self._file_of(name)
        code = self._dtypes[name]
        if code not in self._known:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {code}: expected "
                f"{', '.join(self._known)}; is the checkpoint quantised already?"
            )
        return self._known[code]

    def file(self, name: str) -> Path:
        """The shard that holds a tensor, for messages."""
        return self._file_of(name)

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor holds FP8 codes; other dtypes, unknown ones too, are False."""
        self._file_of(name)
        return self._dtypes[name] in _FP8_DTYPES

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, or its ``index``-th slice along the first dimension.

        Raises:
            CheckpointError: no such tensor, or it holds NaN or Inf, which is 255 in block scales of
                MXFP4 experts.
        """
        path = self._file_of(name)
        self.dtype(name)
        handle = self._handle(path)
        try:
            tensor = handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {name!r}: {error}") from None
        if tensor.is_floating_point() and tensor.itemsize > 1:
            flat = tensor.reshape(-1)
            if not all(part.isfinite().all() for part in flat.split(_CHUNK)):
                raise CheckpointError(
                    f"{path}: tensor {name!r} holds NaN or Inf; expected finite numbers"
                )
        elif name.endswith("_proj_scales") and bool((tensor == _E8M0_NAN).any()):
            raise CheckpointError(
                f"{path}: tensor {name!r} holds {_E8M0_NAN}, the NaN of e8m0; expected finite "
                f"block scales"
            )
        return tensor

    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(path.stat().st_size for path in self._paths())

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint, in this place, from another."""
        digest = self.digest()  # names a shard that is missing or damaged by now
        files = {path.name: path.stat() for path in self._paths()}
        return {
            "digest": digest,
            "files": {name: [s.st_size, s.st_mtime_ns] for name, s in sorted(files.items())},
        }

    def digest(self) -> str:
        """Hash of config.json and of each tensor's name, dtype, shape and bytes as they are now."""
        total = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in self._paths():
            try:
                self._add_to_digest(path, total.update)
            except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
                raise CheckpointError(
                    f"{path}: cannot be read as safetensors any more: {error}; expected a "
                    f"checkpoint that nobody writes"
                ) from None
        return total.hexdigest()

    def _add_to_digest(self, path: Path, update: Callable[[bytes], None]) -> None:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
            for name in sorted(name for name in header if name in self._files):
                entry = header[name]
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                update(f"\n{name} {entry['dtype']} {entry['shape']}\n".encode())
                file.seek(start)
                for at in range(start, stop, _HASHED):
                    data = file.read(min(_HASHED, stop - at))
                    if len(data) < min(_HASHED, stop - at):
                        raise ValueError(f"ends inside tensor {name!r}")
                    update(data)

    def _paths(self) -> list[Path]:
        return sorted({self.folder / file for file in self._files.values()})

    def _file_of(self, name: str) -> Path:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        return self.folder / self._files[name]

    def _locate(self) -> dict[str, str]:
        index = self.folder / INDEX
        if not index.exists():
            return self._locate_without_index()
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected an object 'weight_map' of tensor -> file")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise CheckpointError(
                    f"{index}: tensor {name!r} is said to lie in {file!r}; expected the name of a "
                    f"file of this folder"
                )
        return weight_map

    def _locate_without_index(self) -> dict[str, str]:
        """The one file, or every shard as vLLM loads them; Mistral's own where there are no others.

        vLLM also loads other files beside the one file.
        """
        found = sorted(self.folder.glob("*.safetensors"))
        shards = [path for path in found if not path.name.startswith("consolidated")] or found
        if not self._quantised and self.folder / SINGLE in shards:
            shards = [self.folder / SINGLE]
        if not shards:
            pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in _PICKLES)
            here = f"{pickles[0]}, a pickle that could run code" if pickles else "neither"
            raise CheckpointError(f"{self.folder}: expected {SINGLE} or {INDEX}, found {here}")
        files: dict[str, str] = {}
        for path in shards:
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path}: is no file")
            check_link(self.folder, path)
            with self._open_file(path) as handle:
                names = handle.keys()
                for name in names:
                    if name in files:
                        raise CheckpointError(
                            f"{path}: tensor {name!r} is stored twice; {files[name]} has it too"
                        )
                    files[name] = path.name
        return files

    def _check_shards(self) -> None:
        """Open every shard, so that a missing or truncated one is found before work starts."""
        for path in self._paths():
            if not path.is_file():
                raise CheckpointError(f"{path}: shard is missing; the index names it")
        for path in self._paths():
            check_link(self.folder, path)
            handle = self._handle(path)
            present = set(handle.keys())
            _check_header(path, present)
            for name in present:
                if self._files.get(name, path.name) != path.name:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is stored twice; the index says it lies in "
                        f"{self._files[name]}"
                    )
            for name, file in self._files.items():
                if file != path.name:
                    continue
                if name not in present:
                    raise CheckpointError(f"{path}: tensor {name!r} is missing; the index names it")
                piece = handle.get_slice(name)
                self._shapes[name] = tuple(piece.get_shape())
                self._dtypes[name] = piece.get_dtype()

    def _handle(self, path: Path) -> Any:
        if path.name not in self._open:
            self._open[path.name] = self._open_file(path)
        return self._open[path.name]

    @staticmethod
    def _open_file(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not safetensors: {error}") from None


def check_link(folder: Path, path: Path) -> Path:
    """Refuse a link out of the checkpoint; in the hub's cache files are links into ../../blobs.

    Returns:
        Where ``path`` leads.

    Raises:
        CheckpointError: names the link and where it leads.
    """
    root, target = folder.resolve(), Path(os.path.realpath(path))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    if not target.is_relative_to(root):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside the checkpoint; expected a file of this folder"
        )
    if path.is_symlink() and not target.exists():
        raise CheckpointError(f"{path}: is a link to {target}, which is missing")
    return target


def _check_header(path: Path, names: set[str]) -> None:
    """Refuse what the safetensors library lets pass: odd names, and names that come twice."""
    for name in names:
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise CheckpointError(
                f"{path}: tensor name {name[:40]!r}: expected at most {_MAX_NAME} printable "
                f"characters"
            )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        if twice:
            raise CheckpointError(f"{path}: the header names {twice[0]!r} twice; expected it once")
        return dict(pairs)

    with path.open("rb") as file:  # the library has checked the length
        (length,) = struct.unpack("<Q", file.read(8))
        json.loads(file.read(length), object_pairs_hook=unique)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, or it holds something else, or a number that is not finite.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is no file; expected an HF checkpoint")
    try:
        value = json.loads(path.read_text(), parse_constant=_number, parse_float=_number)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file is missing; expected an HF checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
