# SPDX-License-Identifier: MIT
"""Residual add, RMSNorm and the router's product in one launch.

A program takes one token and a few experts. It asks for their router weights, where the caller
allows it before it waits for the kernel that makes x, computes the norm of the whole row (programs
of a token repeat that: the row is 12 KB of L2) and its experts' logits. Above a few tokens
repeating costs more than a second launch: then the norm is this kernel without experts, and the
product is PyTorch's.

If attention adds little to the residual, the residual alone chooses most of the experts that the
sum chooses. Its logits are there before x is, and w13's kernel then asks L2 for first weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.moe.config import router_part
from oss_fused.kernels.moe.encode import NO_CODES, Encoded, store_row
from oss_fused.kernels.numerics import round_to, used_from_here


@triton.jit
def _normed(hidden, gain, H: tl.constexpr, eps, dtype: tl.constexpr):
    rstd = tl.rsqrt(tl.sum(hidden * hidden, 0) / H + eps)
    return round_to(round_to(hidden * rstd, dtype).to(tl.float32) * gain, dtype)


@triton.jit
def _store_logits(target, y, of_gate, shift, expert, live, dtype: tl.constexpr):
    """Logits of a program's experts for the normed row ``y``."""
    logit = tl.sum(of_gate.to(tl.float32) * y.to(tl.float32)[None, :], 1) + shift
    tl.store(target + expert, round_to(logit, dtype), mask=live)


@triton.jit
def _add_rms_norm_router_kernel(
    x,
    residual,
    weight,
    gate,
    gate_bias,
    normed,
    residual_out,
    logits,
    expected,
    rows,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    PREFETCH: tl.constexpr,
    LEVELS: tl.constexpr,
    POLICY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * H
    part = tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < H
    wait_unless(PREFETCH)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if gate is not None:
        expert = part * PART + tl.arange(0, PART)
        live = expert < EXPERTS
        gate_mask = live[:, None] & mask[None, :]
        of_gate = tl.load(gate + expert[:, None] * H + column[None, :], mask=gate_mask, other=0.0)
        shift = 0.0
        if gate_bias is not None:
            shift = tl.load(gate_bias + expert, mask=live, other=0.0).to(tl.float32)
    if expected is not None:
        before = tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
        y = _normed(before, gain, H, eps, dtype)
        _store_logits(expected, y, of_gate, shift, expert, live, dtype)
    # not before: the kernel that follows reads what is expected ahead of its own wait
    start_next()
    wait_for_inputs()
    hidden = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        hidden += tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
        hidden = round_to(hidden, dtype).to(tl.float32)
    y = _normed(hidden, gain, H, eps, dtype)
    if part == 0:
        tl.store(residual_out + row + column, hidden.to(dtype), mask=mask, eviction_policy=POLICY)
        tl.store(normed + row + column, y, mask=mask, eviction_policy=POLICY)
    if gate is not None:
        target = logits + tl.program_id(0).to(tl.int64) * EXPERTS
        _store_logits(target, y, of_gate, shift, expert, live, dtype)
    # the outer branch is decided when the kernel is compiled
    if rows.codes is not None:  # noqa: SIM102
        if part == tl.num_programs(1) - 1:
            # exchanged between threads here, not by the programs that have logits as well
            value = used_from_here(y).to(tl.float32)
            store_row(rows, tl.program_id(0), value, H, BLOCK, LEVELS, True, POLICY)


def add_rms_norm_router(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    prefetch_weights: bool = False,
    codes: Encoded = NO_CODES,
    expected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed rows, new residual and router logits; see kernels/moe for the contract.

    ``codes`` (of few tokens) are filled with the normed rows, ``expected`` [E] (of one token, with
    ``prefetch_weights``) with the logits of the residual alone.
    """
    tokens, hidden = x.shape
    experts = gate.shape[0]
    x, gate = x.contiguous(), gate.contiguous()
    normed, residual_out = torch.empty_like(x), torch.empty_like(x)
    # what is expected is ready earlier with an expert a program (0.2 us of a layer on an H200)
    part = router_part(tokens, experts) if expected is None else 1
    if tokens:
        logits = x.new_empty(tokens, experts)
        # whole chunks of codes
        block = max(128, next_power_of_2(hidden))
        parts = 1 if part is None else cdiv(experts, part)
        if codes.codes is not None:
            # a program of its own, which has no expert: it takes as long as the logits do
            parts += 1
        _add_rms_norm_router_kernel[(tokens, parts)](
            x,
            None if residual is None else residual.contiguous(),
            weight,
            gate if part else None,
            gate_bias if part else None,
            normed,
            residual_out,
            logits,
            expected,
            codes._replace(x=None),
            eps,
            H=hidden,
            BLOCK=block,
            EXPERTS=experts,
            PART=part or 8,
            PREFETCH=prefetch_weights,
            LEVELS=1 if codes.codes is None else codes.codes.shape[1],
            POLICY=activation_policy(tokens),
            num_warps=min(max(block // 512, 1), 16),
            **pdl_options(x.device),
        )
    if not (part and tokens):
        logits = F.linear(normed, gate, gate_bias)
    return normed, residual_out, logits
