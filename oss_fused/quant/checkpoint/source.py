# SPDX-License-Identifier: MIT
"""A checkpoint to quantise, under transformers' names whatever stores it, an adapter merged in.

Layouts of gpt-oss experts that are understood, for layer L and expert N (E experts, hidden H,
intermediate I; row 2i of gate_up is gate i, row 2i + 1 is up i):

- transformers: ``mlp.experts.gate_up_proj`` [E, H, 2I], ``down_proj`` [E, I, H], ``..._bias``
- MXFP4, as published: ``mlp.experts.gate_up_proj_blocks``, ``..._scales``
- linears per expert, as Unsloth's 4-bit training saves them once merged into 16 bits:
  ``mlp.experts.gate_up_projs.N.weight`` [2I, H], ``down_projs.N.weight`` [H, I], ``....bias``,
  ``mlp.router.linear.weight``
- linears per expert, gate and up apart: ``mlp.experts.N.gate_proj.weight`` [I, H] or
  ``mlp.experts.experts.N.gate_proj.weight``, ``up_proj``, ``down_proj``

The name decides the orientation. Shapes are compared with config.json, never used to guess.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.adapter import CONFIG as ADAPTER_CONFIG
from oss_fused.quant.checkpoint.adapter import LoraAdapter
from oss_fused.quant.checkpoint.audit import check_config
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.mxfp4 import unpack_mxfp4

_FUSED = re.compile(r"^(.+\.mlp\.experts)\.(gate_up|down)_projs\.(\d+)\.(weight|bias)$")
_SPLIT = re.compile(
    r"^(.+\.mlp\.experts)(?:\.experts)?\.(\d+)\.(gate|up|down)_proj\.(weight|bias)$"
)
_ROUTER = re.compile(r"^(.+\.mlp\.router)\.linear\.(weight|bias)$")
_BLOCKS = re.compile(r"^(.+\.experts\.(?:gate_up|down)_proj)_blocks$")
_LAYER_PARTS = (
    r"input_layernorm\.weight|post_attention_layernorm\.weight|self_attn\.sinks|"
    r"self_attn\.[qkvo]_proj\.(?:weight|bias)|self_attn\.rotary_emb\.inv_freq|"
    r"mlp\.router\.(?:weight|bias)|mlp\.experts\.(?:gate_up|down)_proj(?:_bias|_blocks|_scales)?"
)
_KNOWN = re.compile(
    rf"^(?:model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight|"
    rf"model\.rotary_emb\.inv_freq|model\.layers\.(\d+)\.(?:{_LAYER_PARTS}))$"
)
# what an unknown name tells of its origin -> what to do
_ORIGINS = (
    (
        re.compile(r".*\.(?:absmax|quant_map|nested_\w+|quant_state\.\w+)$"),
        "4-bit weights of bitsandbytes: merge and save the model in 16 bits",
    ),
    (
        re.compile(r".*(?:\.lora_\w+|\.base_layer\.)"),
        "a LoRA adapter beside its base: save the adapter alone, and give its folder as --adapter",
    ),
    (re.compile(r"^block\.\d+\."), "OpenAI's own format: take the Hugging Face one"),
    (
        re.compile(r"^(?:module|_orig_mod|_fsdp_wrapped_module|base_model)\."),
        "a wrapper's prefix: save the model inside it",
    ),
)
_BLOCK = 32


@dataclass(frozen=True)
class _Linears:
    """A tensor that is stored as linears: of each expert one, or gate and up."""

    names: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]


class SourceReader(CheckpointReader):
    """Reads a checkpoint to quantise; names and shapes are those of transformers' model.

    Attributes:
        adapter: what is merged into the tensors as they are read, None without.
    """

    def __init__(self, folder: str | Path, adapter: str | Path | None = None) -> None:
        """Open the shards, find the layout, and open the adapter.

        Args:
            folder: the checkpoint.
            adapter: folder of a LoRA adapter that PEFT saved.

        Raises:
            CheckpointError: the folder or the adapter is damaged, of an unknown layout or of
                another shape; names the tensors.
        """
        if (Path(folder) / ADAPTER_CONFIG).is_file() and not (
            Path(folder) / "config.json"
        ).exists():
            raise CheckpointError(
                f"MODEL={str(folder)!r}: is a LoRA adapter; expected its base model as MODEL, and "
                f"this folder as --adapter"
            )
        super().__init__(folder)
        self.adapter: LoraAdapter | None = None
        self._linears: dict[str, _Linears] = {}
        self._renamed: dict[str, str] = {}
        self._packed: dict[str, tuple[int, ...]] = {}  # MXFP4 experts that an adapter changes
        if self.config.get("model_type") == "gpt_oss":
            check_config(self.config, remote_code=True)
            self._assemble()
            self._refuse_unknown()
        if adapter is not None:
            shapes = {name: self.shape(name) for name in self.names()}
            packed = dict(self._unpacked_shapes())
            self.adapter = LoraAdapter(adapter, {**shapes, **packed})
            if any(self.adapter.changes(name) for name in packed):
                self._packed = packed

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._visible())

    def __contains__(self, name: object) -> bool:
        """True if the model has a tensor of that name."""
        return name in self._visible()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name in self._linears:
            return self._linears[name].shape
        return self._packed.get(name) or super().shape(self._renamed.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which ``read`` returns a tensor."""
        return torch.bfloat16 if name in self._packed else super().dtype(self._first_of(name))

    def file(self, name: str) -> Path:
        """The shard that holds a tensor, or the first part of one."""
        return super().file(self._first_of(name))

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, or its ``index``-th slice, merged with the adapter.

        A merged tensor is summed in float32 and rounded to its dtype once.

        Raises:
            CheckpointError: no such tensor, or it holds NaN or Inf.
        """
        stacked = name in self._linears or name in self._packed
        if stacked and index is None:
            first = self.read(name, 0)
            whole = torch.empty(self.shape(name), dtype=first.dtype)
            whole[0] = first
            for expert in range(1, whole.shape[0]):
                whole[expert] = self.read(name, expert)
            return whole
        tensor = self._read_slice(name, index)
        if self.adapter is None or not self.adapter.changes(name):
            return tensor
        return self.adapter.merge(name, tensor, index)

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint and adapter, in their places, from others."""
        own = super().identity()
        return own if self.adapter is None else {**own, "adapter": self.adapter.identity()}

    def digest(self) -> str:
        """Hash of config, weights and adapter."""
        own = super().digest()
        if self.adapter is None:
            return own
        return hashlib.sha256(f"{own} {self.adapter.digest()}".encode()).hexdigest()

    def _read_slice(self, name: str, index: int | None) -> torch.Tensor:
        if name in self._packed:
            blocks, scales = (
                super().read(f"{name}_blocks", index),
                super().read(f"{name}_scales", index),
            )
            return unpack_mxfp4(blocks, scales).t()
        if name not in self._linears:
            return super().read(self._renamed.get(name, name), index)
        assert index is not None
        rows = [super(SourceReader, self).read(part) for part in self._linears[name].names[index]]
        # gate and up take turns in the rows of gate_up
        whole = rows[0] if len(rows) == 1 else torch.stack(rows, 1).flatten(0, 1)
        return whole if whole.dim() == 1 else whole.t()

    def _first_of(self, name: str) -> str:
        """Name of the stored tensor that holds a tensor's first values."""
        if name in self._packed:
            return f"{name}_blocks"
        if name in self._linears:
            return self._linears[name].names[0][0]
        return self._renamed.get(name, name)

    def _visible(self) -> set[str]:
        parts = {part for linears in self._linears.values() for e in linears.names for part in e}
        parts |= set(self._renamed.values())
        parts |= {f"{name}_{part}" for name in self._packed for part in ("blocks", "scales")}
        return (set(self._files) - parts) | {*self._linears, *self._renamed, *self._packed}

    def _unpacked_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """MXFP4 weights as transformers would name and shape them."""
        for name in self._files:
            if match := _BLOCKS.match(name):
                experts, rows, groups = super().shape(name)[:3]
                yield match[1], (experts, groups * _BLOCK, rows)

    def _assemble(self) -> None:
        """Find the tensors that are stored in parts."""
        found: dict[str, dict[tuple[int, int], str]] = {}
        for name in sorted(self._files):
            if match := _FUSED.match(name):
                module, part, expert, leaf = match.groups()
                position = 0
            elif match := _SPLIT.match(name):
                module, expert, kind, leaf = match.groups()
                part, position = ("down" if kind == "down" else "gate_up"), int(kind == "up")
            elif match := _ROUTER.match(name):
                self._rename(name, f"{match[1]}.{match[2]}")
                continue
            else:
                continue
            whole = f"{module}.{part}_proj" + ("_bias" if leaf == "bias" else "")
            places = found.setdefault(whole, {})
            if other := places.get((int(expert), position)):
                self._refuse_twice(whole, name, other)
            places[int(expert), position] = name
        for whole, places in found.items():
            if whole in self._files or f"{whole}_blocks" in self._files:
                self._refuse_twice(whole, next(iter(places.values())), whole)
            self._linears[whole] = self._stack(whole, places)

    def _rename(self, stored: str, name: str) -> None:
        if name in self._files:
            self._refuse_twice(name, stored, name)
        self._renamed[name] = stored

    def _refuse_twice(self, whole: str, one: str, other: str) -> None:
        raise CheckpointError(
            f"{self.folder}: {whole!r} is stored twice, as {one!r} and as {other!r}; expected one "
            f"of them"
        )

    def _stack(self, whole: str, places: dict[tuple[int, int], str]) -> _Linears:
        """The parts of a tensor in order, once each has the shape that config.json asks for."""
        count = int(self.config.get("num_local_experts") or 0)
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        is_bias, is_down = whole.endswith("_bias"), ".down_proj" in whole
        rows, columns = (hidden, inner) if is_down else (2 * inner, hidden)
        apart = any(position for _, position in places)
        expected = {(e, position) for e in range(count) for position in range(1 + apart)}
        if wrong := sorted(expected ^ set(places)):
            expert = wrong[0][0]
            verb = "no linear" if wrong[0] in expected else "a linear"
            raise CheckpointError(
                f"{self.folder}: {whole!r} has {verb} of expert {expert}, like "
                f"{next(iter(places.values()))!r}; expected {count} experts, each complete"
            )
        part_rows = rows // (1 + apart)
        size = (part_rows,) if is_bias else (part_rows, columns)
        for name in places.values():
            if super().shape(name) != size:
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} has shape {list(super().shape(name))}; a "
                    f"linear of this layout and config.json has {list(size)}"
                )
            if super().dtype(name) != super().dtype(places[0, 0]):
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} is {super().dtype(name)}, {places[0, 0]!r} is "
                    f"{super().dtype(places[0, 0])}; expected one dtype"
                )
        names = tuple(tuple(places[e, p] for p in range(1 + apart)) for e in range(count))
        return _Linears(names, (count, rows) if is_bias else (count, columns, rows))

    def _refuse_unknown(self) -> None:
        """Refuse tensors that the model would not use: their meaning is unknown."""
        layers = self.config["num_hidden_layers"]
        unknown = []
        for name in self.names():
            match = _KNOWN.match(name)
            # what other quantisations leave beside a weight gets an error of its own
            if name.endswith(
                ("_scale", "_scale_inv", "_scale_2", "_zero_point", "_packed", "_shape")
            ):
                continue
            if match is None or (match[1] is not None and int(match[1]) >= layers):
                unknown.append(name)
        if not unknown:
            return
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        origin = next((text for n in unknown for p, text in _ORIGINS if p.match(n)), None)
        raise CheckpointError(
            f"{self.folder}: unknown layout: {', '.join(map(repr, unknown[:3]))}{more}; expected "
            f"gpt-oss of {layers} layers with 'mlp.experts.gate_up_proj' (transformers, bf16 or "
            f"MXFP4), or a linear per expert ('mlp.experts.gate_up_projs.0.weight' or "
            f"'mlp.experts.0.gate_proj.weight')" + (f"; this is {origin}" if origin else "")
        )
