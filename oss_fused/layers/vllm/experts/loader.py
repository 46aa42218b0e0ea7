# SPDX-License-Identifier: MIT
"""Loading of gpt-oss experts: every layout of a checkpoint, under tensor and expert parallelism.

Tensors of a checkpoint, all experts at once or (with an expert id) one by one:

- mxfp4: w13 [E, 2I, H/32, 16] and w2 [E, H, I/32, 16] uint8, scales without the last dimension.
- bf16: w13 [E, H, 2I] and w2 [E, I, H], input dimension first.
- fp8: w13 [2I, H] and w2 [H, I] e4m3 with scales [2I, 1] and [H, 1], one expert at a time.

and biases [E, 2I], [E, H]. Rows of w13 alternate gate and up. A rank takes its rows of w13 and
its columns of w2; the bias of w2 counts once, on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.checks import FLOATS, check_dtype, check_experts
from oss_fused.layers.vllm.loaded import CheckedMethod, refuse_layer
from oss_fused.quant.patterns import spellings
from oss_fused.quant.settings import ExpertsLayout

MXFP4_BLOCK = 32


class CheckedExperts(CheckedMethod):
    """A method whose parameters ``loader`` fills; the loader knows which tensors arrived."""

    loader: ExpertsLoader | None = None

    def mark_missing(self, layer: Any) -> None:
        """Forget what was loaded."""
        if self.loader is not None:
            self.loader.loaded.clear()

    def check_first(self, layer: Any) -> None:
        """Refuse a first load that brought no tensor: this memory began as zeros.

        Raises:
            CheckpointError: names a tensor.
        """
        if self.loader is not None and not self.loader.loaded:
            refuse_layer(layer, self.prefix)

    def check_loaded(self, layer: Any) -> None:
        """Refuse a load that left out a tensor, and 16-bit tensors that are not finite.

        Raises:
            CheckpointError: names the tensor.
        """
        if self.loader is not None:
            self.loader.check(self.prefix, [k for k in layer._parameters if k.startswith("w")])
        check_experts(layer, self.prefix)


class ExpertsLoader:
    """``load`` is the ``weight_loader`` of every parameter of one layer's experts."""

    def __init__(self, layer: Any, layout: ExpertsLayout) -> None:
        """Make the loader of one layer.

        Args:
            layer: vLLM's RoutedExperts; says which experts and which slice this rank has.
            layout: how the checkpoint stores the weights.
        """
        moe = layer.moe_config
        parallel = moe.moe_parallel_config
        self.rank, self.ranks = parallel.tp_rank, parallel.tp_size
        self.hidden = moe.hidden_dim_unpadded
        self.inner = moe.intermediate_size_per_partition_unpadded * parallel.tp_size
        self.local_id = layer._map_global_expert_id_to_local_expert_id
        self.layout = layout
        self.experts = layer.global_num_experts
        # kind of tensor -> the experts, in this rank's count, that have theirs
        self.loaded: dict[str, set[int]] = {}

    def check(self, prefix: str, kinds: Iterable[str]) -> None:
        """Refuse a load that left out a tensor of an expert of this rank.

        Args:
            prefix: the layer's name, for errors.
            kinds: the layer's parameters.

        Raises:
            CheckpointError: names the tensor.
        """
        # weights that this loader did not load (--load-format dummy)
        if not self.loaded:
            return
        for kind in kinds:
            done = self.loaded.get(kind, set())
            for expert in range(self.experts):
                local = self.local_id(expert)
                if local != -1 and local not in done:
                    raise CheckpointError(
                        f"'{spellings(prefix)[-1]}.{expert}.{kind}' is missing from the "
                        f"checkpoint; expected every expert's tensors"
                    )

    def load(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's part of ``loaded_weight``; the signature is that of vLLM's loaders.

        Raises:
            CheckpointError: the tensor does not fit the layer, or has another dtype.
        """
        kind = weight_name.rsplit(".", 1)[-1]
        check_dtype(spellings(weight_name)[-1], loaded_weight.dtype, self._dtypes(kind))
        if expert_id is None:
            done = [self._load(param, w, kind, e, weight_name) for e, w in enumerate(loaded_weight)]
        else:
            done = [self._load(param, loaded_weight, kind, expert_id, weight_name)]
        return any(done) if return_success else None

    def _dtypes(self, kind: str) -> tuple[torch.dtype, ...]:
        """What a tensor of that kind may be in the checkpoint."""
        if kind.endswith("_bias") or self.layout == "bf16":
            return FLOATS
        if self.layout == "mxfp4":
            return (torch.uint8,)
        return (torch.float32,) if kind.endswith("_scale") else (torch.float8_e4m3fn,)

    def _load(
        self, param: torch.nn.Parameter, weight: torch.Tensor, kind: str, expert: int, name: str
    ) -> bool:
        if not 0 <= expert < self.experts:
            raise CheckpointError(
                f"{spellings(name)[-1]!r} has an expert {expert}; expected experts 0 to "
                f"{self.experts - 1}, by config.json"
            )
        # a smaller tensor would fit a layer whose sizes are padded for its kernels
        shapes = self._shapes(kind)
        if tuple(weight.shape) not in shapes:
            raise CheckpointError(
                f"{spellings(name)[-1]!r}, expert {expert}: shape {tuple(weight.shape)}; expected "
                f"{shapes[0]}, by config.json"
            )
        local = self.local_id(expert)
        if local == -1:
            return False
        part = self._part(weight, kind)
        target = param.data[local]
        if part.shape != target.shape:
            # kernels pad sizes; a reload's memory holds anything
            target.zero_()
        target[tuple(slice(0, size) for size in part.shape)].copy_(part)
        if not target.is_meta:
            self.loaded.setdefault(kind, set()).add(local)
        return True

    def _shapes(self, kind: str) -> list[tuple[int, ...]]:
        """What one expert's tensor of that kind, for all ranks, may have in the checkpoint."""
        name, _, leaf = kind.partition("_")
        w13, w2 = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        rows, columns = w13 if name == "w13" else w2
        if leaf == "bias":
            return [(rows,)]
        if self.layout == "mxfp4":
            blocks, packed = -(-columns // MXFP4_BLOCK), MXFP4_BLOCK // 2
            if leaf == "weight_scale":
                return [(rows, blocks)]
            return [(rows, blocks, packed), (rows, blocks * packed)]
        if leaf == "weight_scale":
            return [(rows, 1)]
        return [(columns, rows) if self.layout == "bf16" else (rows, columns)]

    def _part(self, weight: torch.Tensor, kind: str) -> torch.Tensor:
        """This rank's slice of one expert's tensor, output dimension first."""
        if kind == "w2_bias":
            return weight if self.rank == 0 else torch.zeros_like(weight)
        if kind.endswith("_weight"):
            if self.layout == "mxfp4":
                weight = weight.flatten(1)
            elif self.layout == "bf16":
                weight = weight.t()
        if kind.startswith("w13"):
            return self._slice(weight, dim=0, unit=2 * MXFP4_BLOCK)
        if kind == "w2_weight_scale" and self.layout == "fp8":
            return weight
        # columns hold two values per byte, or one scale per block
        unit = MXFP4_BLOCK if self.layout != "mxfp4" else 1 if "scale" in kind else MXFP4_BLOCK // 2
        return self._slice(weight, dim=1, unit=unit)

    def _slice(self, weight: torch.Tensor, dim: int, unit: int) -> torch.Tensor:
        """Slice of this rank: equal parts, of MXFP4 in whole blocks (the last may be short)."""
        size = weight.shape[dim]
        share = -(-size // self.ranks)
        if self.layout == "mxfp4":
            share = -(-(size // unit) // self.ranks) * unit
        start = min(self.rank * share, size)
        return weight.narrow(dim, start, min(share, size - start))
