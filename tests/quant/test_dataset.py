# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oss_fused.errors import CheckpointError, DatasetError
from oss_fused.quant.dataset import file_digest, load_samples, load_tokenizer


@pytest.fixture
def tokenizer(models: Callable[[str], Path]):
    return load_tokenizer(models("llama"))


def write(tmp_path: Path, name: str, content: str) -> Path:
    path = tmp_path / name
    path.write_text(content)
    return path


def test_text_is_cut_into_windows_chosen_by_seed(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path, "a.txt", "abcdefghij" * 10 + "rest")
    samples = load_samples(path, tokenizer, 4, 10, seed=0)
    assert [len(s) for s in samples] == [10] * 4 and samples[0].dtype is torch.int64
    again = load_samples(path, tokenizer, 4, 10, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(samples, again))
    assert tokenizer.decode(samples[0]) == "abcdefghij"
    assert len(load_samples(path, tokenizer, 100, 10, seed=0)) == 10


def test_a_text_shorter_than_a_window_is_one_sample(tmp_path: Path, tokenizer) -> None:
    assert len(load_samples(write(tmp_path, "a.txt", "abc"), tokenizer, 4, 512, 0)[0]) == 3


def test_json_lines_with_text_and_messages(tmp_path: Path, tokenizer) -> None:
    rows = [
        {"text": "hello world"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    ]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    samples = load_samples(path, tokenizer, 5, 9, 0)
    texts = [tokenizer.decode(sample) for sample in samples]
    assert texts == ["hello wor", "user: hi\n"]


def test_json_lines_end_at_newlines_only(tmp_path: Path, tokenizer) -> None:
    # JSON allows these in strings, and json.dumps(ensure_ascii=False) keeps them
    text = "a\u2028b\u2029c\x85d"
    lines = [json.dumps({"text": text}, ensure_ascii=False)] * 2
    path = write(tmp_path, "a.jsonl", "\r\n".join(lines))
    assert len(load_samples(path, tokenizer, 5, 20, 0)) == 2


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "hello"}\n')
    assert tokenizer.decode(load_samples(path, tokenizer, 5, 20, 0)[0]) == "hello"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "the file is empty"),
        ("a.txt", " \n ", "the file is empty"),
        ("a.txt", "x", "no sample has 2 tokens"),
        ("a.jsonl", '{"text": "ok"}\n{"text": ', "line 2: not JSON"),
        ("a.jsonl", '{"prompt": "x"}', r"line 1: expected an object.*\['prompt'\]"),
        ("a.jsonl", "[1]", "line 1: expected an object.*list"),
        ("a.jsonl", '{"text": 3}', "'text' is no string"),
        ("a.jsonl", '{"messages": "hi"}', "'messages' is no list"),
        ("a.jsonl", '{"messages": []}', "'messages' is no list"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "'messages' is no list"),
        ("a.jsonl", '{"text": "ok"}\n{"text": "a \\ud800"}', r"line 2: .* '\\ud800', half of a"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "\\udfff"}]}',
            r"line 1: .* '\\udfff', half of a surrogate",
        ),
        ("a.jsonl", '{"text": "ok"}\n' + "[" * 10**6, "line 2: not JSON: maximum recursion"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, tokenizer, name, content, message) -> None:
    with pytest.raises(DatasetError, match=message):
        load_samples(write(tmp_path, name, content), tokenizer, 2, 8, 0)


def test_missing_and_binary_files_are_named(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(DatasetError, match=r"--dataset='.*none\.txt': cannot be read"):
        load_samples(tmp_path / "none.txt", tokenizer, 2, 8, 0)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="expected UTF-8"):
        load_samples(tmp_path / "b.txt", tokenizer, 2, 8, 0)


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer) -> None:
    tokenizer.chat_template = None
    path = write(tmp_path, "a.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(DatasetError, match="line 1: the model's chat template refuses it"):
        load_samples(path, tokenizer, 2, 8, 0)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)


def test_the_python_dataset_needs_no_file(tokenizer) -> None:
    samples = load_samples("python", tokenizer, 3, 64, 0)
    assert [len(sample) for sample in samples] == [64] * 3
    assert file_digest("python") == file_digest("python")


def test_the_seed_chooses_and_the_order_stays_that_of_the_file(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path, "a.txt", string.ascii_letters)
    chosen = {
        seed: [tokenizer.decode(s) for s in load_samples(path, tokenizer, 8, 4, seed)]
        for seed in range(4)
    }
    assert len({tuple(texts) for texts in chosen.values()}) == 4
    for texts in chosen.values():
        assert texts == sorted(texts, key=string.ascii_letters.index)


def test_the_suffix_of_json_lines_may_be_in_capitals(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path, "A.JSONL", '{"text": "hello"}\n')
    assert tokenizer.decode(load_samples(path, tokenizer, 2, 20, 0)[0]) == "hello"


class WithBegin:
    """A tokenizer that puts a token 1 before a text unless it is told not to."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict], tokenize: bool) -> str:
        return "\x01" + messages[0]["content"]


def test_special_tokens_stand_before_single_texts_only(tmp_path: Path) -> None:
    cases = {
        "a.txt": ("hi", "hi"),  # a window of a longer text begins anywhere
        "a.jsonl": ('{"text": "hi"}', "\x01hi"),
        "b.jsonl": ('{"messages": [{"role": "user", "content": "hi"}]}', "\x01hi"),
    }
    for name, (content, expected) in cases.items():
        found = load_samples(write(tmp_path, name, content), WithBegin(), 1, 9, 0)
        assert [chr(i) for i in found[0].tolist()] == list(expected), name
