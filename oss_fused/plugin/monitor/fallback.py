# SPDX-License-Identifier: MIT
"""Linear layers that switch to 16-bit activations while the server runs.

The option ``monitor_fallback="now"`` asks for it. Activations are quantised inside compiled and
captured graphs, so the model leaves both: from the switch on it runs uncompiled, and its graphs are
captured again (recapture.py). The layers compute what the next start would compute with them in the
policy: W8A16.
"""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from oss_fused.errors import SchemeError
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.lm_head import HeadGraphs
from oss_fused.layers.vllm.loaded import method_of

logger = init_logger(__name__)


def check_fallback(vllm_config: VllmConfig) -> None:
    """Refuse a server in which some ranks or steps would stay in their graphs.

    Raises:
        SchemeError: several ranks, or vLLM's V1 model runner on a GPU.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.world_size * parallel.data_parallel_size
    if ranks > 1:
        raise SchemeError(
            f"monitor_fallback='now' with {ranks} ranks: expected one rank, or 'restart': ranks "
            f"in graphs and ranks outside them exchange tensors of different sizes"
        )
    if torch.cuda.is_available() and not vllm_config.use_v2_model_runner:
        raise SchemeError(
            "monitor_fallback='now' with vLLM's V1 model runner: expected the V2 runner, or "
            "'restart': V1 replays full CUDA graphs whatever a layer is set to"
        )


class Fallback:
    """Switches layers of one model."""

    def __init__(self, model: Any) -> None:
        """Switch nothing yet; does not keep ``model`` alive."""
        self._model = weakref.ref(model)
        self._asked: frozenset[str] = frozenset()

    def switch(self, wanted: dict[str, str], policy: str) -> int:
        """Give the linear layers named in ``wanted`` 16-bit activations; call it between steps.

        Args:
            wanted: name -> reason; a name is looked at once.
            policy: the file that lists them, for the log.

        Returns:
            How many layers were switched.
        """
        model = self._model()
        if model is None or wanted.keys() <= self._asked:
            return 0
        layers = _quantising(model, wanted.keys() - self._asked)
        self._asked |= wanted.keys()
        if not layers:
            return 0
        for layer in layers.values():
            layer.quant_method.bits16_inputs = True
            # norms and activations read it in every uncompiled step
            if hasattr(layer, "_input_quant_key"):
                del layer._input_quant_key
        for module in model.modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True
        if isinstance(graphs := getattr(model, "head_graphs", None), HeadGraphs):
            graphs.forget()
        first = next(iter(layers))
        logger.warning(
            "oss_fused monitor: %d layers run with 16-bit activations from this step on; the "
            "first is %s: %s. The model runs uncompiled until the next start, which reads the "
            "layers from %s.",
            len(layers),
            first,
            wanted[first],
            policy,
        )
        return len(layers)


def _quantising(model: Any, wanted: Set[str]) -> dict[str, Any]:
    """Name -> layer of ``model`` in ``wanted`` that still quantises its input."""
    found = {}
    for module in model.modules():
        method = method_of(module)
        if not isinstance(method, OssFp8LinearMethod) or method.bits16_inputs:
            continue
        if method.prefix in wanted:
            found[method.prefix] = module
    return found
