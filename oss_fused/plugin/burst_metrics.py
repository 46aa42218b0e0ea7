# SPDX-License-Identifier: MIT
"""Bursts on vLLM's /metrics: tokens by burst, and true inter-token latencies.

vLLM takes one latency per answer of the engine, K times the time of a token where the answer has K.
The other metrics are true as they are: iteration_tokens_total counts the tokens of an engine step,
which is a burst. Only the estimated FLOPs and bytes (--enable-mfu-metrics) count one token of each.
"""

from __future__ import annotations

import functools
from typing import Any


def count_bursts() -> None:
    """Have this process' metrics count each token of a burst; once a process."""
    from prometheus_client import Counter
    from vllm.v1.metrics.stats import IterationStats

    theirs = IterationStats.update_from_output
    if hasattr(theirs, "oss_bursts"):
        return
    by_burst = Counter(
        "oss_fused:burst_tokens",
        "Generated tokens, by the number that a request got from one engine step",
        ["burst"],
    )

    # looking a label up takes longer than counting
    counter_of = functools.cache(lambda tokens: by_burst.labels(str(tokens)))

    @functools.wraps(theirs)
    def update(self: Any, output: Any, *args: Any, **options: Any) -> None:
        latencies = self.inter_token_latencies_iter
        before, tokens = len(latencies), len(output.new_token_ids)
        theirs(self, output, *args, **options)
        if tokens:
            counter_of(tokens).inc(tokens)
        if tokens > 1 and len(latencies) > before:
            latencies[-1:] = [latencies[-1] / tokens] * tokens

    update.oss_bursts = True  # type: ignore[attr-defined]
    IterationStats.update_from_output = update
