# SPDX-License-Identifier: MIT
"""TritonAutoTuner: prune, compile in parallel, measure a coarse grid, refine its best fifth.

One config that does not compile, crashes or computes something else costs its own trial and
nothing more; what happened to it stays in the result. The winner is kept in the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tqdm import tqdm

from oss_fused.bench.accuracy import Tolerance, check_accuracy
from oss_fused.bench.energy import energy_per_call_mj
from oss_fused.bench.memory import peak_memory_bytes
from oss_fused.bench.statistics import MIN_SAMPLES, collect
from oss_fused.bench.timing import time_calls, warm_up
from oss_fused.errors import SchemeError, TritonKernelError
from oss_fused.kernels.checks import check_device
from oss_fused.tuning.cache import CacheEntry, TuningCache
from oss_fused.tuning.device import DeviceDescription, describe
from oss_fused.tuning.identity import kernel_identity
from oss_fused.tuning.lookup import cache_key, shape_of
from oss_fused.tuning.objective import KernelMetrics, Objective
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.result import Status, Trial, TuningResult
from oss_fused.tuning.space import Config, ConfigSpace

Timer = Callable[[Callable[[], Any], int, torch.device], Sequence[float]]
# share of the coarse grid's configs, the best, whose neighbours are tried before the best climbs
_KEPT = 0.2
_RESOURCE_WORDS = ("out of resource", "shared memory", "registers")


class TritonAutoTuner:
    """Finds the best config of a kernel for one problem, and remembers it.

    Args:
        kernel_fn: called as ``kernel_fn(*args, **config)``; may return its result.
        config_space: a ConfigSpace, or a dict of parameter name to values.
        warmup_runs: calls before each measurement.
        benchmark_runs: samples of a measurement, at least 20.
        operation: name in the cache; default: the function's name.
        reference: called as ``reference(*args)``; a config whose result differs is rejected.
        tolerance: of that comparison; default: by dtype.
        objective: what to minimise.
        cache: where results are kept; default: the user's cache file.
        description: device limits that prune; default: those of the device tuned on.
        accumulators: fp32 output tiles the kernel keeps at once (2 for a gated MLP).
        exhaustive: measure every config instead of coarse grid and refinement.
        compile_workers: threads that compile ahead of the measurements; 0 compiles in turn.
        timer: takes (call, repeats, device) and returns milliseconds; replaceable for simulation.
        progress: show a progress bar on stderr.

    Raises:
        SchemeError: a run count, or an empty config space.
    """

    def __init__(
        self,
        kernel_fn: Callable[..., Any],
        config_space: ConfigSpace | Mapping[str, Sequence[int]],
        warmup_runs: int = 10,
        benchmark_runs: int = 100,
        *,
        operation: str | None = None,
        reference: Callable[..., Any] | None = None,
        tolerance: Tolerance | None = None,
        objective: Objective | None = None,
        cache: TuningCache | None = None,
        description: DeviceDescription | None = None,
        accumulators: int = 1,
        exhaustive: bool = False,
        compile_workers: int = 4,
        timer: Timer = time_calls,
        progress: bool = False,
    ) -> None:
        """Keep the settings; nothing runs before ``tune``."""
        if warmup_runs < 0:
            raise SchemeError(f"warmup_runs={warmup_runs}: expected at least 0")
        if benchmark_runs < MIN_SAMPLES:
            raise SchemeError(f"benchmark_runs={benchmark_runs}: expected at least {MIN_SAMPLES}")
        self.kernel_fn = kernel_fn
        self.config_space = ConfigSpace.of(config_space)
        self.warmup_runs = warmup_runs
        self.benchmark_runs = benchmark_runs
        name: str = getattr(kernel_fn, "__name__", "") or type(kernel_fn).__name__
        self.operation = operation if operation else name
        self.reference = reference
        self.tolerance = tolerance
        self.objective = objective or Objective()
        self.cache = cache or TuningCache()
        self.description = description
        self.accumulators = accumulators
        self.exhaustive = exhaustive
        self.compile_workers = compile_workers
        self.timer = timer
        self.progress = progress

    def tune(
        self,
        *args: Any,
        problem_size: Any,
        device: str | torch.device = "cuda:0",
        force: bool = False,
        default: Config | None = None,
    ) -> TuningResult:
        """Return the best config for these arguments, from the cache where it is known.

        Args:
            *args: arguments of the kernel.
            problem_size: sizes (a tuple), or a data class of specs.py, whose FLOPs and bytes then
                give throughput and bandwidth.
            device: where to measure.
            force: measure even where the cache has an answer.
            default: a config to measure too, so that the result can state the gain; an empty one
                calls the kernel without any, for its own choice.

        Raises:
            TritonKernelError: no config ran and was right; the message lists why.
            BackendUnavailableError: ``device`` is a GPU and none is usable here, or the objective
                cannot be measured on it.
            UnsupportedDeviceError: no such device.
            ShapeMismatchError: ``problem_size`` is not a tuple of sizes.
        """
        run = _Run(self, args, problem_size, check_device(device))
        if not force:
            known = self.cache.get(run.key)
            if known is not None and known.config in self.config_space:
                metrics = KernelMetrics(**known.metrics)
                return TuningResult(known.config, metrics, str(run.key), from_cache=True)
        return run.search(default)


class _Run:
    """One search: the state that a tuner shares between its trials."""

    def __init__(
        self, tuner: TritonAutoTuner, args: tuple[Any, ...], problem: Any, device: torch.device
    ) -> None:
        self.tuner, self.args, self.problem, self.device = tuner, args, problem, device
        tuner.objective.check_device(device)
        self.description = tuner.description or describe(device)
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        self.dtype = first.dtype if first is not None else torch.float32
        self.key = cache_key(
            tuner.operation,
            problem,
            [a.dtype for a in args if isinstance(a, torch.Tensor)] or [self.dtype],
            device,
            tuner.description,
            kernel=kernel_identity(tuner.kernel_fn),
            objective=str(tuner.objective),
        )
        self.trials: dict[tuple[tuple[str, int], ...], Trial] = {}
        self.expected: Any = None
        self.dead = False

    def search(self, default: Config | None) -> TuningResult:
        tuner = self.tuner
        if tuner.reference is not None:
            self.expected = tuner.reference(*self.args)
        relatives = tuner.cache.family(self.key)
        for relative in relatives:
            for config in relative.impossible:
                self._record(Trial(config, Status.SKIPPED, "did not fit the device before"))
        baseline = self._measure_all([default])[0] if default is not None else None
        space = tuner.config_space
        if tuner.exhaustive:
            self._measure_all(space)
        else:
            # history: what won at the nearest shapes is a better start than any grid point
            seeds = [r.config for r in relatives[:3] if r.config in space]
            self._measure_all([*seeds, *self._coarse_grid()])
            self._refine()
        best = self._best()
        if best is None or best.metrics is None:
            raise TritonKernelError(self._why_none())
        result = TuningResult(
            best.config,
            best.metrics,
            str(self.key),
            trials=tuple(self.trials.values()),
            default_metrics=baseline.metrics if baseline else None,
        )
        impossible = tuple(t.config for t in self.trials.values() if t.status is Status.TOO_LARGE)
        tuner.cache.put(
            CacheEntry(
                self.key,
                best.config,
                tuner.objective.score(best.metrics),
                best.metrics.to_dict(),
                impossible,
            )
        )
        return result

    def _coarse_grid(self) -> Iterable[Config]:
        """A grid of two values a parameter, or a denser one where pruning leaves none of it."""
        space = self.tuner.config_space
        longest = max(len(values) for values in space.parameters.values())
        for count in range(2, longest + 1):
            grid = list(space.coarse(count))
            if any(self._reason(config) is None for config in grid):
                return grid
        return space

    def _refine(self) -> None:
        space, reach = self.tuner.config_space, 1
        ranked = self._ranked()
        for start in ranked[: math.ceil(_KEPT * len(ranked))]:
            if not self.dead:
                self._measure_all(space.neighbours(start.config))
        best = self._best()
        while best is not None and not self.dead:
            self._measure_all(space.neighbours(best.config, reach))
            better = self._best()
            if better is not None and better.config != best.config:
                best, reach = better, 1
            elif reach == 1:
                # a larger tile may pay only together with more warps: look two steps away
                reach = 2
            else:
                return

    def _reason(self, config: Config) -> str | None:
        return reason_to_skip(
            config,
            self.description,
            shape_of(self.problem),
            self.dtype.itemsize,
            self.tuner.accumulators,
        )

    def _measure_all(self, configs: Iterable[Config]) -> list[Trial]:
        configs = list(configs)
        todo = []
        for config in configs:
            if _frozen(config) in self.trials or config in todo:
                continue
            reason = self._reason(config)
            if reason is not None:
                self._record(Trial(config, Status.SKIPPED, reason))
            else:
                todo.append(config)
        # every compilation ends before the first measurement: it launches the kernel, too
        errors = self._compile_all(todo)
        for config, error in self._progress(zip(todo, errors, strict=True), len(todo), "Measuring"):
            self._record(_failed(config, error) if error else self._measure(config))
        return [self.trials[_frozen(config)] for config in configs]

    def _compile_all(self, configs: list[Config]) -> list[Exception | None]:
        workers = self.tuner.compile_workers if self.device.type == "cuda" else 0
        if not workers:
            return list(self._progress(map(self._compile, configs), len(configs), "Compiling"))
        with ThreadPoolExecutor(workers) as pool:
            done = pool.map(self._compile, configs)
            return list(self._progress(done, len(configs), "Compiling"))

    def _progress(self, items: Iterable[Any], total: int, verb: str) -> Iterable[Any]:
        label = f"{verb} {self.tuner.operation}"
        return tqdm(items, desc=label, total=total, disable=not self.tuner.progress, leave=False)

    def _compile(self, config: Config) -> Exception | None:
        # the first call compiles; a launch is the only way that works for every kernel function
        if self.dead:
            return TritonKernelError("an earlier config left the device unusable")
        try:
            with _on(self.device):
                self.tuner.kernel_fn(*self.args, **config)
        except Exception as error:
            return error
        return None

    def _measure(self, config: Config) -> Trial:
        tuner = self.tuner

        def call() -> Any:
            return tuner.kernel_fn(*self.args, **config)

        try:
            with _on(self.device):
                wrong = self._wrong(call())
                if wrong:
                    return Trial(config, Status.WRONG, wrong)
                warm_up(call, tuner.warmup_runs, self.device)
                timing = collect(
                    lambda count: tuner.timer(call, count, self.device),
                    tuner.benchmark_runs,
                    max_rounds=3,
                )[1]
                metrics = KernelMetrics.of(
                    timing,
                    getattr(self.problem, "flops", None),
                    getattr(self.problem, "num_bytes", None),
                    self.description.memory_bandwidth_gbps if self.description else None,
                    peak_memory_bytes(call, self.device),
                    energy_per_call_mj(call, self.device) if tuner.objective.energy else None,
                )
        except Exception as error:
            self._check_alive()
            return _failed(config, error)
        return Trial(config, Status.OK, metrics=metrics)

    def _wrong(self, actual: Any) -> str:
        if self.expected is None:
            return ""
        pairs = zip(_tensors(actual), _tensors(self.expected), strict=True)
        results = [check_accuracy(a, e, self.tuner.tolerance) for a, e in pairs]
        return "; ".join(r.reason for r in results if not r.passed)

    def _check_alive(self) -> None:
        # after an illegal access every later CUDA call fails: stop, and keep what was measured
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                self.dead = True

    def _record(self, trial: Trial) -> None:
        self.trials[_frozen(trial.config)] = trial

    def _best(self) -> Trial | None:
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[Trial]:
        """Trials with a time, the best first."""
        good = [
            t for t in self.trials.values() if t.metrics and t.config in self.tuner.config_space
        ]
        score = self.tuner.objective.score
        return sorted(good, key=lambda t: score(t.metrics) if t.metrics else 0.0)

    def _why_none(self) -> str:
        reasons: dict[str, int] = {}
        for trial in self.trials.values():
            text = f"{trial.status.value}: {trial.message}"
            reasons[text] = reasons.get(text, 0) + 1
        common = sorted(reasons.items(), key=lambda item: -item[1])[:3]
        listed = "; ".join(f"{count} x {text[:200]}" for text, count in common)
        return (
            f"operation={self.tuner.operation!r}: no config of {len(self.trials)} works: {listed}"
        )


def _frozen(config: Config) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(config.items()))


def _failed(config: Config, error: Exception) -> Trial:
    text = f"{type(error).__name__}: {error}"
    too_large = any(word in text.lower() for word in _RESOURCE_WORDS)
    return Trial(config, Status.TOO_LARGE if too_large else Status.FAILED, text)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
