# SPDX-License-Identifier: MIT
"""A function that finds its own config: ``python examples/tune_a_kernel.py``.

A real kernel is a launcher of a Triton kernel with its meta-parameters; any function will do.
"""

import tempfile
from pathlib import Path

import torch

from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.decorator import autotune

cache = TuningCache(Path(tempfile.mkdtemp()) / "tuning.json")


@autotune(
    {"BLOCK_SIZE": (16, 256, 4096)},
    problem_size=lambda x: (x.numel(),),
    warmup_runs=1,
    benchmark_runs=20,
    reference=torch.exp,
    cache=cache,
)
def blocked_exp(x: torch.Tensor, BLOCK_SIZE: int) -> torch.Tensor:
    """exp(x), block by block."""
    return torch.cat([part.exp() for part in x.split(BLOCK_SIZE)])


x = torch.randn(4096)
assert torch.allclose(blocked_exp(x), x.exp())
print("best config for 4096 values:", blocked_exp.best_config(x))
