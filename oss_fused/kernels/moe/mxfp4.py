# SPDX-License-Identifier: MIT
"""The expert kernels' own arrangement of MXFP4 weights: repacking at load, and its inverse.

Same codes, other places, so that a kernel turns eight e2m1 codes into eight e4m3 codes, block
scale included, with seven instructions:

- Rows come in groups of 64, columns in chunks of 128 (the last may hold 32, 64 or 96). A group's
  chunk is one contiguous piece of memory: 64 rows of 64 bytes. With ``gate_up`` a group holds 32
  gate rows (even rows of the source), then their 32 up rows.
- A 32-bit word holds eight consecutive values of a row. Nibble n has the magnitude of value n in
  its low three bits (a PRMT selector); the signs of values 0..3 are bits 7, 15, 23, 31 and those
  of values 4..7 bits 3, 11, 19, 27.
- Scales are one int32 word per row and chunk, a byte per block of 32: ``8 * (e - e_row + 11)``,
  which is what to add to the e4m3 code of ``value * 2**-5``; e_row is the row's largest e8m0
  exponent. Blocks more than 11 powers of two below the row's largest are rounded to that grid
  (an error under 2**-15 of the row's largest weight). The low two bits of the four bytes of
  chunk 0 hold e_row.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError

BLOCK = 32
ROW_GROUP = 64
CHUNK = 128
# e4m3 exponents that leave every e2m1 magnitude normal
SPREAD = 11
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)


def moe_repack_mxfp4(
    weight: torch.Tensor, scale: torch.Tensor, gate_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rearrange one layer's expert weights; see kernels/moe for the contract."""
    if weight.dim() != 3 or weight.shape[1] % ROW_GROUP or weight.shape[2] % (BLOCK // 2):
        raise ShapeMismatchError(
            f"weight.shape={tuple(weight.shape)}: expected [E, N, K/2] with N a multiple of "
            f"{ROW_GROUP} and K a multiple of {BLOCK}"
        )
    experts, rows, half = weight.shape
    columns = 2 * half
    chunks = -(-columns // CHUNK)
    packed = torch.empty_like(weight, memory_format=torch.contiguous_format)
    words = scale.new_empty((experts, rows // ROW_GROUP, chunks, ROW_GROUP), dtype=torch.int32)
    # one expert at a time: unpacked, the weights take sixteen times the memory
    for expert in range(experts):
        codes = _codes(weight[expert])
        exponents = scale[expert].int()
        if gate_up:
            codes, exponents = _group_gate_up(codes), _group_gate_up(exponents)
        codes, steps, largest = _relative_to_row(codes, exponents)
        packed[expert] = _pack(codes)
        words[expert] = _pack_scales(steps, largest, chunks)
    return packed, words


def moe_unpack_mxfp4(packed: torch.Tensor, words: torch.Tensor, gate_up: bool) -> torch.Tensor:
    """Values [N, K] float32 of one expert's ``packed`` [N, K/2] and ``words`` [N/64, C, 64]."""
    rows, half = packed.shape
    values = _unpack(packed)
    steps = words.view(rows // ROW_GROUP, -1, ROW_GROUP).permute(0, 2, 1).reshape(rows, -1, 1)
    steps = (steps >> torch.arange(0, 32, 8, device=words.device)) & 255
    pieces = steps[:, 0] & 3
    largest = (pieces << torch.arange(0, 8, 2, device=words.device)).sum(1, keepdim=True)
    steps = (steps >> 3).reshape(rows, -1)[:, : 2 * half // BLOCK]
    values = torch.ldexp(values.view(rows, -1, BLOCK), (steps - SPREAD + largest - 127)[..., None])
    values = values.masked_fill((largest == 255)[..., None], float("nan")).view(rows, -1)
    if gate_up:
        groups = values.view(-1, 2, ROW_GROUP // 2, 2 * half)
        values = groups.transpose(1, 2).reshape(rows, 2 * half)
    return values


def _codes(weight: torch.Tensor) -> torch.Tensor:
    """[N, K/2] bytes, low nibble first -> e2m1 codes [N, K]."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def _group_gate_up(x: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, ... -> groups of 32 gate rows and their 32 up rows."""
    return x.view(-1, ROW_GROUP // 2, 2, x.shape[-1]).transpose(1, 2).reshape(x.shape)


def _relative_to_row(
    codes: torch.Tensor, exponents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block exponents as steps 0..11 below the row's largest one, which is returned too."""
    blocks = codes.view(codes.shape[0], -1, BLOCK)
    # a block of zeros has no say, unless its scale is the NaN of e8m0
    counts = ((blocks & 7) != 0).any(-1) | (exponents == 255)
    largest = torch.where(counts, exponents, 0).amax(-1, keepdim=True)
    steps = SPREAD + exponents - largest
    if bool(((steps < 0) & counts).any()):
        grid = torch.tensor(_MAGNITUDES, device=codes.device)
        table = torch.stack([_round(grid * 2.0**-d, grid) for d in range(6)])
        below = (-steps).clamp(0, 5)[..., None]
        blocks = table[below, (blocks & 7).int()] | (blocks & 8)
    # a block of zeros may lie above the row's largest exponent
    return blocks.reshape(codes.shape), steps.clamp(0, SPREAD), largest


def _round(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest e2m1 magnitudes, ties to the even code."""
    distance = (values[:, None] - grid).abs()
    odd = (torch.arange(8, device=grid.device) & 1) * 1e-6
    return (distance + odd).argmin(-1).to(torch.uint8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes [N, K] in row order -> bytes [N, K/2] in the kernels' order."""
    rows, columns = codes.shape
    values = codes.view(rows, -1, 8)
    words = torch.zeros(values.shape[:-1], dtype=torch.int32, device=codes.device)
    for n, sign in enumerate(_SIGN_BITS):
        value = values[..., n].int()
        words |= ((value & 7) << (4 * n)) | ((value >> 3) << sign)
    return _chunked(words.view(torch.uint8)).view(rows, columns // 2)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``_pack``, to e2m1 values [N, K] float32."""
    rows, half = packed.shape
    words = _unchunked(packed).view(torch.int32)
    values = torch.empty(rows, half // 4, 8, device=packed.device)
    table = torch.tensor(_MAGNITUDES, device=packed.device)
    for n, sign in enumerate(_SIGN_BITS):
        magnitude = table[(words >> (4 * n)) & 7]
        values[..., n] = torch.where((words >> sign) & 1 == 1, -magnitude, magnitude)
    return values.view(rows, 2 * half)


def _chunked(rows_of_bytes: torch.Tensor) -> torch.Tensor:
    """[N, K/2] -> the same bytes as contiguous pieces of 64 rows x 64 bytes, flat."""
    groups = rows_of_bytes.view(-1, ROW_GROUP, rows_of_bytes.shape[1])
    pieces = [piece.reshape(groups.shape[0], -1) for piece in groups.split(CHUNK // 2, dim=2)]
    return torch.cat(pieces, dim=1)


def _unchunked(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``_chunked``: [N, K/2] contiguous."""
    rows, half = packed.shape
    sizes = [min(CHUNK // 2, half - at) for at in range(0, half, CHUNK // 2)]
    groups = packed.reshape(-1, ROW_GROUP * half)
    pieces = groups.split([ROW_GROUP * size for size in sizes], dim=1)
    return torch.cat(
        [piece.view(-1, ROW_GROUP, size) for piece, size in zip(pieces, sizes, strict=True)], dim=2
    ).reshape(rows, half)


def _pack_scales(steps: torch.Tensor, largest: torch.Tensor, chunks: int) -> torch.Tensor:
    """Steps [N, K/32] and e_row [N, 1] -> int32 words [N/64, C, 64]."""
    padded = steps.new_zeros((steps.shape[0], chunks * 4))
    padded[:, : steps.shape[1]] = 8 * steps
    shifts = torch.arange(4, device=steps.device)
    padded[:, :4] |= (largest >> (2 * shifts)) & 3
    words = padded.to(torch.uint8).view(torch.int32)
    return words.view(-1, ROW_GROUP, chunks).permute(0, 2, 1)
