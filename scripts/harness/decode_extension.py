# SPDX-License-Identifier: MIT
"""What bench_decode needs inside vLLM's worker: kernels and host time of a few steps, bandwidth.

vLLM mixes ``WorkerExtension`` into its worker class (``--worker-extension-cls``); the engine's
``collective_rpc`` calls the methods, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.bench.timing import copy_bandwidth

# method of vLLM's model runner, or of one of its parts -> what it is called in the report
_PARTS = {
    "execute_model": "forward: inputs and launches",
    "prepare_inputs": "of it, inputs",
    "model_state.prepare_attn": "of it, attention metadata",
    "sample_tokens": "tokens: head, sampler, drafts",
    "sample": "of it, head and sampler",
    "speculator.propose": "of it, drafts",
}


class WorkerExtension:
    """Methods of the worker; their names start with ``oss_`` so that none is taken."""

    model_runner: Any

    def oss_profile_start(self) -> None:
        """Record kernels (on a CPU: operators) and count steps from here on."""
        gpu = torch.cuda.is_available()
        self._oss_steps = 0
        self._oss_execute = self.model_runner.execute_model
        self.model_runner.execute_model = self._oss_counted
        if gpu:
            torch.cuda.synchronize()
        activities = torch.profiler.ProfilerActivity
        self._oss_profile = torch.profiler.profile(
            activities=[activities.CUDA if gpu else activities.CPU]
        )
        self._oss_profile.start()

    def _oss_counted(self, *args: Any, **kwargs: Any) -> Any:
        self._oss_steps += 1
        return self._oss_execute(*args, **kwargs)

    def oss_profile_stop(self) -> dict[str, Any]:
        """Stop recording.

        Returns:
            "steps"; "names", each once; "launches": [index of the name, start, duration] in
            microseconds, in order of their start.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._oss_profile.stop()
        del self.model_runner.execute_model  # restore the method of the class
        wanted = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else None
        names: dict[str, int] = {}
        launches = []
        for event in self._oss_profile.events() or []:
            if event.is_user_annotation:
                continue
            if wanted is None or event.device_type == wanted:
                place = names.setdefault(event.name, len(names))
                span = event.time_range
                launches.append([place, float(span.start), float(span.end - span.start)])
        launches.sort(key=lambda launch: launch[1])
        return {"steps": self._oss_steps, "names": list(names), "launches": launches}

    def oss_host_start(self) -> None:
        """Take the time in the model runner's methods from here on, not the device's."""
        self._oss_host: dict[str, list[float]] = {part: [] for part in _PARTS.values()}
        self._oss_timed: list[tuple[Any, str]] = []
        for path, part in _PARTS.items():
            *inner, method = path.split(".")
            owner = self.model_runner
            for name in inner:
                owner = getattr(owner, name, None)
            if hasattr(owner, method):
                setattr(owner, method, _timed(getattr(owner, method), self._oss_host[part]))
                self._oss_timed.append((owner, method))

    def oss_host_stop(self) -> dict[str, float]:
        """Milliseconds of each method, mean over the calls since oss_host_start."""
        for owner, method in self._oss_timed:
            delattr(owner, method)  # restore the method of the class
        return {part: 1e3 * sum(s) / len(s) for part, s in self._oss_host.items() if s}

    def oss_copy_bandwidth(self) -> float | None:
        """Bytes per second that a copy on the device reads and writes; None without a GPU."""
        return copy_bandwidth(2**30) if torch.cuda.is_available() else None


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``method``, which adds the seconds of each call to ``seconds``."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    return timed
