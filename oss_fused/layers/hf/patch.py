# SPDX-License-Identifier: MIT
"""Replace the layers of a transformers model in place, report what was replaced, undo it."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from oss_fused.errors import SchemeError, UnsupportedModelError
from oss_fused.layers.hf.modules import FP8Linear, FusedGatedMLP, FusedRMSNorm
from oss_fused.layers.hf.qk_norm_rope import can_fuse, fused_attention_forward

MODEL_TYPES = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3")
# transformers' name of an activation -> ours
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class PatchPolicy:
    """What to replace. Entries of ``ignore`` are module names, or ``re:`` patterns of them.

    Attributes:
        norms: RMSNorm modules by FusedRMSNorm.
        qk_norm_rope: the norms of q and k together with RoPE, where a model has them (Qwen3).
        mlps: gated MLPs by FusedGatedMLP.
        linears: "fp8" for FP8 weights and inputs (MLPs included), "w8a16" for FP8 weights alone
            (then MLPs keep their three linears), or None to keep their dtype.
        ignore: what to leave alone.
    """

    norms: bool = True
    qk_norm_rope: bool = True
    mlps: bool = True
    linears: str | None = "fp8"
    ignore: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.linears not in ("fp8", "w8a16", None):
            raise SchemeError(f"linears={self.linears!r}: expected 'fp8', 'w8a16' or None")
        for entry in self.ignore:
            if entry.startswith("re:"):
                _check_pattern(entry)

    @property
    def fuses_mlps(self) -> bool:
        """Whether gated MLPs are replaced as a whole: the fused kernel quantises its input."""
        return self.mlps and self.linears != "w8a16"

    def ignores(self, name: str) -> bool:
        """Whether the module ``name`` is to be left alone."""
        return any(
            re.fullmatch(entry[3:], name) is not None
            if entry.startswith("re:")
            else name == entry or name.endswith(f".{entry}")
            for entry in self.ignore
        )


def _check_pattern(entry: str) -> None:
    try:
        re.compile(entry[3:])
    except re.error as error:
        raise SchemeError(
            f"ignore={entry!r}: expected a regular expression after 're:' ({error})"
        ) from None


@dataclass
class PatchReport:
    """What ``patch_model`` did: (module, kind) pairs, and (module, reason) for what it left."""

    replaced: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put every original layer back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def count(self, kind: str) -> int:
        """Number of replacements of this kind, e.g. "FP8Linear"."""
        return sum(made == kind for _, made in self.replaced)

    def summary(self) -> str:
        """Counts by kind and the reasons for what was left."""
        kinds = dict.fromkeys(kind for _, kind in self.replaced)
        lines = [f"{self.count(kind)} x {kind}" for kind in kinds] or ["nothing replaced"]
        return "\n".join(lines + [f"kept {name}: {reason}" for name, reason in self.skipped])


class _GatedMLPBlock(nn.Module):
    """A fused gated MLP and the projection behind it, in place of an HF MLP."""

    def __init__(self, fused: FusedGatedMLP, down_proj: nn.Module) -> None:
        super().__init__()
        self.fused, self.down_proj = fused, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> [..., H]."""
        return self.down_proj(self.fused(x))


def patch_model(hf_model: nn.Module, policy: PatchPolicy | None = None) -> PatchReport:
    """Replace RMSNorm, RMSNorm+RoPE of q and k, gated MLPs and linear layers in place.

    Args:
        hf_model: a transformers model of type gpt_oss, llama, mistral, qwen2 or qwen3.
        policy: default: everything, FP8 linears, ``lm_head`` kept.

    Returns:
        A report that lists the replacements and can undo them. On an error the model is as before.

    Raises:
        UnsupportedModelError: another model type.
    """
    policy = policy or PatchPolicy()
    config = getattr(hf_model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"hf_model.config.model_type={model_type!r}: expected one of {', '.join(MODEL_TYPES)}"
        )
    report = PatchReport()
    try:
        for name, module in list(hf_model.named_modules()):
            if not policy.ignores(name):
                _patch_attention(report, policy, name, module)
        for name, module in list(hf_model.named_modules()):
            if not policy.ignores(name) and not _inside_replaced(report, name):
                _patch_one(report, policy, hf_model, name, module)
    except BaseException:
        report.undo()
        raise
    return report


def _patch_attention(report: PatchReport, policy: PatchPolicy, name: str, module: Any) -> None:
    if policy.qk_norm_rope and can_fuse(module):
        # of an earlier patch, or of a library that hooks into modules; None: the class's
        before = vars(module).get("forward")
        module.forward = types.MethodType(fused_attention_forward, module)

        def undo() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        report._undo.append(undo)
        report.replaced.append((name, "FusedRMSNormRoPE"))


def _patch_one(
    report: PatchReport, policy: PatchPolicy, model: nn.Module, name: str, module: Any
) -> None:
    if isinstance(module, FusedRMSNorm):
        # of an earlier patch
        return
    if policy.norms and type(module).__name__.endswith("RMSNorm"):
        if module.weight.shape[0] % 2:
            report.skipped.append((name, f"odd size {module.weight.shape[0]}"))
        else:
            _replace(report, model, name, FusedRMSNorm(module.weight, module.variance_epsilon))
    elif policy.fuses_mlps and hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
        _patch_mlp(report, policy, model, name, module)
    elif type(module).__name__.endswith("Experts"):
        report.skipped.append((name, "experts are replaced where vLLM serves the model"))
    elif policy.linears is not None and type(module) is nn.Linear:
        made = FP8Linear.from_linear(module, quantize_inputs=policy.linears == "fp8")
        _replace(report, model, name, made)


def _patch_mlp(
    report: PatchReport, policy: PatchPolicy, model: nn.Module, name: str, module: Any
) -> None:
    named = getattr(model.config, "hidden_act", "")
    activation = _ACTIVATIONS.get(str(named))
    if activation is None:
        report.skipped.append((name, f"activation {named!r} has no kernel"))
    elif module.gate_proj.bias is not None or module.up_proj.bias is not None:
        report.skipped.append((name, "its projections have a bias"))
    else:
        # an ignored projection keeps its dtype, and the other one with it
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        fp8 = policy.linears == "fp8" and not any(policy.ignores(n) for n in names)
        fused = FusedGatedMLP.from_linears(module.gate_proj, module.up_proj, activation, fp8)
        down = module.down_proj
        if policy.linears == "fp8" and not policy.ignores(f"{name}.down_proj"):
            down = FP8Linear.from_linear(down)
            report.replaced.append((f"{name}.down_proj", "FP8Linear"))
        _replace(report, model, name, _GatedMLPBlock(fused, down), "FusedGatedMLP")


def _inside_replaced(report: PatchReport, name: str) -> bool:
    return any(
        name.startswith(f"{done}.") for done, kind in report.replaced if kind == "FusedGatedMLP"
    ) or any(
        # its norms work inside the fused attention
        name in (f"{done}.q_norm", f"{done}.k_norm")
        for done, kind in report.replaced
        if kind == "FusedRMSNormRoPE"
    )


def _replace(
    report: PatchReport, model: nn.Module, name: str, new: nn.Module, kind: str | None = None
) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, child)
    new.train(old.training)
    setattr(parent, child, new)
    report._undo.append(lambda: setattr(parent, child, old))
    report.replaced.append((name, kind or type(new).__name__))
