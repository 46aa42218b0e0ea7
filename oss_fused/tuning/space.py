# SPDX-License-Identifier: MIT
"""Config spaces: named parameters with ordered values, their coarse grid and neighbourhoods.

A config is a dict of parameter name to value; the tuner passes it as keyword arguments to the
kernel. Values are ordered, so that "next to" means something to the local refinement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from oss_fused.errors import SchemeError

Config = dict[str, int]


@dataclass(frozen=True)
class ConfigSpace:
    """The product of the values of ``parameters``; iterating gives every config.

    Raises:
        SchemeError: no parameter, or one without values or with a repeated value.
    """

    parameters: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        """Reject an empty space and freeze the mapping."""
        if not self.parameters:
            raise SchemeError("parameters={}: expected at least one parameter")
        frozen = {name: tuple(values) for name, values in self.parameters.items()}
        for name, values in frozen.items():
            if not values or len(set(values)) != len(values):
                raise SchemeError(f"parameters[{name!r}]={values}: expected distinct values")
        object.__setattr__(self, "parameters", MappingProxyType(frozen))

    @classmethod
    def of(cls, space: ConfigSpace | Mapping[str, Sequence[int]]) -> ConfigSpace:
        """``space`` itself, or one made of a plain mapping of name to values."""
        return (
            space
            if isinstance(space, ConfigSpace)
            else cls({name: tuple(values) for name, values in space.items()})
        )

    def __len__(self) -> int:
        """Number of configs."""
        return math.prod(len(values) for values in self.parameters.values())

    def __iter__(self) -> Iterator[Config]:
        """Every config, the last parameter varying fastest."""
        for values in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, values, strict=True))

    def __contains__(self, config: object) -> bool:
        """Whether ``config`` names every parameter with one of its values."""
        return (
            isinstance(config, Mapping)
            and config.keys() == self.parameters.keys()
            and all(config[name] in values for name, values in self.parameters.items())
        )

    def coarse(self, values_per_parameter: int = 2) -> ConfigSpace:
        """The grid of that many evenly spread values of each parameter, inner ones first.

        The cut points avoid both ends where they can: extreme tiles are rarely the best start.
        """
        thinned = {}
        for name, values in self.parameters.items():
            count = min(values_per_parameter, len(values))
            thinned[name] = tuple(
                values[(2 * i + 1) * len(values) // (2 * count)] for i in range(count)
            )
        return ConfigSpace(thinned)

    def neighbours(self, config: Config, reach: int = 1) -> list[Config]:
        """Configs reached from ``config`` in ``reach`` single steps or fewer, without itself."""
        found = [config]
        for _ in range(reach):
            found += [n for near in found for n in self._one_step(near) if n not in found]
        return [c for i, c in enumerate(found) if i and c not in found[:i]]

    def _one_step(self, config: Config) -> list[Config]:
        found = []
        for name, values in self.parameters.items():
            at = values.index(config[name])
            for step in (at - 1, at + 1):
                if 0 <= step < len(values):
                    found.append({**config, name: values[step]})
        return found


_BLOCKS = (16, 32, 64, 128)

# BLOCK_SIZE rows for each program, which keeps num_stages of them in flight
RMSNORM_ROPE_CONFIGS = ConfigSpace(
    {
        "BLOCK_SIZE": (1, 2, 4, 8, *_BLOCKS),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 3, 4),
    }
)
# 256-wide tiles are what Hopper's wgmma needs beyond the classic grid
GATED_MLP_CONFIGS = ConfigSpace(
    {
        "BLOCK_M": (*_BLOCKS, 256),
        "BLOCK_N": (*_BLOCKS, 256),
        "BLOCK_K": _BLOCKS,
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    }
)
FP8_GEMM_CONFIGS = ConfigSpace(
    {
        "BLOCK_M": (*_BLOCKS, 256),
        "BLOCK_N": (*_BLOCKS, 256),
        # a product of 8-bit codes takes 32 columns at least
        "BLOCK_K": (32, 64, 128, 256),
        "GROUP_M": (1, 4, 8, 16),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    }
)
# output positions, output channels, channels of a step
CONVOLUTION_CONFIGS = ConfigSpace(
    {
        "BLOCK_M": (32, 64, 128, 256),
        "BLOCK_N": (16, 32, 64, 128),
        "BLOCK_K": (16, 32, 64),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    }
)
