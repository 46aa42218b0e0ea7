# SPDX-License-Identifier: MIT
"""Experts between the ways of storing them: MXFP4, FP8 per expert, bf16.

All are read as the matrix [outputs, inputs] of one expert. Gate and up rows stay interleaved, as
gpt-oss has them; families whose experts are linears of their own (GATED) have gates before ups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.audit import GatedExperts
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import amax_to_scale, quantize
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.mxfp4_rounding import LEAST_ERROR, Mxfp4Rounder

Rounded = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
_NONE: Rounded = {}
_CPU = torch.device("cpu")
PARTS = (("gate_up_proj", "w13"), ("down_proj", "w2"))


def read_expert(
    reader: CheckpointReader,
    module: str,
    part: str,
    expert: int,
    device: torch.device = _CPU,
    gated: GatedExperts | None = None,
) -> torch.Tensor:
    """Weight [outputs, inputs] of one expert; exact in the dtype it comes in (bf16 for MXFP4)."""
    if gated is not None:
        names = linears_of(gated, part)
        linears = [reader.read(f"{module}.{expert}.{name}.weight") for name in names]
        return torch.cat(linears).to(device)
    prefix = f"{module}.{part}"
    if f"{prefix}_blocks" in reader:
        weight = unpack_mxfp4(
            reader.read(f"{prefix}_blocks", expert).to(device),
            reader.read(f"{prefix}_scales", expert).to(device),
        )
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{reader.folder}: tensors '{prefix}_blocks' and '{prefix}_scales' stand for "
                f"weights above what bfloat16 holds; expected finite weights"
            )
        return weight
    return reader.read(prefix, expert).to(device).t().contiguous()


def read_fp8_experts(
    reader: CheckpointReader, module: str, count: int, gated: GatedExperts | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of a module of FP8 experts as ``convert_experts`` takes them; or nothing."""
    found = {}
    for expert, (part, short) in itertools.product(range(count), PARTS):
        own = f"{module}.{expert}"
        names = [f"{own}.{short}_weight"]
        if gated is not None:
            names = [f"{own}.{name}.weight" for name in linears_of(gated, part)]
        if f"{names[0]}_scale" in reader:
            # torch joins no float8: join the bytes
            codes = torch.cat([reader.read(name).view(torch.uint8) for name in names])
            scale = torch.cat([reader.read(f"{name}_scale") for name in names])
            found[f"{own}.{short}"] = (codes.view(torch.float8_e4m3fn), scale)
    return found


def linears_of(gated: GatedExperts, part: str) -> tuple[str, ...]:
    """The linears of an expert that make up "gate_up_proj" or "down_proj"."""
    return (gated.gate, gated.up) if part == "gate_up_proj" else (gated.down,)


def expert_to_fp8(weight: torch.Tensor, from_mxfp4: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [N, 1] of a weight [N, K].

    MXFP4 values have one mantissa bit and a power of two for a scale: with such a scale E4M3 holds
    them exactly, as long as a row's blocks lie within 14 binades.
    """
    if not from_mxfp4:
        return quantize(weight, "channel")
    scale = amax_to_scale(weight.float().abs().amax(-1, keepdim=True))
    mantissa, exponent = torch.frexp(scale)
    above = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return quantize(weight, "channel", above)


def convert_experts(
    reader: CheckpointReader,
    module: str,
    count: int,
    target: str,
    rounded: Rounded = _NONE,
    gated: GatedExperts | None = None,
    rounder: Mxfp4Rounder = LEAST_ERROR,
    device: torch.device = _CPU,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the output tensors of ``module`` stored as ``target``: "mxfp4", "fp8" or "bf16".

    ``rounded`` holds codes and scales by tensor name less its suffix, where calibration found
    better ones than plain rounding gives; the others that become MXFP4 are for ``rounder``.
    """
    for long, short in PARTS:
        if gated is not None:
            for expert in range(count):
                weight = read_expert(reader, module, long, expert, gated=gated)
                found = rounded.get(f"{module}.{expert}.{short}") or expert_to_fp8(weight, False)
                names = linears_of(gated, long)
                for name, q, scale in zip(names, *(part.chunk(len(names)) for part in found)):
                    yield f"{module}.{expert}.{name}.weight", q
                    yield f"{module}.{expert}.{name}.weight_scale", scale
            continue
        prefix = f"{module}.{long}"
        bias = reader.read(f"{prefix}_bias")
        if target == "fp8":
            for expert in range(count):
                own = f"{module}.{expert}.{short}"
                q, scale = rounded.get(own) or expert_to_fp8(
                    read_expert(reader, module, long, expert), f"{prefix}_blocks" in reader
                )
                yield f"{own}_weight", q
                yield f"{own}_weight_scale", scale
                yield f"{own}_bias", bias[expert].contiguous()
            continue
        if target == "bf16":
            rows = (
                read_expert(reader, module, long, e).t().to(torch.bfloat16) for e in range(count)
            )
            yield prefix, torch.stack(list(rows))
        else:
            pairs = []
            for expert in range(count):
                packed = rounded.get(f"{module}.{expert}.{short}")
                if packed is None:
                    weight = read_expert(reader, module, long, expert, device)
                    packed = rounder.round(weight, prefix, expert)
                pairs.append([part.cpu() for part in packed])
            yield f"{prefix}_blocks", torch.stack([blocks for blocks, _ in pairs])
            yield f"{prefix}_scales", torch.stack([scales for _, scales in pairs])
        yield f"{prefix}_bias", bias
