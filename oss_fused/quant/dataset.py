# SPDX-License-Identifier: MIT
"""Calibration samples from a file of text or of JSON lines."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError, DatasetError

JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
# name of the dataset that every machine has: this Python's documentation and sources
PYTHON = "python"
_PYTHON_MODULES = ("argparse.py", "asyncio/tasks.py", "json/decoder.py", "logging/__init__.py")
# a shorter sample has too few tokens to measure activations
MIN_TOKENS = 2


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        CheckpointError: the folder has none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"{folder}: cannot load a tokenizer: {error}") from error


def file_digest(path: str | Path) -> str:
    """Hash of a dataset's bytes.

    Raises:
        DatasetError: the file cannot be read.
    """
    data = python_text().encode() if str(path) == PYTHON else _read(Path(path))
    return hashlib.sha256(data).hexdigest()


def python_text() -> str:
    """English prose about Python and Python code, half each, from the running interpreter."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join((library / name).read_text() for name in _PYTHON_MODULES)
    prose = "\n\n".join(topics[name] for name in sorted(topics))[: len(code)]
    return prose + "\n\n" + code


def load_samples(
    path: str | Path, tokenizer: Any, num_samples: int, max_seq_length: int, seed: int
) -> list[torch.Tensor]:
    """Samples as token ids, each [T] int64 with 2 <= T <= max_seq_length.

    The dataset "python" is ``python_text()``. A text file is cut into windows of
    ``max_seq_length`` tokens. A JSON-lines file has one sample per line: ``{"text": ...}``, or
    ``{"messages": [{"role", "content"}, ...]}`` through the tokenizer's chat template; long ones
    are truncated. ``seed`` chooses among them.

    Raises:
        DatasetError: the file is missing, empty, malformed (names the line) or too short.
    """
    path = Path(path)
    try:
        text = python_text() if str(path) == PYTHON else _read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"--dataset={str(path)!r}: expected UTF-8 text: {error}") from None
    if not text.strip():
        raise DatasetError(f"--dataset={str(path)!r}: the file is empty")
    if path.suffix.lower() in JSON_SUFFIXES:
        samples = [_tokens(path, number, row, tokenizer) for number, row in _rows(path, text)]
    else:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        windows = [ids[i : i + max_seq_length] for i in range(0, len(ids), max_seq_length)]
        # dropped: a short window would count as much as a full one
        samples = [w for w in windows if len(w) == max_seq_length] or windows
    return _choose(path, samples, num_samples, max_seq_length, seed)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(
            f"--dataset={str(path)!r}: cannot be read: {error.strerror}; expected a file of text "
            f"or of JSON lines"
        ) from None


def _rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    # not splitlines(): JSON strings may hold U+2028, U+0085 and others that it takes for line ends
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not {"text", "messages"} & row.keys():
            raise DatasetError(
                f"{path}, line {number}: expected an object with 'text' or 'messages', found "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__}"
            )
        rows.append((number, row))
    return rows


def _tokens(path: Path, number: int, row: dict[str, Any], tokenizer: Any) -> list[int]:
    if "messages" not in row:
        if not isinstance(row["text"], str):
            raise DatasetError(f"{path}, line {number}: 'text' is no string")
        text = _characters(path, number, row["text"])
        return list(tokenizer(text, verbose=False)["input_ids"])
    messages = row["messages"]
    shaped = isinstance(messages, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    )
    if not shaped or not messages:
        raise DatasetError(
            f"{path}, line {number}: 'messages' is no list of objects with 'role' and 'content'"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        raise DatasetError(
            f"{path}, line {number}: the model's chat template refuses it: {error}"
        ) from error
    text = _characters(path, number, text)
    # the template writes the special tokens itself
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _characters(path: Path, number: int, text: str) -> str:
    """``text``, unless it holds half a surrogate pair, which JSON can write but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{path}, line {number}: the text holds {text[error.start]!r}, half of a surrogate "
            f"pair; expected whole characters"
        ) from None
    return text


def _choose(
    path: Path, samples: list[list[int]], num_samples: int, max_seq_length: int, seed: int
) -> list[torch.Tensor]:
    usable = [sample[:max_seq_length] for sample in samples if len(sample) >= MIN_TOKENS]
    if not usable:
        raise DatasetError(
            f"--dataset={str(path)!r}: no sample has {MIN_TOKENS} tokens or more; expected text"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(usable), generator=generator)[:num_samples]
    return [torch.tensor(usable[i]) for i in sorted(order.tolist())]
