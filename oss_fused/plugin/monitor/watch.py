# SPDX-License-Identifier: MIT
"""Watches the inputs of FP8 layers while a server runs: NaN and Inf, saturation, outliers.

One step in ``monitor_every`` is a sample. It runs outside CUDA graphs, so that operators run and
call the observer. Each layer's largest magnitude per token goes into a row of a buffer on the
device. After the step the buffer is copied to the host, where a thread evaluates it. All other
steps only count. Every tensor-parallel rank samples the same step.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from oss_fused.errors import OssFusedError
from oss_fused.kernels.levels import levels_of, values_of
from oss_fused.kernels.op import set_observer
from oss_fused.layers.vllm.experts.fp8 import OssFp8MoEMethod
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.loaded import method_of
from oss_fused.plugin.monitor.fallback import Fallback, check_fallback
from oss_fused.plugin.monitor.policy import bits16_layers
from oss_fused.plugin.monitor.recapture import remember_capture
from oss_fused.plugin.monitor.statistics import Statistics
from oss_fused.quant.formats import E4M3
from oss_fused.quant.settings import ServingOptions

# tokens of a step that are sampled: all of a decode step, some of a prefill step
_ROWS = 256
# operator -> position of the weight among its arguments
_WEIGHT_AT = {
    **dict.fromkeys(("fp8_linear", "fp8_gemm", "gate_up_quant", "qkv_rope_kv"), 1),
    "moe_mxfp4": 2,
}
# operator -> position of what holds both levels of few rows
_LEVELS_AT = {"fp8_gemm": 7, "qkv_rope_kv": 20}

logger = init_logger(__name__)


class Monitor:
    """Takes the samples of one worker.

    Attributes:
        every: steps from one sample to the next.
        sampling: the step that runs is a sample.
        serving: start-up is over; the steps before it are made up.
    """

    def __init__(
        self, every: int, rank: int, policy: str | None = None, fallback: str = "restart"
    ) -> None:
        """Watch nothing yet."""
        self.every, self.rank, self.policy, self.fallback = every, rank, policy, fallback
        self.sampling = self.serving = False
        self._steps = 0
        # as the layers were made: what the file gets from now on holds for the next start
        self._bits16 = frozenset(bits16_layers(policy))
        self._index: dict[int, int] = {}
        self.statistics = Statistics([], [], rank)
        self._fallback: Fallback | None = None
        # stops the monitor when the model that is watched is freed
        self._freed: weakref.finalize[[], Any] | None = None
        # None ends the thread that reads it
        self._queue: queue.Queue[tuple[torch.Tensor, list[int], Any] | None] = queue.Queue()

    def watch(self, model: Any) -> None:
        """Find the layers of a loaded model; a second call, after a reload, finds them again."""
        names: list[str] = []
        limits: list[float] = []
        fp8_only: set[str] = set()
        self._index = {}
        self._detach_finalizer()
        # another engine of this process would get its memory, and be taken for it
        self._freed = weakref.finalize(model, self.stop)
        device = torch.device("cpu")
        for module in model.modules():
            method = method_of(module)
            if isinstance(method, OssFp8LinearMethod):
                weight = module.weight
            elif (
                isinstance(method, (OssMxfp4MoEMethod, OssFp8MoEMethod))
                and module.w13_weight.is_cuda
            ):
                weight = module.w13_weight
            else:
                continue
            self._index[weight.data_ptr()] = len(names)
            static = getattr(module, "input_scale", None)
            names.append(method.prefix)
            if isinstance(method, OssFp8MoEMethod):
                fp8_only.add(method.prefix)
            limits.append(float("inf") if static is None else float(static) * E4M3.max)
            device = weight.device
        # vLLM loads with another default dtype
        self._rows = torch.zeros(len(names), _ROWS, dtype=torch.float32, device=device)
        self._counts = [0] * len(names)
        before = self.statistics  # of before a reload
        bits16 = len(self._bits16 & set(names)) + before.switched
        self.statistics = Statistics(names, limits, self.rank, bits16, self.policy)
        self.statistics.fp8_only, self.statistics.switched = fp8_only, before.switched
        self.statistics.count_scale_updates(before)
        self._fallback = Fallback(model) if self.fallback == "now" else None

    def watches(self, model: Any) -> bool:
        """Whether ``model`` is the one that is watched, or contains it."""
        alive = None if self._freed is None else self._freed.peek()
        return alive is not None and any(module is alive[0] for module in model.modules())

    def may_replay(self, manager: Any, step: Any) -> bool:
        """Whether the next step may replay the graph ``step`` of vLLM's ``manager``."""
        if self.sampling:
            return False
        switched = self.statistics.switched
        if not switched:
            return True
        recapture = getattr(manager, "oss_recapture", None)
        return recapture is not None and recapture.has_graph(manager, step, switched)

    def stop(self) -> None:
        """Watch nothing any more."""
        if self.serving:
            self._queue.put(None)
        self.serving = self.sampling = False
        self._index = {}
        self._detach_finalizer()
        set_observer(None)

    def _detach_finalizer(self) -> None:
        """An older model may be freed while a newer one is watched."""
        if self._freed is not None:
            self._freed.detach()

    def observe(self, operator: str, arguments: tuple[Any, ...]) -> None:
        """Note the magnitudes of an operator's input; see kernels.op.set_observer."""
        if self._rows.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if operator == "mlp_fp8":
            self._observe_mlp(arguments)
            return
        at = _WEIGHT_AT.get(operator)
        if at is None:
            return
        index = self._index.get(arguments[at].data_ptr())
        if index is None:
            return
        x = arguments[0]
        x = x.view(-1, x.shape[-1])[:_ROWS]
        if x.dtype != torch.float8_e4m3fn:
            amax = x.abs().amax(-1)
        elif self.statistics.limits[index] == float("inf"):
            # each token has a scale of its own, not finite where the token was not
            amax = arguments[2].view(-1)[:_ROWS] * self._largest(operator, x, arguments)
        else:
            amax = x.float().abs().amax(-1) * arguments[2]
        self._rows[index, : len(x)] = amax
        self._counts[index] = len(x)

    def _observe_mlp(self, arguments: tuple[Any, ...]) -> None:
        """What the down projection reads leaves no operator: compute it again for the sample."""
        x, weight, x_scale, weight_scale, down_weight = arguments[:5]
        if down_weight.data_ptr() not in self._index:
            return
        # the call is noted as gate_up's; dtype and options are those that kernels are compiled for
        gate_up = (x[:_ROWS], weight, x_scale[:_ROWS], weight_scale)
        codes, scale = torch.ops.oss_fused.gate_up_quant(*gate_up, *arguments[7:])
        self.observe("fp8_gemm", (codes, down_weight, scale))

    @staticmethod
    def _largest(operator: str, x: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
        """Largest magnitude of each row in units of its scale."""
        at = _LEVELS_AT.get(operator, len(arguments))
        levels = levels_of(x, arguments[at]) if at < len(arguments) else None
        if levels is None:
            return E4M3.max
        return values_of(levels).abs().amax(-1)

    def end_sample(self) -> None:
        """After the step's first logits: send a sample off.

        Prompt log-probabilities and draft models run the head again, on other tokens.
        """
        if self.sampling:
            self._send()

    def end_step(self) -> None:
        """Once after each step: count it, switch layers, begin a sample with the next step."""
        if not self.serving:
            return
        self.end_sample()
        self._steps += 1
        if self._fallback is not None and self.statistics.saturating:
            switched = self._fallback.switch(self.statistics.saturating, str(self.policy))
            self.statistics.switched += switched
            self.statistics.bits16 += switched
        if self._steps % self.every == 0:
            self.sampling = True
            set_observer(self.observe)

    def _send(self) -> None:
        self.sampling = False
        set_observer(None)
        event = None
        if self._rows.is_cuda:
            rows = torch.empty(self._rows.shape, dtype=torch.float32, pin_memory=True)
            rows.copy_(self._rows, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            rows = self._rows.clone()
        self._queue.put((rows, self._counts, event))
        self._counts = [0] * len(self._counts)

    def start(self) -> None:
        """Begin to count steps; evaluate samples in a thread."""
        if not self.serving:
            threading.Thread(target=self._evaluate, name="oss-fused-monitor", daemon=True).start()
        self.serving = True

    def _evaluate(self) -> None:
        for rows, counts, event in iter(self._queue.get, None):
            if event is not None:
                event.synchronize()
            try:
                self.statistics.add(rows.numpy(), counts)
            except (OSError, OssFusedError) as error:
                logger.warning("oss_fused monitor: figures cannot be written: %s", error)


_monitor: Monitor | None = None


def current() -> Monitor | None:
    """The monitor of this process, None if there is none."""
    return _monitor


def install(model: Any, vllm_config: VllmConfig, options: ServingOptions) -> None:
    """Watch ``model``, which has its weights, if ``options`` say so."""
    global _monitor
    every, policy, fallback = (
        options.monitor_every,
        options.monitor_policy,
        options.monitor_fallback,
    )
    if not every:
        return
    if fallback == "now":
        check_fallback(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        logger.warning("oss_fused monitor: is off with pipeline parallelism")
        return
    if vllm_config.model_config.runner_type == "pooling":
        logger.warning_once(
            "oss_fused monitor: is off for a pooling model, which samples no tokens"
        )
        return
    known = _monitor and (_monitor.every, _monitor.policy, _monitor.fallback)
    if _monitor is None or known != (every, policy, fallback):
        if _monitor is not None:
            _monitor.stop()
        rank = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        _monitor = Monitor(every, rank, policy, fallback)
    _monitor.watch(model)
    for name in ("compute_logits", "compute_logits_local"):
        method = getattr(model, name, None)
        if method is not None and not hasattr(method, "oss_monitor"):
            setattr(model, name, _then(method, Monitor.end_sample))
    _start_after_warm_up(resolve_obj_by_qualname(parallel.worker_cls))
    if torch.cuda.is_available():
        _sample_outside_graphs()


def _then(method: Callable[..., Any], notify: Callable[[Monitor], None]) -> Callable[..., Any]:
    """``method``, which tells the monitor when it has run."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if _monitor is not None:
            notify(_monitor)
        return result

    run.oss_monitor = True  # type: ignore[attr-defined]
    return run


def _start_after_warm_up(worker: Any) -> None:
    warm_up = worker.compile_or_warm_up_model
    if hasattr(warm_up, "oss_monitor"):
        return

    @functools.wraps(warm_up)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warm_up(self, *args, **kwargs)
        # not with the model of another engine of this process
        if _monitor is not None and _monitor.watches(self.get_model()):
            runner = self.model_runner
            # Both runners, and a burst, run it once a step, after everything that runs the model.
            # The model itself is not called where a graph is replayed, its head more than once.
            if not hasattr(runner.sample_tokens, "oss_monitor"):
                runner.sample_tokens = _then(runner.sample_tokens, Monitor.end_step)
            _monitor.start()
        return result

    run.oss_monitor = True  # type: ignore[attr-defined]
    worker.compile_or_warm_up_model = run


def _sample_outside_graphs() -> None:
    """Have vLLM's model runner (V2) run a sample without CUDA graphs."""
    from vllm.v1.worker.gpu import cudagraph_utils

    manager: Any = cudagraph_utils.ModelCudaGraphManager
    dispatch = manager.dispatch
    if hasattr(dispatch, "oss_monitor"):
        return

    @functools.wraps(dispatch)
    def choose(self: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        chosen = dispatch(self, num_reqs, num_tokens, *args, **kwargs)
        if _monitor is None or _monitor.may_replay(self, chosen):
            return chosen
        return cudagraph_utils.BatchExecutionDescriptor(
            cg_mode=cudagraph_utils.CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=chosen.num_active_loras,
            num_ubatches=chosen.num_ubatches,
        )

    choose.oss_monitor = True  # type: ignore[attr-defined]
    manager.dispatch = choose
    remember_capture(manager)
