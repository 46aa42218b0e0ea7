# SPDX-License-Identifier: MIT
"""Our model classes in vLLM's registry.

Before vLLM loads a model it asks its registry what the class supports. The registry imports the
class in a process of its own to find out, for which a start waits 10 to 20 s, and remembers the
answer for as long as the source file stays the same. Our classes support what vLLM's do, so the
registry gets the answer for vLLM's class, which it knows from other starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.registry import _LazyRegisteredModel


@dataclass(frozen=True)
class ModelEntry(_LazyRegisteredModel):
    """A class of ours; ``theirs`` is the entry of vLLM's class, which ours is made of."""

    theirs: Any = None

    def inspect_model_cls(self) -> Any:
        """What vLLM's class supports, under the name of ours."""
        return replace(self.theirs.inspect_model_cls(), architecture=self.class_name)


def register_model(architecture: str, module: str, name: str) -> None:
    """Have vLLM load class ``name`` of ``module`` for models of ``architecture``."""
    before = ModelRegistry.models.get(architecture)
    theirs = before.theirs if isinstance(before, ModelEntry) else before
    if theirs is None:
        ModelRegistry.register_model(architecture, f"{module}:{name}")
    else:
        ModelRegistry.models[architecture] = ModelEntry(module, name, theirs)
