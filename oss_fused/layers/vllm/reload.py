# SPDX-License-Identifier: MIT
"""Loads after the first: complete and checked, or refused with the old weights in place.

vLLM loads new weights into a running model layer by layer (its package model_loader.reload): it
swaps a layer's tensors for ones of the checkpoint's shapes, loads, quantises and copies the result
into the tensors that serve. vLLM alone would serve arbitrary memory where a tensor was not loaded,
and an error would leave the model without memory. Here

- new memory is marked as missing before it is loaded, as at the first load (loaded.py);
- all tensors are saved to host memory first, and come back if one is refused, on all ranks of the
  model;
- ``model.load_weights`` on a model that serves is such a load too, in one call.

reload_weights and the transfer of weights (start_weight_update, update_weights,
finish_weight_update) arrive here through ``install``. Until the load ends, the copy takes as much
host memory as a rank's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.reload import inplace, layerwise
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import record_metadata_for_reloading

from oss_fused.errors import CheckpointError, UnsupportedModelError
from oss_fused.layers.vllm.loaded import (
    CheckedMethod,
    check_names,
    check_values,
    checked_layers,
    is_draft_head,
    is_vllms,
    mark_missing,
    mark_model,
    method_of,
    refuse_layer,
)

logger = init_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]
# names of parameters; some classes return none
Loaded = set[str] | None

# of a module's attributes, those that hold its tensors
_HOLDERS = ("_parameters", "_buffers", "_non_persistent_buffers_set")

_sessions: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()
_installed = False
# a model gets its first weights
_loading = False


class Session:
    """One load into a model that serves."""

    def __init__(self, model: nn.Module) -> None:
        """Save the model.

        Raises:
            UnsupportedModelError: a layer's kernels keep weights where a reload does not reach.
        """
        # weak, here and below: else a load that never ends keeps its model for ever
        self._model = ref(model)
        self.error: Exception | None = None
        # names of the parameters that came; None: the model's class does not say
        self.loaded: set[str] | None = set()
        for layer, method in checked_layers(model):
            _check_reaches(layer, method)
        self.states = WeakKeyDictionary((module, _State(module)) for module in model.modules())
        # parameters that a layer has filled, and those of another layer with what that brought
        self._filled: set[int] = set()
        self._shared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        # layers that only hold other layers' tensors
        self._tied: list[nn.Module] = []
        tensors = {id(t): t for m in self.states for t in get_layer_tensors(m).values()}
        self.saved = [(t, t.detach().to("cpu", copy=True)) for t in tensors.values()]

    @property
    def model(self) -> nn.Module:
        """The model, which lives as long as somebody loads into it."""
        model = self._model()
        assert model is not None
        return model

    def load(self, load: Callable[[Weights], Loaded], weights: Weights) -> Loaded:
        """Load a part; an error waits until the end, where all ranks hear of it."""
        if self.error is not None:
            return set()
        try:
            loaded = load(weights)
        except Exception as error:
            self.roll_back(error)
            return set()
        if loaded is None:
            self.loaded = None
        elif self.loaded is not None:
            self.loaded |= loaded
        return loaded

    def note_layer(self, layer: nn.Module) -> None:
        """Called before ``layer`` fills its tensors: a tied head must bring what is in them."""
        held = self.states[layer].holders["_parameters"]
        for name, parameter in held.items():
            if id(parameter) in self._filled:
                path = next(path for path, each in self.model.named_modules() if each is layer)
                before = parameter.detach().to("cpu", copy=True)
                self._shared.append((f"{path}.{name}", parameter, before))
        self._filled |= self._parameters(layer)

    def finish(self, finalize: Callable[[], None]) -> None:
        """Check that all came, and have vLLM process what is left.

        Raises:
            CheckpointError: this rank or another refused the weights; the model is as before.
        """
        if self.error is None:
            try:
                self._check()
                finalize()
                for layer in self._tied:
                    # a CPU packs a copy
                    method_of(layer).process_weights_after_loading(layer)
                self._check_shared()
                if not is_draft_head(self.model):
                    check_values(self.model)
            except Exception as error:
                self.roll_back(error)
        if any_rank([self.error is not None])[0] and self.error is None:
            self.roll_back(CheckpointError("another rank refused them, see its log"))
        if self.error is not None:
            logger.error("oss_fused: new weights were refused: %s", self.error)
            raise CheckpointError(
                f"new weights were refused, the model's weights are as before: {self.error}"
            ) from self.error

    def _check(self) -> None:
        infos = {module: layerwise.get_layerwise_info(module) for module in self.states}
        came = {m for m, info in infos.items() if not info.can_load() or info.loaded_weights}
        filled: set[int] = set().union(*map(self._parameters, came))
        whole = not is_draft_head(self.model)
        for name, module in self.model.named_modules():
            method = method_of(module)
            if isinstance(method, CheckedMethod):
                if infos[module].can_load():
                    loaded = {loaded for loaded, _ in infos[module].loaded_weights}
                    method.check_session(module, loaded)
            elif whole and is_vllms(module) and module not in came:
                if not self._parameters(module) <= filled:
                    refuse_layer(module, name)
                self._tied.append(module)
        if whole:
            check_names(self.model, self.loaded)

    def _check_shared(self) -> None:
        for name, parameter, before in self._shared:
            if not torch.equal(parameter.detach().cpu(), before):
                raise CheckpointError(
                    f"{name!r} differs from the tensor of another layer, with which it shares its "
                    f"memory since the first load, where both were equal; expected equal tensors, "
                    f"or a new engine"
                )

    def _parameters(self, module: nn.Module) -> set[int]:
        """Identities of the parameters of ``module`` that serve."""
        held = self.states[module].holders["_parameters"]
        return {id(parameter) for parameter in held.values() if parameter is not None}

    @torch.no_grad()
    def roll_back(self, error: Exception) -> None:
        """Bring back modules and tensors as they were."""
        self.error = error
        for module, state in self.states.items():
            state.restore(module)
            layerwise.get_layerwise_info(module).reset()
        for tensor, saved in self.saved:
            tensor.data.copy_(saved)
            if hasattr(tensor, "weight_loader"):
                # vLLM wraps the loaders of tensors that it loads in place
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        layerwise.LOADING_LAYERS.clear()
        self.saved.clear()


class _State:
    """What a module and its quantisation method held before a load."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = dict(vars(module))
        # ours of the model, which holds the model; no load changes it
        self.attributes.pop("load_weights", None)
        self.holders = {name: self.attributes[name].copy() for name in _HOLDERS}
        method = method_of(module)
        self.method = dict(vars(method)) if isinstance(method, CheckedMethod) else None

    def restore(self, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name == "load_weights"}
        _replace(vars(module), self.attributes | own)
        for name, held in self.holders.items():
            # the same object: other modules may hold a reference
            holder = getattr(module, name)
            holder.clear()
            holder.update(held)
        if self.method is not None:
            _replace(vars(module.quant_method), self.method)


def _replace(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)


def _check_reaches(layer: Any, method: CheckedMethod) -> None:
    for name in layerwise.get_layerwise_info(layer).restore_metadata[0]:
        if getattr(layer, name, None) is not None and name not in layer._parameters:
            raise UnsupportedModelError(
                f"{method.prefix!r}: the kernels of {type(method).__name__} keep {name!r} in a "
                f"form of their own, which CUDA graphs would go on reading after a reload; "
                f"expected expert_kernels='native', another --moe-backend, or a new engine"
            )


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Which of ``flags`` are true on a rank of this model; all ranks must call it alike."""
    if not parallel_state.model_parallel_is_initialized():
        return list(flags)
    # vLLM builds models with the GPU as the default device
    found = torch.tensor(flags, dtype=torch.int32, device="cpu")
    for group in (parallel_state.get_tp_group(), parallel_state.get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(
                found, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group
            )
    return found.bool().tolist()


def _session_of(module: nn.Module) -> Session | None:
    return next((s for s in list(_sessions.values()) if module in s.states), None)


def _record(original: Callable[[nn.Module], None], model: nn.Module) -> None:
    """Called when vLLM has built ``model``, or a part of a larger one."""
    original(model)
    if any(True for _ in checked_layers(model)):
        mark_model(model)
        load: Any = model.load_weights
        model.load_weights = functools.partial(  # type: ignore[assignment]
            _load_weights, model, load, get_current_vllm_config()
        )


def _load_weights(
    model: nn.Module,
    original: Callable[..., Loaded],
    vllm_config: VllmConfig,
    weights: Weights,
    *args: Any,
    **kwargs: Any,
) -> Loaded:
    def load(weights: Weights) -> Loaded:
        return original(weights, *args, **kwargs)

    session = _session_of(model)
    if session is not None:
        # a part of a larger model is loaded by that
        return session.load(load, weights) if _sessions.get(model) is session else load(weights)
    # vLLM's loaders end with model.eval()
    if model.training:
        return _load_first(model, load, weights)
    with set_current_vllm_config(vllm_config):
        _initialize(_originals["initialize"], model)
        loaded = _sessions[model].load(load, weights)
        _finalize(_originals["finalize"], model, vllm_config.model_config)
    return loaded


def _load_first(model: nn.Module, load: Callable[[Weights], Loaded], weights: Weights) -> Loaded:
    global _loading
    if _loading:
        # a part of a larger model
        return load(weights)
    _loading = True
    try:
        loaded = load(weights)
    finally:
        _loading = False
    if not is_draft_head(model):
        for layer, method in checked_layers(model):
            method.check_first(layer)
        check_names(model, loaded)
        check_values(model)
    return loaded


def _initialize(original: Callable[[nn.Module], None], model: nn.Module) -> None:
    """Called when a load begins."""
    if not any(True for _ in checked_layers(model)):
        return original(model)
    _abandon(model)
    session = Session(model)
    try:
        original(model)
        mark_model(model)
    except BaseException as error:
        session.roll_back(RuntimeError(error))
        raise
    _sessions[model] = session


def _finalize(original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Called when a load ends."""
    session = _sessions.get(model)
    if session is None:
        return original(model, *args, **kwargs)
    try:
        session.finish(functools.partial(original, model, *args, **kwargs))
    finally:
        del _sessions[model]


def _abandon(model: nn.Module) -> None:
    """Roll back a load that was never finished."""
    session = _sessions.pop(model, None)
    if session is not None and session.error is None:
        session.roll_back(RuntimeError("the load was not finished"))
        logger.warning("oss_fused: a load was not finished; the model's weights are as before it")


def _materialize(original: Callable[..., None], layer: Any, info: Any) -> None:
    """Allocate a layer's weights; called when its first weight arrives."""
    session = _session_of(layer)
    if session is not None:
        session.note_layer(layer)
    original(layer, info)
    mark_missing(layer)


def _reset_target(original: Callable[[Any], None], engine: Any) -> None:
    """vLLM's worker calls this when a transfer has ended or failed."""
    _abandon(engine.model)
    original(engine)


_originals: dict[str, Callable[..., Any]] = {
    "initialize": layerwise.initialize_layerwise_reload,
    "finalize": layerwise.finalize_layerwise_reload,
}


def _wrap(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return run


def install() -> None:
    """Hook into vLLM's loads, once per process. Models without oss_fp8 methods load as before."""
    global _installed
    if _installed:
        return
    _installed = True
    begin = _wrap(_initialize, _originals["initialize"])
    end = _wrap(_finalize, _originals["finalize"])
    for module in (layerwise, model_loader.reload, inplace):
        module.initialize_layerwise_reload = begin
        module.finalize_layerwise_reload = end
    layerwise.materialize_layer = _wrap(_materialize, layerwise.materialize_layer)
    model_loader.utils.record_metadata_for_reloading = _wrap(_record, record_metadata_for_reloading)
    reset: Any = _wrap(_reset_target, WeightTransferEngine.reset_weight_update_target)
    WeightTransferEngine.reset_weight_update_target = reset
