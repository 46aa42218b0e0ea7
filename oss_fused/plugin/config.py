# SPDX-License-Identifier: MIT
"""``OssFp8Config``: vLLM asks it how each layer of a model is quantised."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import vllm.envs as vllm_envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from oss_fused.errors import SchemeError
from oss_fused.layers.vllm.experts.choice import experts_method
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.kv_cache import OssFp8KVCacheMethod
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.loaded import CheckedMethod
from oss_fused.layers.vllm.reload import any_rank, install
from oss_fused.layers.vllm.unquantized import (
    OssUnquantizedEmbeddingMethod,
    OssUnquantizedLinearMethod,
)
from oss_fused.plugin import fingerprint
from oss_fused.plugin.checkpoint import check_before_load
from oss_fused.plugin.compat import (
    MIN_CAPABILITY,
    check_device,
    check_load_format,
    check_settings,
)
from oss_fused.plugin.monitor.policy import bits16_layers
from oss_fused.plugin.options import is_draft, raw_options
from oss_fused.quant import settings
from oss_fused.quant.checkpoint.audit import check_remote_code
from oss_fused.quant.patterns import find_target, is_ignored, matches, shards
from oss_fused.quant.scheme import QuantizationScheme
from oss_fused.quant.settings import QUANT_METHOD, Settings

# quant_method of checkpoints that --quantization oss_fp8 may take over
_TAKES = (None, "", QUANT_METHOD, *settings.MXFP4_METHODS)

# what vLLM's pooling models call their last layer
_CLASSIFIERS = ("score", "classifier")

# options that need a model class or a scheduler of this package
_OF_SERVER = ("burst", "short_step", "monitor_every", "monitor_fallback")

logger = logging.getLogger(__name__)


class OssFp8Config(QuantizationConfig):
    """How vLLM serves a model with ``--quantization oss_fp8``."""

    def __init__(self, parsed: Settings | None = None) -> None:
        """Make the configuration of one model.

        Args:
            parsed: what the checkpoint says; without it, a bf16 checkpoint is quantised online.

        Raises:
            SchemeError: an environment variable has a value that it cannot have.
            UnsupportedDeviceError: the GPU has no FP8 tensor cores.
            SchemeError: VLLM_BATCH_INVARIANT is set.
        """
        super().__init__()
        check_settings()
        check_device()
        _check_batch_invariance()
        install()
        self.settings = parsed or settings.online(settings.OnlineOptions())
        # vLLM reads this attribute: a dict switches --kv-cache-dtype auto to fp8
        self.kv_cache_scheme = self.settings.kv_cache_scheme
        # set by models that load the embedding into a tied, quantised head as well
        self.feeds_tied_head = False
        self._options_read = False
        # whether this is of a head that drafts for the served model
        self._drafts = False
        # layers that the monitor's policy gives 16-bit activations, with the reason
        self._bits16: dict[str, str] = {}
        self._unmatched_ignore: set[str] = set()

    def __repr__(self) -> str:
        """The settings, for vLLM's log."""
        return f"OssFp8Config({self.settings!r})"

    def get_name(self) -> str:
        """``oss_fp8``."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activation dtypes of the kernels."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability times ten of the oldest GPU."""
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OssFp8Config:
        """Build from a checkpoint's ``quantization_config``.

        Raises:
            SchemeError: a key has a value that is not understood.
        """
        return cls(settings.from_checkpoint(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over bf16 and MXFP4 checkpoints, only where the user asks for ``oss_fp8``.

        Raises:
            SchemeError: the checkpoint is quantised in a way that cannot be taken over.
        """
        if user_quant != QUANT_METHOD:
            return None
        method = hf_quant_cfg.get("quant_method")
        if method not in _TAKES:
            raise SchemeError(
                f"--quantization oss_fp8: the checkpoint is quantised with quant_method="
                f"{method!r}; expected a bf16, MXFP4 or oss_fp8 checkpoint"
            )
        return QUANT_METHOD

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Called by vLLM before it builds the model: refuse a damaged or hostile checkpoint.

        Raises:
            CheckpointError: names file, tensor or key.
            SchemeError: the quantisation is not understood.
        """
        check_before_load(model_name, hf_config, revision)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method of ``layer``; None leaves it to vLLM.

        Raises:
            SchemeError: a fused layer is quantised in part.
        """
        self._read_options()
        method = self._choose_method(layer, prefix)
        if isinstance(method, CheckedMethod):
            method.drafts = self._drafts
        return method

    def _choose_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            # rounding in a router or classifier could change what it selects, and FP8 would save
            # little time or memory there
            chooses = isinstance(layer, GateLinear) or prefix.rpartition(".")[2] in _CLASSIFIERS
            scheme = None if chooses else self.scheme_of(prefix)
            if scheme is None:
                return OssUnquantizedLinearMethod(prefix)
            return self._linear_method(scheme, prefix)
        if isinstance(layer, ParallelLMHead):
            scheme = self.scheme_of(prefix)
            # the head is quantised only if the checkpoint, the options or the model ask for it
            if scheme is None or not self._wants_head(layer):
                return OssUnquantizedEmbeddingMethod(prefix)
            method = self._linear_method(scheme, prefix)
            method.head_is_fed = self.feeds_tied_head
            method.may_be_absent = self._drafts
            return method
        if isinstance(layer, VocabParallelEmbedding):
            # vLLM gives some models' embeddings no name
            return OssUnquantizedEmbeddingMethod(prefix or "model.embed_tokens")
        if isinstance(layer, RoutedExperts):
            experts = experts_method(layer, self._settings_of_experts(prefix), prefix)
            if isinstance(experts, OssMxfp4MoEMethod) and prefix in self._bits16:
                experts.fp8_min_tokens = -1
            return experts
        if isinstance(layer, Attention) and self.settings.calibrated:
            return OssFp8KVCacheMethod(self, prefix)
        return None

    def _linear_method(self, scheme: QuantizationScheme, prefix: str) -> OssFp8LinearMethod:
        method = OssFp8LinearMethod(scheme, self.settings.calibrated, prefix)
        method.bits16_inputs = prefix in self._bits16
        method.bf16_if_few = self.settings.serving.linear_activations == "bf16"
        return method

    def _settings_of_experts(self, prefix: str) -> Settings:
        """Those of the model, but experts that the options quantise may be ignored as linears are.

        Both vLLM's name and the checkpoint's, ``...mlp.experts``, count.
        """
        if not self.settings.quantize_experts:
            return self.settings
        names = (prefix, prefix.removesuffix(".routed_experts"))
        # of both names: each marks its patterns as matched
        ignored = [self._is_ignored(name) for name in names]
        return self.settings.model_copy(update={"quantize_experts": not any(ignored)})

    def _is_ignored(self, prefix: str) -> bool:
        packed = self.packed_modules_mapping
        for pattern in list(self._unmatched_ignore):
            if any(matches(pattern, name) for name in (prefix, *shards(prefix, packed))):
                self._unmatched_ignore.discard(pattern)
        return is_ignored(prefix, self.settings.ignore, packed)

    def scheme_of(self, prefix: str) -> QuantizationScheme | None:
        """Scheme of the linear layer of that name, None if it is not quantised.

        Raises:
            SchemeError: a fused layer is quantised in part.
        """
        if self._is_ignored(prefix):
            return None
        group = find_target(prefix, self.settings.targets, self.packed_modules_mapping)
        return None if group is None else self.settings.groups[group]

    def check_ignore(self) -> None:
        """Refuse patterns of the user's that match no layer; all ranks of a built model call it.

        Raises:
            SchemeError: names the patterns.
        """
        if self.settings.calibrated or not self.settings.ignore:
            return
        # with pipeline parallelism a layer is on one rank
        patterns = sorted(set(self.settings.ignore))
        matched = any_rank([pattern not in self._unmatched_ignore for pattern in patterns])
        unmatched = [pattern for pattern, found in zip(patterns, matched) if not found]
        if unmatched:
            raise SchemeError(
                f"ignore={unmatched!r}: matches no linear layer of this model, nor experts that "
                f"it quantises; expected names like 'model.layers.0.self_attn.q_proj', a glob, or "
                f"'re:' and a regular expression"
            )

    def _read_options(self) -> None:
        # the engine's configuration is not there yet when vLLM builds this object
        if self._options_read:
            return
        vllm_config = get_current_vllm_config()
        # of models of all classes, and of drafts
        check_load_format(vllm_config)
        model = vllm_config.model_config
        check_remote_code(model.hf_config.to_dict(), model.trust_remote_code)
        # vLLM builds a head that drafts (EAGLE) within the configuration of the served model
        drafts = vllm_config.speculative_config is not None
        self._drafts = drafts and vllm_config.quant_config is not self
        # options are for the served model: its layers are not the draft's
        raw = None if self._drafts or is_draft(vllm_config) else raw_options(vllm_config)
        self.settings = settings.with_options(self.settings, raw)
        _warn_of_idle_options(self.settings.serving, model.hf_config)
        self._bits16 = bits16_layers(self.settings.serving.monitor_policy)
        if self.settings.serving.self_check:
            from oss_fused.plugin.self_check import install as install_self_check

            install_self_check()
        fingerprint.record(vllm_config)
        if not self.settings.calibrated:
            self._unmatched_ignore = set(self.settings.ignore)
        self._options_read = True

    def _wants_head(self, layer: ParallelLMHead) -> bool:
        # the served model checks every draft: rounding costs acceptance, never quality
        if self.settings.calibrated or self._drafts:
            return True
        if self.settings.lm_head is not None:
            return self.settings.lm_head
        model = get_current_vllm_config().model_config.hf_config
        return getattr(model, "model_type", None) == "gpt_oss"


def _warn_of_idle_options(options: settings.ServingOptions, hf_config: Any) -> None:
    """Tell the user which options do nothing, as vLLM's own class serves the model."""
    from oss_fused.plugin.registration import MODEL_CLASSES

    architectures = getattr(hf_config, "architectures", None) or []
    idle = [name for name in options.model_dump(exclude_defaults=True) if name in _OF_SERVER]
    if idle and not any(name in MODEL_CLASSES for name in architectures):
        logger.warning(
            "oss_fused: %s: no effect with architectures=%s; expected one of %s",
            ", ".join(f"{name}={getattr(options, name)!r}" for name in idle),
            architectures,
            ", ".join(MODEL_CLASSES),
        )


def _check_batch_invariance() -> None:
    if vllm_envs.VLLM_BATCH_INVARIANT:
        raise SchemeError(
            f"VLLM_BATCH_INVARIANT={os.environ.get('VLLM_BATCH_INVARIANT')!r}: with --quantization "
            f"{QUANT_METHOD} a request's sums depend on its batch: attention splits, tiles and "
            f"split-K of matrix products, tiles of experts, and the activation formats of linear "
            f"layers and experts follow the number of tokens; expected it unset or 0, or another "
            f"quantisation"
        )
