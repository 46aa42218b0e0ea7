# SPDX-License-Identifier: MIT
"""Loads of a comparison: tokens in and out of a request, and how many requests at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Cell:
    """One point of the grid: concurrent requests, tokens in and out of each, number of requests."""

    concurrency: int
    input_len: int
    output_len: int
    num_prompts: int

    @property
    def key(self) -> str:
        """Short name, such as ``c32 1024:128``."""
        return f"c{self.concurrency} {self.input_len}:{self.output_len}"


class Lengths(NamedTuple):
    """Tokens in and out of a request, and numbers of concurrent requests (none: the common).

    ``prompts`` has the number of requests for each of ``concurrency``.
    """

    inputs: int
    outputs: int
    concurrency: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()


def parse_lengths(text: str) -> Lengths:
    """Read ``INPUT:OUTPUT`` tokens, or ``INPUT:OUTPUT@N,NxP`` with concurrencies of their own.

    Raises:
        ValueError: a number is missing, or below 1.
    """
    match = re.fullmatch(r"(\d+):(\d+)(?:@(\d+(?:x\d+)?(?:,\d+(?:x\d+)?)*))?", text)
    if not match or not all(int(number) for number in re.findall(r"\d+", text)):
        raise ValueError(
            f"lengths {text!r}: expected INPUT:OUTPUT, such as 1024:128, or with concurrent "
            "requests and their number in all, such as 4096:16@1,4 or 1024:1024@256x512"
        )
    pairs = [each.partition("x") for each in match[3].split(",")] if match[3] else []
    concurrency = tuple(int(number) for number, _, _ in pairs)
    prompts = tuple(int(total or _default_prompts(int(number))) for number, _, total in pairs)
    return Lengths(int(match[1]), int(match[2]), concurrency, prompts)


def _default_prompts(concurrency: int) -> int:
    return max(8, 4 * concurrency)


def make_grid(
    lengths: Sequence[Lengths], concurrency: Sequence[int], num_prompts: Sequence[int]
) -> list[Cell]:
    """Cells for every pair of lengths and concurrency.

    Args:
        lengths: input and output tokens.
        concurrency: numbers of concurrent requests, for lengths that have none of their own.
        num_prompts: requests a cell: one number per concurrency, one for all, or none for
            four times the concurrency and at least 8.

    Raises:
        ValueError: ``num_prompts`` fits neither way, or something is listed twice: runs of a load
            are told from another's by its concurrency and lengths alone.
    """
    listed = [("concurrency", concurrency), ("lengths", lengths)]
    listed += [(f"lengths {n.inputs}:{n.outputs}", n.concurrency) for n in lengths]
    for name, values in listed:
        if len(set(values)) != len(values):
            raise ValueError(f"{name} {list(values)}: expected each value once")
    if not num_prompts:
        num_prompts = [_default_prompts(number) for number in concurrency]
    elif len(num_prompts) == 1:
        num_prompts = list(num_prompts) * len(concurrency)
    if len(num_prompts) != len(concurrency):
        raise ValueError(
            f"--num-prompts {list(num_prompts)}: expected one number, or one per concurrency "
            f"({len(concurrency)})"
        )
    common = list(zip(concurrency, num_prompts))
    cells = [
        Cell(number, each.inputs, each.outputs, prompts)
        for each in lengths
        for number, prompts in list(zip(each.concurrency, each.prompts)) or common
    ]
    keys = [cell.key for cell in cells]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise ValueError(f"lengths: give {', '.join(twice)} twice; expected each load once")
    return cells
