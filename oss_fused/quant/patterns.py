# SPDX-License-Identifier: MIT
"""Which layers a pattern of ``targets`` / ``ignore`` means, in the names of HF and of vLLM.

A pattern is ``re:`` and a regular expression (matched from the start of the name), a shell
glob, a full name, or a class name such as ``Linear``. Names may be those of the checkpoint
(``model.layers.0.self_attn.q_proj``) or those of vLLM's fused layers
(``model.layers.0.attn.qkv_proj``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from oss_fused.errors import SchemeError
from oss_fused.quant.scheme import matches_regex

T = TypeVar("T")

LINEAR = "Linear"
# vLLM's gpt-oss names attention ``attn``, the checkpoint ``self_attn``
_VLLM_ATTENTION = re.compile(r"^(.*\blayers\.\d+)\.attn(?=\.|$)")

# prefix that vLLM gives all names of a draft model
_DRAFT = "draft_model."


def spellings(name: str) -> list[str]:
    """The name as vLLM spells it and, where they differ, as the checkpoint does, which is last."""
    own = name.removeprefix(_DRAFT)
    return list(dict.fromkeys((name, own, _VLLM_ATTENTION.sub(r"\1.self_attn", own))))


def shards(prefix: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint's linears that vLLM fuses into the layer ``prefix`` (itself, if none)."""
    parent, _, leaf = prefix.rpartition(".")
    parts = packed.get(leaf, (leaf,))
    return [spellings(f"{parent}.{part}" if parent else part)[-1] for part in parts]


def matches(pattern: str, name: str) -> bool:
    """True if ``pattern`` means the layer ``name``, in any of its spellings.

    Raises:
        SchemeError: the pattern is no regular expression, or takes too long.
    """
    if pattern.startswith("re:"):
        return any(matches_regex(pattern, spelling) for spelling in spellings(name))
    return any(fnmatchcase(spelling, pattern) for spelling in spellings(name))


def is_ignored(prefix: str, ignore: Iterable[str], packed: Mapping[str, Sequence[str]]) -> bool:
    """True if the layer ``prefix`` is left unquantised.

    Raises:
        SchemeError: only some of the linears fused into this layer are ignored.
    """
    patterns = list(ignore)
    if any(matches(pattern, prefix) for pattern in patterns):
        return True
    ignored = {
        shard: any(matches(pattern, shard) for pattern in patterns)
        for shard in shards(prefix, packed)
    }
    if all(ignored.values()):
        return True
    if any(ignored.values()):
        left = [shard for shard, flag in ignored.items() if flag]
        quantised = [shard for shard, flag in ignored.items() if not flag]
        raise SchemeError(
            f"ignore={patterns!r}: leaves {', '.join(left)} but not {', '.join(quantised)}; they "
            f"are one matrix {prefix!r} in vLLM: ignore all of them or none"
        )
    return False


def find_target(
    prefix: str, groups: Mapping[T, Sequence[str]], packed: Mapping[str, Sequence[str]]
) -> T | None:
    """The group whose targets mean the layer: by name before the class name ``Linear``.

    Args:
        prefix: vLLM's name of the layer.
        groups: group -> its targets.
        packed: vLLM's fused layer -> the linears in it.

    Returns:
        The group, None if no target means the layer.

    Raises:
        SchemeError: the linears fused into this layer belong to different groups.
    """

    def of(name: str) -> T | None:
        for group, targets in groups.items():
            if any(matches(target, name) for target in targets):
                return group
        return next((group for group, targets in groups.items() if LINEAR in targets), None)

    found = {shard: of(shard) for shard in shards(prefix, packed)}
    if len(set(found.values())) > 1:
        raise SchemeError(
            f"targets give the linears of {prefix!r} different schemes "
            f"({', '.join(f'{shard}: {group}' for shard, group in found.items())}); they are one "
            f"matrix in vLLM: expected one scheme"
        )
    return next(iter(found.values()))
