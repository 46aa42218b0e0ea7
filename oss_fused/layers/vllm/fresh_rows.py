# SPDX-License-Identifier: MIT
"""Steps in which every sequence begins: their own rows hold all keys and values.

Attention of such a step need not read the cache: keys and values are in memory as rows, which
FlashAttention 3 reads faster than pages of 16 positions. A step's attention metadata may therefore
say that it is one (plugin/model_state.py decides). The cache is written as in any other step.
"""

from __future__ import annotations

from typing import Any

_NOTED = "oss_fresh"


def note_fresh(metadata: Any) -> None:
    """Say that no sequence of a step has tokens before it.

    Args:
        metadata: of attention layers of the step.
    """
    setattr(metadata, _NOTED, True)


def is_fresh(metadata: Any) -> bool:
    """Whether ``note_fresh`` said so."""
    return getattr(metadata, _NOTED, False)
