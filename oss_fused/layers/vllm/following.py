# SPDX-License-Identifier: MIT
"""The norm behind a decoder layer, where the layer may run it and hand on a quantised input."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn


class Following:
    """What comes after a layer: the next layer's norm, and the projection that reads it."""

    def __init__(self, norm: nn.Module, reader: nn.Module) -> None:
        """Bind to the next layer; every call reads its weights, which a reload may change."""
        self.norm, self.reader = norm, reader


def tell_following(layers: nn.ModuleList, kind: type[nn.Module], attention: str) -> list[Any]:
    """Tell each layer of class ``kind`` before another one what follows it; returns those layers.

    Args:
        layers: of this rank; others are of another class.
        kind: of the layers.
        attention: the name of a layer's attention, which has ``qkv_proj``.
    """
    found: list[Any] = []
    pairs: Any = itertools.pairwise(layers)
    for layer, after in pairs:
        if (type(layer), type(after)) == (kind, kind):
            layer.following = Following(after.input_layernorm, getattr(after, attention).qkv_proj)
            found.append(layer)
    return found
