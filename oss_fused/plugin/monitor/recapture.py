# SPDX-License-Identifier: MIT
"""CUDA graphs of a model whose layers the monitor has switched.

A recorded graph holds the layers as they were. The first step after a switch drops the graphs of
whole steps. From then on the first step of each size records its graph again, before its inputs are
written, and replays it. So no step waits for more than one graph. The model is not compiled again:
the graphs hold its operators one by one. Steps that vLLM records in pieces run without graphs, as
their pieces are compiled code. The head's graphs, few and small, are recorded again at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger

from oss_fused.kernels.recording import end_failed_capture
from oss_fused.layers.vllm.lm_head import HeadGraphs

logger = init_logger(__name__)


class Recapture:
    """Records the steps of one graph manager of vLLM again, each when it is first asked for."""

    def __init__(self, capture: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        """Record nothing yet.

        Args:
            capture: of a ModelCudaGraphManager.
            model: its first argument.
            *args: the others of its first call.
            **kwargs: the same.
        """
        self._capture, self._model = capture, model
        self._args, self._kwargs = args, kwargs
        self._switched, self._stopped = 0, False
        self._stream: torch.cuda.Stream | None = None

    def has_graph(self, manager: Any, step: Any, switched: int) -> bool:
        """Whether ``step`` may replay a graph; records it where it can be.

        Args:
            manager: the ModelCudaGraphManager.
            step: a BatchExecutionDescriptor that it chose.
            switched: number of layers switched so far, above 0.
        """
        if switched != self._switched:
            self._switched = switched
            self._drop(manager)
        if step.cg_mode != CUDAGraphMode.FULL:
            return False
        if step not in manager.graphs and not self._stopped:
            try:
                with self._while_serving():
                    self._record(manager, step)
            except Exception as error:
                # whatever it is, this is slower, not wrong: the step runs its operators one by one
                self._stopped = True
                end_failed_capture(manager.pool)
                logger.warning("oss_fused monitor: no further CUDA graphs: %s", error)
        return step in manager.graphs

    def _drop(self, manager: Any) -> None:
        torch.accelerator.synchronize()
        manager.graphs.clear()
        # vLLM's pool may have lost its last graph, and PyTorch takes nothing into such a pool
        manager.pool = torch.cuda.graph_pool_handle()
        # graphs of one stream share memory
        self._stream = torch.cuda.Stream()
        # an adapter would have to be set before each graph
        self._stopped = manager.vllm_config.lora_config is not None
        if isinstance(graphs := getattr(self._model, "head_graphs", None), HeadGraphs):
            try:
                with self._while_serving():
                    graphs.renew(self._model.run_head)
            except RuntimeError as error:
                logger.warning("oss_fused monitor: the head runs without CUDA graphs: %s", error)

    def _record(self, manager: Any, step: Any) -> None:
        steps, mode = manager._capture_descs, manager.cudagraph_mode
        manager._capture_descs = {CUDAGraphMode.FULL: [step]}
        # of a mode with pieces vLLM expects a compiled model
        manager.cudagraph_mode = CUDAGraphMode.FULL
        try:
            self._capture(manager, self._model, *self._args, **self._kwargs)
        finally:
            manager._capture_descs, manager.cudagraph_mode = steps, mode

    @contextmanager
    def _while_serving(self) -> Iterator[None]:
        """Let other threads wait for events meanwhile, which PyTorch's default makes an error."""
        graph = torch.cuda.graph

        def record(new: torch.cuda.CUDAGraph, pool: Any = None, **_: Any) -> Any:
            return graph(new, pool, self._stream, capture_error_mode="thread_local")

        torch.cuda.graph = record  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            torch.cuda.graph = graph  # type: ignore[misc]


def remember_capture(manager_class: Any) -> None:
    """Have managers of ``manager_class`` keep a Recapture, as ``oss_recapture``."""
    capture = manager_class.capture

    @functools.wraps(capture)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        capture(self, *args, **kwargs)
        self.oss_recapture = Recapture(capture, *args, **kwargs)

    manager_class.capture = run
