# SPDX-License-Identifier: MIT
"""The norm behind a decoder layer, where the layer may run it and hand on a quantised input."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn


class Following:
    """What comes after a layer: the next layer's norm, and the projection that reads it.

    Both are looked up at every call: LoRA puts its own projections in the place of a layer's.
    """

    def __init__(self, layer: nn.Module, attention: str) -> None:
        """Bind to the next ``layer``; ``attention``: the name of its attention."""
        self._layer: Any = layer
        self._attention = attention

    @property
    def norm(self) -> Any:
        """The layer's first RMSNorm."""
        return self._layer.input_layernorm

    @property
    def reader(self) -> Any:
        """The QKV projection."""
        return getattr(self._layer, self._attention).qkv_proj


def tell_following(
    layers: nn.ModuleList, kinds: tuple[type[nn.Module], ...], attention: str
) -> list[Any]:
    """Tell each layer before another one of its class what follows it; returns those layers.

    Args:
        layers: of this rank.
        kinds: classes of which layers are told.
        attention: the name of a layer's attention, which has ``qkv_proj``.
    """
    found: list[Any] = []
    for layer, after in itertools.pairwise(layers):
        one_kind = type(layer) is type(after) and type(layer) in kinds
        if one_kind and not (_is_wrapped(layer) or _is_wrapped(after)):
            layer.following = Following(after, attention)  # type: ignore[assignment]
            found.append(layer)
    return found


def _is_wrapped(layer: nn.Module) -> bool:
    """Whether ``layer`` runs another ``forward`` than its class's: vLLM offloads it."""
    return "forward" in vars(layer)
