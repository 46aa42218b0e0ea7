# SPDX-License-Identifier: MIT
"""vLLM's API server over a stand-in for the engine: what the server alone can stream.

`STEP_MS=7 python -m harness.stand_in_server MODEL [flags of vllm serve]`. As a device would, the
stand-in has a token of each request every STEP_MS, whether or not the server has taken the last
ones. It runs in the server's process, so its own work counts, a few microseconds per token.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

# requests that come at once start together
_GATHER_SECONDS = 0.3
_MOST_WAITING = 200


class StandIn:
    """What of vLLM's AsyncMPClient a server of completions uses."""

    def __init__(self, step_seconds: float) -> None:
        """Requests get a token every ``step_seconds``."""
        self.step_seconds = step_seconds
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        # request -> tokens that are left
        self.left: dict[str, int] = {}
        self.arrived = asyncio.Event()
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.steps: asyncio.Task[None] | None = None
        self.engine: Any = importlib.import_module("vllm.v1.engine")
        self.stats: Any = importlib.import_module("vllm.v1.metrics.stats")

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Completions only."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def add_request_async(self, request: Any) -> None:
        """Start a request."""
        self.left[request.request_id] = request.sampling_params.max_tokens
        self.arrived.set()

    async def abort_requests_async(self, names: list[str]) -> None:
        """End requests."""
        for name in names:
            self.left.pop(name, None)

    def shutdown(self, *args: Any, **options: Any) -> None:
        """Nothing runs elsewhere."""

    async def get_output_async(self) -> Any:
        """The next step's outputs."""
        if self.steps is None:
            self.steps = asyncio.create_task(self._run_steps())
        return await self.outputs.get()

    async def _run_steps(self) -> None:
        due = time.perf_counter()
        while True:
            while not self.left:
                self.arrived.clear()
                await self.arrived.wait()
                await asyncio.sleep(_GATHER_SECONDS)
                due = time.perf_counter()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            # all steps that a device would have made by now
            while self.left and due <= time.perf_counter():
                if self.outputs.qsize() >= _MOST_WAITING:
                    break
                self.outputs.put_nowait(self._step())
                due += self.step_seconds

    def _step(self) -> Any:
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            ends = not self.left[name]
            if ends:
                del self.left[name]
            reason = self.engine.FinishReason.LENGTH if ends else None
            token = random.randrange(100, 250)
            outputs.append(self.engine.EngineCoreOutput(name, [token], finish_reason=reason))
        stats = self.stats.SchedulerStats(num_running_reqs=len(self.left))
        return self.engine.EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)


def main() -> None:
    """Serve until a signal comes."""
    seconds = float(os.environ["STEP_MS"]) * 1e-3
    client: Any = importlib.import_module("vllm.v1.engine.core_client").EngineCoreClient
    client.make_async_mp_client = staticmethod(lambda **_: StandIn(seconds))
    options: Any = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parsing: Any = importlib.import_module("vllm.utils.argparse_utils")
    entry: Any = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    parser = options.make_arg_parser(parsing.FlexibleArgumentParser())
    model, *flags = sys.argv[1:]
    arguments = parser.parse_args(["--model", model, *flags])
    asyncio.run(entry.run_server(arguments))


if __name__ == "__main__":
    main()
