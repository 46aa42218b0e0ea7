# SPDX-License-Identifier: MIT
"""A LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors), merged by hand.

For a linear W [N, K] with A [r, K] and B [N, r]: ``W + s B A``, ``s = alpha / r`` or, with rslora,
``alpha / sqrt(r)``. For experts W [E, I, O], which PEFT targets as a parameter
(``target_parameters``), A is [E r, I] with the experts outermost and B [O, r E] with the experts
innermost: ``W[e] + s (B[e] A[e])^T``. PEFT from 0.19 has inputs and outputs change places where
the model does not say how its experts lie; then A is [E r, O] and B [I, r E].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.quant.checkpoint.reader import CheckpointReader, check_link, read_json
from oss_fused.quant.scheme import matches_regex

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("gate_up_proj", "down_proj")
_EXPERT_LINEAR = (("gate_up_projs", "gate_up_proj"), ("down_projs", "down_proj"))
# starts that change the base weights too: an adapter of such a run alone does not say how
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# setting -> why a merge into the weights would be another model
_REFUSED = {
    "use_dora": "DoRA scales the merged weight",
    "lora_bias": "the adapter has biases of its own",
    "fan_in_fan_out": "weights would lie transposed",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "the adapter is active for a part of the tokens only",
    "use_qalora": "inputs are pooled",
    "use_bdlora": "factors are block-diagonal",
    "arrow_config": "adapters are chosen per token",
    "kasa_config": "singular values are adapted",
    "monteclora_config": "factors are sampled",
    "trainable_token_indices": "rows of the embedding are adapted",
}


@dataclass(frozen=True)
class _Lora:
    """Factors that change a tensor.

    Attributes:
        a: name of A.
        b: name of B.
        scaling: s.
        experts: number of experts that share the factors, 0 for a linear.
        expert: the one expert that is changed, None for all.
        swapped: A has the outputs' size, B the inputs'.
    """

    a: str
    b: str
    scaling: float
    experts: int = 0
    expert: int | None = None
    swapped: bool = False


class _Weights(CheckpointReader):
    """The adapter's one file."""

    def _locate(self) -> dict[str, str]:
        path = self.folder / WEIGHTS
        if not path.is_file():
            pickle = self.folder / "adapter_model.bin"
            found = f"found {pickle.name}, a pickle that could run code" if pickle.exists() else ""
            raise CheckpointError(
                f"--adapter={str(self.folder)!r}: expected {WEIGHTS}" + (found and f", {found}")
            )
        check_link(self.folder, path)
        with self._open_file(path) as handle:
            return dict.fromkeys(handle.keys(), WEIGHTS)


class LoraAdapter:
    """Changes to the tensors of one base model."""

    def __init__(self, folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Open an adapter, and find the tensor that each of its own belongs to.

        Args:
            folder: as PEFT saved it.
            shapes: the base model's tensors under transformers' names.

        Raises:
            CheckpointError: no adapter, of a kind that cannot be merged, or of another base model;
                names the setting or the tensors.
        """
        self.folder = Path(folder)
        where = f"--adapter={str(folder)!r}"
        if not (self.folder / CONFIG).is_file():
            raise CheckpointError(f"{where}: has no {CONFIG}; expected a folder that PEFT saved")
        check_link(self.folder, self.folder / CONFIG)
        self.config = read_json(self.folder / CONFIG)
        self._check_settings()
        self._weights = _Weights(self.folder, config=self.config)
        self._shapes = shapes
        self._loras: dict[str, list[_Lora]] = {}
        self._replaced: dict[str, str] = {}
        self._last: dict[str, torch.Tensor] = {}
        self._find()

    def changes(self, name: str) -> bool:
        """Whether the adapter changes a tensor."""
        return name in self._loras or name in self._replaced

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that the adapter changes, sorted."""
        return sorted({*self._loras, *self._replaced})

    def identity(self) -> dict[str, Any]:
        """What tells this adapter, in this place, from another."""
        return self._weights.identity()

    def digest(self) -> str:
        """Hash of the adapter's config and a sample of its weights."""
        return self._weights.digest()

    def merge(self, name: str, tensor: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """``tensor`` changed, in its dtype; it is the ``index``-th slice of ``name``, if given.

        Raises:
            CheckpointError: the dtype does not hold a merged value.
        """
        if name in self._replaced:
            return self._held(name, self._weights.read(self._replaced[name], index), tensor.dtype)
        if tensor.dim() == 3:
            return torch.stack([self.merge(name, part, i) for i, part in enumerate(tensor)])
        merged = tensor.float()
        for lora in self._loras[name]:
            if lora.expert is not None and lora.expert != index:
                continue
            a, b = self._factor(lora.a), self._factor(lora.b)
            if lora.experts:
                a = a.view(lora.experts, -1, a.shape[-1])[index or 0]
                b = b.view(b.shape[0], -1, lora.experts)[..., index or 0]
            delta = lora.scaling * (b @ a)
            transposed = (lora.experts and not lora.swapped) or lora.expert is not None
            merged = merged + (delta.t() if transposed else delta)
        return self._held(name, merged, tensor.dtype)

    def _held(self, name: str, merged: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        held = merged.to(dtype)
        if not bool(held.isfinite().all()):
            raise CheckpointError(
                f"--adapter={str(self.folder)!r}: {name!r} with the adapter holds "
                f"{merged.float().abs().max().item()!r}; expected what {dtype} holds"
            )
        return held

    def _factor(self, name: str) -> torch.Tensor:
        """A factor in float32; the last two are kept for the next expert."""
        if name not in self._last:
            if len(self._last) >= 2:
                self._last.clear()
            self._last[name] = self._weights.read(name).float()
        return self._last[name]

    def _check_settings(self) -> None:
        config, where = self.config, self.folder / CONFIG
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{where}: peft_type={config.get('peft_type')!r}: expected 'LORA'"
            )
        for key, reason in _REFUSED.items():
            if config.get(key):
                raise CheckpointError(
                    f"{where}: {key}={config[key]!r}: {reason}; expected plain LoRA. Merge it with "
                    f"PEFT's merge_and_unload, and calibrate the merged model"
                )
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            raise CheckpointError(
                f"{where}: init_lora_weights={start!r}: training began by changing the base "
                f"weights; expected an adapter that PEFT converted to plain LoRA when it saved it "
                f"(path_initial_model_for_weight_conversion)"
            )
        for key in ("r", "lora_alpha"):
            if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float):
                raise CheckpointError(f"{where}: {key}={config.get(key)!r}: expected a number")
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(key) or {}
            if not isinstance(patterns, dict) or not all(
                isinstance(value, int | float) and value > 0 for value in patterns.values()
            ):
                raise CheckpointError(f"{where}: {key}={patterns!r}: expected names with numbers")

    def _find(self) -> None:
        """Give every tensor of the adapter its place."""
        pairs: dict[str, set[str]] = {}
        unknown = []
        for name in self._weights.names():
            module, dot, leaf = name.removeprefix(_PREFIX).rpartition(".lora_")
            if dot and leaf in ("A.weight", "B.weight"):
                pairs.setdefault(module, set()).add(leaf[0])
            else:
                plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
                plain = plain.replace(".router.linear.", ".router.")
                if not dot and self._shapes.get(plain) == self._weights.shape(name):
                    self._replaced[plain] = name
                else:
                    unknown.append(name)
        self._refuse(unknown, "belong to no tensor of the base model")
        for module, found in pairs.items():
            if found != {"A", "B"}:
                self._refuse(
                    [self._names(module)["AB".index(found.pop())]], "have no second factor"
                )
        stacked: dict[str, list[str]] = {}
        for module in pairs:
            experts = module.replace(".base_layer", "")
            if f"{experts}.{_PARTS[0]}" in self._shapes:
                stacked.setdefault(experts, []).append(module)
            elif not self._add_linear(module):
                unknown.append(self._names(module)[0])
        self._refuse(unknown, "belong to no tensor of the base model, or to one of another shape")
        for experts, modules in stacked.items():
            self._add_stacked(experts, sorted(modules, key=len))
        if not self._loras and not self._replaced:
            raise CheckpointError(f"{self.folder / WEIGHTS}: holds no tensor; expected an adapter")

    def _refuse(self, names: list[str], reason: str) -> None:
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self.folder / WEIGHTS}: {', '.join(map(repr, names[:3]))}{more} {reason}; "
                f"expected an adapter of this base model, with linears, experts' parameters "
                f"(target_parameters) or modules_to_save"
            )

    def _names(self, module: str) -> tuple[str, str]:
        """The adapter's names of A and B."""
        prefix = _PREFIX if f"{_PREFIX}{module}.lora_A.weight" in self._weights else ""
        names = (f"{prefix}{module}.lora_{part}.weight" for part in "AB")
        return next(names), next(names)

    def _add_linear(self, module: str) -> bool:
        """A linear, or the linear of one expert; False if the base has none of that shape."""
        a, b = self._names(module)
        target, expert = f"{module}.weight".replace(".router.linear.", ".router."), None
        shape = self._shapes.get(target)
        for many, one in _EXPERT_LINEAR:
            experts, found, number = module.rpartition(f".{many}.")
            if found and number.isdecimal():
                target, expert = f"{experts}.{one}", int(number)
                stack = self._shapes.get(target, (0, 0, 0))
                shape = (stack[2], stack[1]) if expert < stack[0] else None
        if any(len(self._weights.shape(name)) != 2 for name in (a, b)):
            return False
        (rank, inputs), (outputs, columns) = (self._weights.shape(name) for name in (a, b))
        if shape != (outputs, inputs) or rank != columns:
            return False
        self._loras.setdefault(target, []).append(
            _Lora(a, b, self._scaling(module, a, rank), expert=expert)
        )
        return True

    def _add_stacked(self, experts: str, modules: list[str]) -> None:
        """Stacked experts: which parameter is each wrapper's, and how do its factors lie?

        PEFT's names say neither. The shapes of all wrappers of a module together do, except where
        inputs and outputs are of one size.
        """
        choices = list(self._assignments(experts, modules))
        if len(choices) > 1 and self._version() < (0, 19):
            choices = [choice for choice in choices if not choice[1]] or choices
        names = [self._names(module)[0] for module in modules]
        if not choices:
            self._refuse(names, f"do not fit {experts}.{_PARTS[0]} or {_PARTS[1]}")
        if len(choices) > 1:
            raise CheckpointError(
                f"{self.folder / WEIGHTS}: {names[0]!r} is ambiguous: inputs and outputs of "
                f"{experts}.{choices[0][0][0]} have one size, and PEFT from 0.19 may have them "
                f"change places; expected gate_up_proj among target_parameters too. Merge it with "
                f"PEFT's merge_and_unload, and calibrate the merged model"
            )
        parts, swapped = choices[0]
        for part, module in zip(parts, reversed(modules)):
            a, b = self._names(module)
            count = self._shapes[f"{experts}.{part}"][0]
            rank, rest = divmod(self._weights.shape(a)[0], count)
            if rest:
                self._refuse([a], f"have no whole rank for each of {count} experts")
            scaling = self._scaling(f"{experts}.{part}", a, rank)
            lora = _Lora(a, b, scaling, experts=count, swapped=swapped)
            self._loras.setdefault(f"{experts}.{part}", []).append(lora)

    def _assignments(
        self, experts: str, modules: list[str]
    ) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Parameters of the wrappers, innermost first, and orientation, as far as shapes allow."""
        wanted = self.config.get("target_parameters") or ()
        named = [
            part
            for part in _PARTS
            if any(f".{experts}.{part}".endswith(f".{target}") for target in wanted)
        ]
        inner_first = list(reversed(modules))  # a longer name lies further inside
        shapes = [[self._weights.shape(name) for name in self._names(m)] for m in inner_first]
        for parts in itertools.permutations(named or _PARTS, len(modules)):
            for swapped in (False, True):
                sizes = [self._shapes[f"{experts}.{part}"][1:] for part in parts]
                sizes = [size[::-1] if swapped else size for size in sizes]
                if all(
                    len(a) == len(b) == 2 and (a[1], b[0]) == size and a[0] == b[1]
                    for (a, b), size in zip(shapes, sizes)
                ):
                    yield parts, swapped

    def _version(self) -> tuple[int, ...]:
        """PEFT's version; those before 0.18 do not write it."""
        text = str(self.config.get("peft_version") or "0").partition("@")[0]
        return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())

    def _scaling(self, module: str, a: str, rank: int) -> float:
        expected = self._setting("rank_pattern", "r", module)
        if rank != expected:
            raise CheckpointError(
                f"{self.folder / WEIGHTS}: tensor {a!r} has rank {rank}; {CONFIG} asks for "
                f"{expected}"
            )
        alpha = self._setting("alpha_pattern", "lora_alpha", module)
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _setting(self, patterns: str, default: str, module: str) -> Any:
        """The value of the first pattern that matches the end of a module's name, as in PEFT."""
        for pattern, value in (self.config.get(patterns) or {}).items():
            try:
                found = matches_regex(rf"re:(.*\.)?({pattern})$", module)
            except SchemeError as error:
                raise CheckpointError(f"{self.folder / CONFIG}: {patterns}: {error}") from None
            if found:
                return value
        return self.config[default]
