# SPDX-License-Identifier: MIT
"""Which results stay in L2 while weights pass through it: a rule of shapes, without a compiler."""

from __future__ import annotations

# the last to leave L2, as Triton names it
EVICT_LAST = "evict_last"
# tokens of a step whose results stay: those of 256 take up to a quarter of an H200's L2
_KEPT_TOKENS = 256


def activation_policy(tokens: int) -> str:
    """Eviction policy of the results of a step of so many tokens; "" is L2's own.

    Weights push out of L2 what kernels leave there for the next ones. A residual then comes from
    memory, which is busy with weights, and the others are written to memory first. What stays is in
    the way of others when it is of no use any more, so it must be little.
    """
    return EVICT_LAST if tokens <= _KEPT_TOKENS else ""
