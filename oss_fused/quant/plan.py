# SPDX-License-Identifier: MIT
"""The plan of a run: which tensors the output holds, and the step that makes each.

A step reads one or few tensors of the source and writes one or few of the output. The plan is
made from shapes alone, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.quant import scheme as schemes
from oss_fused.quant.checkpoint.audit import GatedExperts
from oss_fused.quant.checkpoint.writer import TensorSpec
from oss_fused.quant.experts import linears_of
from oss_fused.quant.recipe import Recipe
from oss_fused.quant.scheme import QuantizationScheme
from oss_fused.quant.skeleton import ModelSkeleton, layer_of, layer_step

FP8 = torch.float8_e4m3fn
# as in the config of OpenAI's checkpoints
_NOT_MXFP4 = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


@dataclass(frozen=True)
class Step:
    """One unit of work.

    Attributes:
        name: of the module or tensor worked on; unique.
        kind: "copy", "linear", "experts" or "kv".
        specs: the tensors it writes.
        layer: decoder layer, None outside the layers.
    """

    name: str
    kind: str
    specs: tuple[TensorSpec, ...]
    layer: int | None = None


@dataclass(frozen=True)
class CheckpointPlan:
    """Steps in model order and what config.json says about them.

    Attributes:
        steps: every step.
        schemes: every linear -> its scheme, None for one left as it is.
        experts: how experts are stored: "mxfp4", "fp8", "bf16", or None without experts.
        source_experts: how the source stores them.
        expert_count: experts per layer, 0 without.
        gated: names of experts stored one by one, None for other families.
        expert_rounding: how experts are rounded to MXFP4, None where they are not.
        untie: lm_head gets a tensor of its own although the source ties it to the embedding.
        kv_scales: the output holds k_scale and v_scale.
        format: of the output, as the recipe names it.
        clip_target: share of values that static scales may clip, None for none.
        group_candidates: sizes of groups whose error is told.
        smoothing: alpha, None for no smoothing.
    """

    steps: tuple[Step, ...]
    schemes: dict[str, QuantizationScheme | None]
    experts: str | None
    source_experts: str | None
    untie: bool
    kv_scales: bool
    format: str
    unquantised_modules: tuple[str, ...] = field(default=())
    clip_target: float | None = None
    group_candidates: tuple[int, ...] = ()
    smoothing: float | None = None
    expert_count: int = 0
    gated: GatedExperts | None = None
    expert_rounding: Literal["nearest", "mse", "feedback"] | None = None

    @property
    def specs(self) -> list[TensorSpec]:
        """Every output tensor in order."""
        return [spec for step in self.steps for spec in step.specs]

    def quantization_config(self) -> dict[str, Any]:
        """``quantization_config`` of the output's config.json."""
        if self.format == "mxfp4":
            return {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_MXFP4)}
        ignore = [name for name, scheme in self.schemes.items() if scheme is None]
        config: dict[str, Any] = {
            "quant_method": "oss_fp8",
            "version": 1,
            "config_groups": schemes.config_groups(self.schemes),
            "ignore": ignore,
            "kv_cache_scheme": (
                schemes.KV_TENSOR.model_dump(mode="json") if self.kv_scales else None
            ),
        }
        if self.format == "oss-fp8":
            return {**config, "experts": self.experts}
        del config["version"]
        groups = {
            name: {**group, "output_activations": None, "format": "float-quantized"}
            for name, group in config["config_groups"].items()
        }
        return {
            **config,
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*ignore, *self.unquantised_modules],
            "global_compression_ratio": None,
        }


def make_plan(skeleton: ModelSkeleton, recipe: Recipe) -> CheckpointPlan:
    """Decide every output tensor.

    Raises:
        SchemeError: a pattern matches nothing, splits fused linears, or the recipe asks for
            something the model or the format has not.
        CheckpointError: a tensor has the name of a module.
    """
    chosen = choose_schemes(skeleton, recipe)
    experts = _choose_experts(skeleton, recipe)
    rounds = (skeleton.experts, experts) == ("bf16", "mxfp4")
    for name, value in (("rounding", recipe.rounding == "mse" and "mse"), ("base", recipe.base)):
        if value and not rounds:
            raise SchemeError(
                f"{name}={value!r}: is for rounding to MXFP4; expected experts='mxfp4' and a "
                f"gpt-oss with experts in 16 or 32 bits"
            )
    head = chosen.get("lm_head")
    if recipe.format == "mxfp4":
        _check_mxfp4(skeleton, recipe)
    if recipe.format == "compressed-tensors":
        if skeleton.gated is not None:
            raise SchemeError(
                f"format='compressed-tensors': is not written for model_type={skeleton.family!r}; "
                f"use --format oss-fp8"
            )
        if experts in ("mxfp4", "fp8"):
            raise SchemeError(
                f"experts={experts!r}: vLLM without oss_fused cannot load these experts from "
                f"compressed-tensors; use --experts bf16 or --format oss-fp8"
            )
        if head is not None and skeleton.family == "gpt_oss":
            raise SchemeError(
                "lm_head='fp8': vLLM without oss_fused keeps the lm_head of gpt-oss in bf16; use "
                "--lm-head bf16 or --format oss-fp8"
            )
    untie = skeleton.tied and head is not None
    kv_scales = recipe.kv_cache == "fp8"
    routers = [f"model.layers.{i}.mlp.router" for i in range(skeleton.layers)]
    return CheckpointPlan(
        steps=_steps(skeleton, chosen, experts, untie, kv_scales, recipe.format == "mxfp4"),
        schemes=chosen,
        experts=experts,
        source_experts=skeleton.experts,
        untie=untie,
        kv_scales=kv_scales,
        format=recipe.format,
        unquantised_modules=(*skeleton.expert_modules(), *routers) if skeleton.experts else (),
        clip_target=recipe.clip_target,
        group_candidates=recipe.group_candidates,
        smoothing=recipe.smoothing,
        expert_count=skeleton.expert_count if skeleton.experts else 0,
        gated=skeleton.gated,
        expert_rounding=recipe.expert_rounding if rounds else None,
    )


def _check_mxfp4(skeleton: ModelSkeleton, recipe: Recipe) -> None:
    """Refuse what a plain MXFP4 checkpoint of gpt-oss cannot hold."""
    if skeleton.family != "gpt_oss":
        raise SchemeError(
            f"format='mxfp4': is written for gpt-oss only, and model_type={skeleton.family!r}; use "
            f"--format oss-fp8"
        )
    if recipe.experts not in ("auto", "mxfp4"):
        raise SchemeError(f"experts={recipe.experts!r}: format='mxfp4' expects auto or mxfp4")
    if recipe.lm_head == "fp8":
        raise SchemeError("lm_head='fp8': format='mxfp4' keeps it in bf16; use --format oss-fp8")


def choose_schemes(skeleton: ModelSkeleton, recipe: Recipe) -> dict[str, QuantizationScheme | None]:
    """Scheme of every linear, None for those left as they are."""
    _refuse_other_modules(skeleton, recipe)
    picked, _ = schemes.select(recipe.targets, recipe.ignore, skeleton.linears)
    head = recipe.lm_head
    for pattern in recipe.ignore:
        if head == "fp8" and schemes.matches(pattern, "lm_head", skeleton.linears["lm_head"]):
            raise SchemeError(
                f"ignore={pattern!r}: means lm_head too, and lm_head='fp8' quantises it; expected "
                f"one of the two"
            )
    if head == "auto":
        gpt_oss_head = skeleton.family == "gpt_oss" and recipe.format == "oss-fp8"
        head = "fp8" if gpt_oss_head and "lm_head" in picked else "bf16"
    wanted = set(picked) - {"lm_head"} | ({"lm_head"} if head == "fp8" else set())
    if recipe.format == "mxfp4":
        return dict.fromkeys(skeleton.linears)
    chosen = {name: recipe.weight_scheme if name in wanted else None for name in skeleton.linears}
    for override in recipe.overrides:
        for pattern in override.targets:
            schemes.check_pattern("overrides", pattern, skeleton.linears)
            matched = [n for n in wanted if schemes.matches(pattern, n, skeleton.linears[n])]
            if not matched:
                raise SchemeError(
                    f"overrides={override.scheme}={pattern!r}: changes nothing, as targets, ignore "
                    f"and lm_head={head!r} leave these linears as they are; expected a pattern of "
                    f"linears that are quantised"
                )
            chosen |= dict.fromkeys(matched, override.weight_scheme)
    for pattern in recipe.keep_sensitive:
        schemes.check_pattern("keep_sensitive", pattern, skeleton.linears)
    schemes.check_siblings(chosen)
    if not any(chosen.values()) and skeleton.experts is None:
        raise SchemeError("targets/ignore: no linear layer is left to quantise")
    return chosen


def _refuse_other_modules(skeleton: ModelSkeleton, recipe: Recipe) -> None:
    """Say what a pattern that means no linear, but experts or a router, should have been."""
    patterns = [("targets", p) for p in recipe.targets] + [("ignore", p) for p in recipe.ignore]
    patterns += [("overrides", p) for override in recipe.overrides for p in override.targets]
    patterns += [("keep_sensitive", p) for p in recipe.keep_sensitive]
    for option, pattern in patterns:
        if schemes.matches_any(option, pattern, skeleton.linears):
            continue
        for name in skeleton.tensor_names():
            module = name.rpartition(".")[0]
            parents = (module, module.partition(".experts")[0] + ".experts")
            if not any(schemes.matches(pattern, part, "") for part in parents):
                continue
            if ".experts" in module:
                raise SchemeError(
                    f"{option}={pattern!r}: means experts, which are stored one way in the whole "
                    f"model; use --experts"
                )
            if module.endswith((".router", ".gate")):
                raise SchemeError(
                    f"{option}={pattern!r}: means a router, which stays as it is: its rounding "
                    f"could change which experts are chosen"
                )


def _choose_experts(skeleton: ModelSkeleton, recipe: Recipe) -> str | None:
    if skeleton.experts is None:
        if recipe.experts != "auto":
            raise SchemeError(
                f"experts={recipe.experts!r}: model_type={skeleton.family!r} has no experts"
            )
        return None
    if recipe.format == "mxfp4":
        return "mxfp4"
    if recipe.experts == "auto":
        return skeleton.stored_experts
    if recipe.experts == "mxfp4" and skeleton.gated is not None:
        raise SchemeError(
            f"experts='mxfp4': is served for gpt-oss only, and model_type={skeleton.family!r}; "
            f"expected fp8 or bf16"
        )
    return recipe.experts


def _steps(
    skeleton: ModelSkeleton,
    chosen: dict[str, QuantizationScheme | None],
    experts: str | None,
    untie: bool,
    kv_scales: bool,
    bf16: bool,
) -> tuple[Step, ...]:
    """Every step; with ``bf16`` what is not quantised is stored so, whatever the source has."""
    reader = skeleton.reader
    steps: list[Step] = []
    expert_modules = set(skeleton.expert_modules()) if experts != skeleton.experts else set()
    seen: set[str] = set()
    names = skeleton.tensor_names() + (["lm_head.weight"] if untie else [])
    for name in names:
        module, _, leaf = name.rpartition(".")
        if skeleton.gated is not None and ".experts." in module:
            module = module.partition(".experts.")[0] + ".experts"
        layer = layer_of(name)
        if module in expert_modules:
            if module not in seen:
                seen.add(module)
                specs = expert_specs(skeleton, module, str(experts))
                steps.append(Step(module, "experts", _in_bf16(specs) if bf16 else specs, layer))
        elif leaf == "weight" and chosen.get(module) is not None:
            scheme = chosen[module]
            assert scheme is not None
            source = "model.embed_tokens.weight" if module == "lm_head" and untie else name
            shape = reader.shape(source)
            specs = _in_fp8(name, shape)
            if scheme.needs_data:
                specs += (TensorSpec(f"{module}.input_scale", torch.float32, (1,)),)
            steps.append(Step(module, "linear", specs, layer))
        else:
            specs = (TensorSpec(name, reader.dtype(name), reader.shape(name)),)
            steps.append(Step(name, "copy", _in_bf16(specs) if bf16 else specs, layer))
    if kv_scales:
        steps += [_kv_step(layer) for layer in range(skeleton.layers)]
    taken = {layer_step(layer) for layer in range(skeleton.layers)}
    for step in steps:
        if step.name in taken:
            # the journal would take one for the other, and leave its tensors as zeros
            raise CheckpointError(
                f"{reader.file(step.name)}: tensor {step.name!r} has the name of a module "
                f"or a step of this run; expected a name like '{step.name}.weight'"
            )
        taken.add(step.name)
    return tuple(sorted(steps, key=lambda step: _order(step, skeleton.layers)))


def _in_bf16(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The same tensors, floating-point ones in bf16."""
    return tuple(
        replace(spec, dtype=torch.bfloat16) if spec.dtype.is_floating_point else spec
        for spec in specs
    )


def _order(step: Step, layers: int) -> int:
    """Embedding first, then the layers, then the final norm and lm_head."""
    if step.layer is not None:
        return step.layer
    return -1 if "embed" in step.name else layers


def _kv_step(layer: int) -> Step:
    prefix = f"model.layers.{layer}.self_attn"
    specs = tuple(TensorSpec(f"{prefix}.{k}_scale", torch.float32, (1,)) for k in "kv")
    return Step(f"{prefix}.kv", "kv", specs, layer)


def _in_fp8(name: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """A weight of that name and its scales."""
    scale = TensorSpec(f"{name}_scale", torch.float32, (shape[0], 1))
    return TensorSpec(name, FP8, shape), scale


def expert_specs(skeleton: ModelSkeleton, module: str, experts: str) -> tuple[TensorSpec, ...]:
    """Output tensors of a module of experts stored as "mxfp4", "fp8" or "bf16"."""
    config, count = skeleton.config, skeleton.expert_count
    if skeleton.gated is not None:
        return tuple(
            spec
            for part in ("gate_up_proj", "down_proj")
            for expert in range(count)
            for name in linears_of(skeleton.gated, part)
            for full in [f"{module}.{expert}.{name}.weight"]
            for spec in _in_fp8(full, skeleton.reader.shape(full))
        )
    hidden, inner = config.hidden_size, config.intermediate_size
    bias = skeleton.reader.dtype(f"{module}.gate_up_proj_bias")
    parts = (("gate_up_proj", "w13", 2 * inner, hidden), ("down_proj", "w2", hidden, inner))
    specs: list[TensorSpec] = []
    if experts == "fp8":
        for expert in range(count):
            for _, short, rows, columns in parts:
                prefix = f"{module}.{expert}.{short}"
                specs.append(TensorSpec(f"{prefix}_weight", FP8, (rows, columns)))
                specs.append(TensorSpec(f"{prefix}_weight_scale", torch.float32, (rows, 1)))
                specs.append(TensorSpec(f"{prefix}_bias", bias, (rows,)))
        return tuple(specs)
    for long, _, rows, columns in parts:
        prefix = f"{module}.{long}"
        if experts == "bf16":
            specs.append(TensorSpec(prefix, torch.bfloat16, (count, columns, rows)))
        else:
            if columns % 32:
                raise SchemeError(
                    f"experts='mxfp4': {prefix} has {columns} inputs; expected a multiple of 32"
                )
            blocks = (count, rows, columns // 32)
            specs.append(TensorSpec(f"{prefix}_blocks", torch.uint8, (*blocks, 16)))
            specs.append(TensorSpec(f"{prefix}_scales", torch.uint8, blocks))
        specs.append(TensorSpec(f"{prefix}_bias", bias, (count, rows)))
    return tuple(specs)
