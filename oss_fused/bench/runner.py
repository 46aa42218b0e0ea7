# SPDX-License-Identifier: MIT
"""One way to run any operation on any backend, with input and output checks, and the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from oss_fused.bench.accuracy import (
    FP8_TOLERANCE,
    TOLERANCES,
    AccuracyResult,
    Tolerance,
    check_accuracy,
)
from oss_fused.bench.problems import OperatorProblem
from oss_fused.errors import BackendUnavailableError, OssFusedError, SchemeError, TritonKernelError
from oss_fused.kernels.op import available_backends, get_kernel, operations
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

Problem = RMSNormRoPEInput | GatedMLPInput | FP8GEMMInput | OperatorProblem
Implementation = Callable[..., torch.Tensor]


class KernelRunner:
    """Runs operations of one backend.

    Args:
        backend: "torch", "triton", "cuda", "tilelang" or "nvcc".
        compiled: run the reference through ``torch.compile``; "torch" only.

    Raises:
        SchemeError: ``compiled`` with another backend.
        BackendUnavailableError: at the first run, if the backend cannot run here.
    """

    def __init__(self, backend: str, compiled: bool = False) -> None:
        """Remember the backend; nothing is loaded yet."""
        if compiled and backend != "torch":
            raise SchemeError(f"compiled=True: backend={backend!r}, expected 'torch'")
        self.backend = backend
        self.compiled = compiled

    def run(self, operation: str, *args: Any) -> Any:
        """Run ``operation`` and check that its outputs lie on the inputs' device.

        Raises:
            BackendUnavailableError: no such backend or operation here.
            TritonKernelError: the kernel failed, or put an output on another device. Errors of
                errors.py about the arguments pass through.
        """
        kernel = get_kernel(self.backend, operation)
        try:
            result = _compiled(kernel)(*args) if self.compiled else kernel(*args)
        except OssFusedError:
            raise
        except Exception as error:
            raise TritonKernelError(
                f"operation={operation!r} on backend={self.backend!r} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        outputs = (result,) if isinstance(result, torch.Tensor) else (result or ())
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.device != device:
                raise TritonKernelError(
                    f"operation={operation!r}: output {index} on {output.device}, expected {device}"
                )
        return result


@functools.cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, dynamic=False)


def shared_operations() -> dict[str, list[str]]:
    """Operation -> backends that run it here, for operations with more than one."""
    found: dict[str, list[str]] = {}
    for backend in available_backends():
        for operation in operations(backend):
            try:
                get_kernel(backend, operation)
            except BackendUnavailableError:
                continue
            found.setdefault(operation, []).append(backend)
    return {name: backends for name, backends in sorted(found.items()) if len(backends) > 1}


def oracle(problem: Problem, arguments: dict[str, Any]) -> torch.Tensor:
    """The formula of ``problem`` in float64 on the CPU; shares no code with the kernels."""
    wide = {
        name: value.detach().cpu().double() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    if isinstance(problem, OperatorProblem):
        return problem.oracle(wide)
    if isinstance(problem, FP8GEMMInput):
        return wide["a"] @ wide["b"]
    x = wide["x"]
    if isinstance(problem, GatedMLPInput):
        up = x @ wide["up_weight"].t()
        if problem.activation == "silu":
            activated = up / (1 + torch.exp(-up))
        elif problem.activation == "gelu":
            activated = 0.5 * up * (1 + torch.erf(up / 2**0.5))
        else:
            inner = (2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)
            activated = 0.5 * up * (1 + torch.tanh(inner))
        return (x @ wide["gate_weight"].t()) * activated
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + problem.eps) * wide["weight"]
    y = y.reshape(*x.shape[:2], -1, problem.head_dim)
    half = problem.head_dim // 2
    rotated = torch.cat([-y[..., half:], y[..., :half]], dim=-1)
    cos, sin = wide["cos"][:, None, :], wide["sin"][:, None, :]
    return (y * cos + rotated * sin).reshape(x.shape)


# the oracle runs in float64 on a CPU: the check keeps the problem's kind at this size
_CHECK_ROWS, _CHECK_WIDTH = 5, 512


@dataclass(frozen=True)
class Verification:
    """Outcome over all cases: passed, or the first case that failed and why.

    ``relative_error`` is the largest relative L2 error of the cases that ran.
    """

    passed: bool
    case: str
    result: AccuracyResult
    relative_error: float = 0.0


def verify(
    implementation: Implementation, problem: Problem, device: str | torch.device = "cpu"
) -> Verification:
    """Check an implementation before its time may be reported.

    The cases: random values from two seeds, small and large magnitudes, zeros, ones, a NaN and an
    Inf. An exception is a failure, not a crash. FP8 products skip the magnitudes that their format
    cannot hold apart from a scale, which per-row scaling makes exact anyway.

    Args:
        implementation: takes the keyword arguments of ``problem.make``.
        problem: sizes and dtype; use a small one, the oracle runs in float64 on the CPU.
        device: where to run.
    """
    verdict = Verification(True, "", AccuracyResult(True, None))
    for case, arguments in _cases(problem):
        on_device = {
            n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()
        }
        before = {n: v.clone() for n, v in on_device.items() if isinstance(v, torch.Tensor)}
        try:
            actual = implementation(**on_device)
            result = _judge(actual, problem, oracle(problem, arguments))
        except Exception as error:
            result = AccuracyResult(False, None, f"{type(error).__name__}: {error}")
        changed = [n for n, v in before.items() if not _same(v, on_device[n])]
        if result.passed and changed:
            result = replace(result, passed=False, reason=f"input {changed[0]} was overwritten")
        distance = result.metrics.relative_l2 if result.metrics else 0.0
        largest = max(verdict.relative_error, distance)
        verdict = Verification(result.passed, case, result, largest)
        if not result.passed:
            return verdict
    return verdict


def difference(actual: torch.Tensor, expected: torch.Tensor, problem: Problem) -> str:
    """In what way one implementation's output differs from another's; empty where it does not.

    Both carry rounding errors, so twice the tolerance against the oracle is accepted. Any size: the
    comparison takes the outputs' memory once more, in float32.
    """
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    rest = actual.float() - expected
    lost = int((~rest.isfinite()).sum())
    if lost:
        return f"{lost} elements are NaN or Inf in one of the outputs"
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(rest)) / size if size else float(rest.abs().sum())
    fp8 = isinstance(problem, FP8GEMMInput)
    limit = 2 * (FP8_TOLERANCE if fp8 else TOLERANCES[actual.dtype]).relative_l2
    return "" if error <= limit else f"relative_l2 {error:.3g} above {limit:.3g}"


def shrunk(problem: Problem) -> Problem:
    """The same kind of problem at a size whose float64 oracle takes milliseconds."""
    if isinstance(problem, OperatorProblem):
        return problem.small()
    if isinstance(problem, FP8GEMMInput):
        return replace(
            problem,
            m=min(problem.m, 3 * _CHECK_ROWS),
            n=min(problem.n, _CHECK_WIDTH),
            k=min(problem.k, _CHECK_WIDTH),
        )
    if isinstance(problem, GatedMLPInput):
        return replace(
            problem,
            batch_size=min(problem.batch_size, 2),
            seq_len=min(problem.seq_len, _CHECK_ROWS),
            hidden_dim=min(problem.hidden_dim, _CHECK_WIDTH),
            intermediate_dim=min(problem.intermediate_dim, _CHECK_WIDTH),
        )
    # the norm's kernel depends on the hidden size: keep it
    return replace(
        problem,
        batch_size=min(problem.batch_size, 2),
        seq_len=min(problem.seq_len, _CHECK_ROWS),
    )


# sizes that a problem can do with less of, the first that it has more than one of
_HALVED = ("batch_size", "batch", "rows", "m", "seq_len", "n", "heads", "length", "size")


def halved(problem: Problem) -> Problem | None:
    """The problem with half of its batch, rows or length; None where there is no half."""
    for name in _HALVED:
        if (count := getattr(problem, name, 1)) > 1:
            any_problem: Any = problem
            return cast(Problem, replace(any_problem, **{name: count // 2}))
    return None


def _judge(actual: torch.Tensor, problem: Problem, expected: torch.Tensor) -> AccuracyResult:
    fp8 = isinstance(problem, FP8GEMMInput)
    dtype = problem.out_dtype if isinstance(problem, FP8GEMMInput) else problem.dtype
    if actual.dtype != dtype:
        return AccuracyResult(False, None, f"dtype {actual.dtype}, expected {dtype}")
    tolerance: Tolerance | None = FP8_TOLERANCE if fp8 else None
    return check_accuracy(actual.cpu(), expected, tolerance)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _cases(problem: Problem) -> list[tuple[str, dict[str, Any]]]:
    key, small, takes_inf = _varied(problem)
    base = problem.make()

    def changed(change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        values = base[key].clone()
        change(values)
        return {**base, key: values}

    def poke(value: float) -> Callable[[torch.Tensor], Any]:
        # the last element: a kernel that stops early or masks wrongly misses it
        return lambda t: t.reshape(-1)[-1:].fill_(value)

    cases = [
        ("random", base),
        ("random, another seed", problem.make(seed=1)),
        ("small", changed(lambda t: t.mul_(small))),
        ("large", changed(lambda t: t.mul_(16.0))),
        ("zeros", changed(lambda t: t.zero_())),
        ("ones", changed(lambda t: t.fill_(1.0))),
    ]
    if base[key].numel():
        cases.append(("NaN", changed(poke(float("nan")))))
        # an infinity meets weights of both signs: the exact pattern of Inf and NaN is the
        # summation order's, so only the norm, whose formula fixes it, is checked
        if takes_inf:
            cases.append(("Inf", changed(poke(float("inf")))))
    return cases


def _varied(problem: Problem) -> tuple[str, float, bool]:
    """The argument that the cases change, the factor that makes it small, whether Inf is one."""
    if isinstance(problem, OperatorProblem):
        return problem.varied, problem.small_factor, problem.takes_inf
    # small enough for eps to matter in the norm; a product must stay above fp16's subnormals
    norm = isinstance(problem, RMSNormRoPEInput)
    key = "a" if isinstance(problem, FP8GEMMInput) else "x"
    return key, 2.0**-10 if norm else 2.0**-4, norm
