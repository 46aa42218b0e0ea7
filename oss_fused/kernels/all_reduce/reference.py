# SPDX-License-Identifier: MIT
"""Reference twin of ``all_reduce``: the same exchange between threads or processes of a CPU."""

from __future__ import annotations

import ctypes
import time

import torch

from oss_fused.errors import UnsupportedDeviceError

# of a block, whatever the dtype: ranks must agree on what a round of a block is
BLOCK_BYTES = 512
# the bits of an element that has not arrived: a NaN of all ones
EMPTY = -1
# integers of an element's bytes
INTEGERS = {2: torch.int16, 4: torch.int32}


def all_reduce(
    x: torch.Tensor, inboxes: torch.Tensor, rounds: torch.Tensor, rank: int
) -> torch.Tensor:
    """See kernels/all_reduce for the contract.

    Raises:
        UnsupportedDeviceError: x is not on a CPU, whose addresses this process can read.
    """
    if x.device.type != "cpu":
        raise UnsupportedDeviceError(
            f"x.device={x.device}: the reference of all_reduce expects a CPU"
        )
    kind = INTEGERS[x.itemsize]
    block, blocks = BLOCK_BYTES // x.itemsize, rounds.numel()
    capacity, world = blocks * block, inboxes.numel()
    own = x.reshape(-1)
    views = [tensor_at(address, 2 * world * capacity, kind) for address in inboxes.tolist()]
    summed = torch.empty_like(own)
    for start in range(0, x.numel(), block):
        number, piece = start // block % blocks, own[start : start + block]
        places = slice(number * block, number * block + len(piece))
        turn = int(rounds[number]) % 2
        bits = piece.view(kind)
        sent = torch.where(bits == EMPTY, torch.iinfo(kind).max, bits)
        for peer in range(world):
            if peer != rank:
                views[peer].view(2, world, capacity)[turn, rank, places] = sent
        total = torch.full((len(piece),), -0.0)
        for source in range(world):
            part = piece
            if source != rank:
                here = views[rank].view(2, world, capacity)[turn, source, places]
                while (here == EMPTY).any():
                    time.sleep(0)
                part = here.clone().view(x.dtype)
                here.fill_(EMPTY)
            total += part.float()
        summed[start : start + block] = total.to(x.dtype)
        rounds[number] += 1
    return summed.view(x.shape)


def tensor_at(address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [elements] over a CPU's memory, which it does not own."""
    memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
