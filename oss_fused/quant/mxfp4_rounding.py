# SPDX-License-Identifier: MIT
"""Rounding of experts to MXFP4: exponents, error feedback, and blocks kept from a base checkpoint.

A base is the MXFP4 checkpoint that was fine-tuned. Where the fine-tune left every value of a block
within half a step of the base's, the block keeps the base's codes and scale bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import E8M0_BIAS, MXFP4_BLOCK, MXFP4_MAX
from oss_fused.quant.mxfp4 import (
    e2m1_codes,
    join_nibbles,
    least_error_exponents,
    pack_mxfp4,
    round_e2m1,
    unpack_mxfp4,
)
from oss_fused.quant.rounding import InputBasis, feedback, output_error, refine
from oss_fused.quant.skeleton import ModelSkeleton

Packed = tuple[torch.Tensor, torch.Tensor]
# half a step above the largest value
_WITHIN = MXFP4_MAX + 1.0


@dataclass(frozen=True)
class KeptBlocks:
    """Blocks of a base's weight [N, K], and which of them a fine-tuned weight keeps.

    Attributes:
        kept: [N, K/32] bool.
        blocks: [N, K/32, 16] uint8.
        scales: [N, K/32] uint8.
    """

    kept: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def exponents(self) -> torch.Tensor:
        """Of the base, [N, K/32] int32."""
        return self.scales.int() - E8M0_BIAS


def find_kept(weight: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> KeptBlocks:
    """The blocks of ``weight`` [N, K] that round to a base's codes at the base's scales."""
    exponents = (scales.int() - E8M0_BIAS).clamp_(max=E8M0_BIAS)
    rounded = unpack_mxfp4(*pack_mxfp4(weight, exponents), torch.float32)
    # equal values, not equal codes: zero has two
    same = rounded == unpack_mxfp4(blocks, scales, torch.float32)
    limit = torch.ldexp(torch.full_like(scales, _WITHIN, dtype=torch.float32), exponents)
    groups = weight.float().abs().unflatten(-1, (-1, MXFP4_BLOCK))
    kept = same.unflatten(-1, (-1, MXFP4_BLOCK)).all(-1) & (groups.amax(-1) <= limit)
    return KeptBlocks(kept, blocks, scales)


def round_to_mxfp4(
    weight: torch.Tensor,
    exponents: torch.Tensor | None = None,
    kept: KeptBlocks | None = None,
) -> Packed:
    """Blocks and scales of ``weight`` [N, K]: rounded to nearest at ``exponents``, or kept."""
    blocks, scales = pack_mxfp4(weight, exponents)
    if kept is not None:
        blocks = torch.where(kept.kept.unsqueeze(-1), kept.blocks, blocks)
        scales = torch.where(kept.kept, kept.scales, scales)
    return blocks, scales


def round_to_mxfp4_with_feedback(
    weight: torch.Tensor, basis: InputBasis, kept: KeptBlocks | None = None
) -> Packed:
    """Blocks and scales of ``weight`` that keep the outputs: GPTQ on the e2m1 grid, refined.

    Exponents are those of least squared error, each input weighed by its power, and stay while the
    columns are rounded. No row is worse than without feedback for inputs with these moments.

    Args:
        weight: [N, K].
        basis: of the inputs [K].
        kept: blocks that stay as they are; the others make up for their error.

    Raises:
        ShapeMismatchError: the basis does not belong to the weight, or K is no multiple of 32.
        NumericalOverflowError: the weight holds NaN or Inf.
    """
    weight = weight.float()
    exponents = least_error_exponents(weight, basis.moments.diagonal())
    plain = round_to_mxfp4(weight, exponents, kept)
    if basis.factor is None:
        return plain
    scales = plain[1]
    scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS).t()
    inverse, order = scale.reciprocal(), basis.order.tolist()
    fixed = None if kept is None else (kept.kept.t(), unpack_mxfp4(*plain, torch.float32).t())

    def round_column(place: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = order[place]
        block = at // MXFP4_BLOCK
        values = round_e2m1(column * inverse[block])
        if fixed is not None:
            values = torch.where(fixed[0][block], fixed[1][at] * inverse[block], values)
        return values, values * scale[block]

    columns = weight.t().index_select(0, basis.order)
    values = feedback(columns.clone(), basis.factor, round_column, torch.float32)
    rounded = values * scale.index_select(0, basis.order // MXFP4_BLOCK)
    refine(values, rounded, columns, basis.damped, round_column)
    codes = e2m1_codes(values.index_select(0, basis.order.argsort())).t()
    blocks = join_nibbles(codes.unflatten(-1, (-1, MXFP4_BLOCK)))
    ours, theirs = (
        output_error(weight, unpack_mxfp4(found, scales, torch.float32), basis.moments)
        for found in (blocks, plain[0])
    )
    return torch.where((ours < theirs)[:, None, None], blocks, plain[0]), scales


@dataclass(frozen=True)
class Mxfp4Rounder:
    """Rounds the experts of a model.

    Attributes:
        exponents: of blocks without feedback: those of the largest values ("nearest") or of least
            squared error ("mse").
        base: checkpoint whose blocks are kept where they can be.
    """

    exponents: Literal["nearest", "mse"] = "mse"
    base: CheckpointReader | None = None

    def kept(self, weight: torch.Tensor, name: str, expert: int) -> KeptBlocks | None:
        """What an expert's ``weight`` [N, K] of the tensor ``name`` keeps, None without a base."""
        if self.base is None:
            return None
        stored = (self.base.read(f"{name}_{part}", expert) for part in ("blocks", "scales"))
        return find_kept(weight, *(part.to(weight.device) for part in stored))

    def round(self, weight: torch.Tensor, name: str, expert: int) -> Packed:
        """Blocks and scales of an expert without feedback.

        Raises:
            NumericalOverflowError: the weight holds NaN or Inf.
        """
        exponents = least_error_exponents(weight) if self.exponents == "mse" else None
        return round_to_mxfp4(weight, exponents, self.kept(weight, name, expert))

    def count_base(self, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> int:
        """How many blocks of a whole tensor are the base's, bit for bit."""
        if self.base is None:
            return 0
        same = 0
        for expert in range(len(blocks)):
            equal = (blocks[expert] == self.base.read(f"{name}_blocks", expert)).all(-1)
            equal &= scales[expert] == self.base.read(f"{name}_scales", expert)
            same += int(equal.sum())
        return same


LEAST_ERROR = Mxfp4Rounder()


def open_base(folder: str, skeleton: ModelSkeleton) -> CheckpointReader:
    """The MXFP4 checkpoint in ``folder``, from which the model of ``skeleton`` was fine-tuned.

    Raises:
        CheckpointError: it is missing or damaged, or lacks the model's experts in MXFP4; names the
            tensor.
    """
    flag = f"--base={folder!r}"
    try:
        reader = CheckpointReader(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{flag}: {str(error).removeprefix(f'MODEL={folder!r}: ')}") from None
    config = skeleton.config
    hidden, inner = config.hidden_size, config.intermediate_size
    for module in skeleton.expert_modules():
        parts = (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner))
        for part, rows, columns in parts:
            shape = (skeleton.expert_count, rows, columns // MXFP4_BLOCK)
            for name, expected in (
                (f"{module}.{part}_blocks", (*shape, MXFP4_BLOCK // 2)),
                (f"{module}.{part}_scales", shape),
            ):
                if name not in reader:
                    raise CheckpointError(
                        f"{flag}: has no tensor {name!r}; expected the MXFP4 checkpoint that MODEL "
                        f"was fine-tuned from"
                    )
                found = (reader.dtype(name), reader.shape(name))
                if found != (torch.uint8, expected):
                    raise CheckpointError(
                        f"{flag}: tensor {name!r} is {found[0]} {found[1]}; MODEL needs "
                        f"{torch.uint8} {expected}"
                    )
    return reader
