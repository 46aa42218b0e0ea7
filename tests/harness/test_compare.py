# SPDX-License-Identifier: MIT
"""The comparison's parts: arms, grid, defaults of flags, order of measurement, failures."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import summary
from harness.arms import Arm, parse_arm
from harness.compare import Comparison, run
from harness.grid import Lengths, make_grid, parse_lengths
from harness.load import LoadClient

from oss_fused.errors import ServerError

MakePlan = Callable[..., Comparison]


def test_parse_arm() -> None:
    arm = parse_arm("oss=OSS_FUSED_BACKEND=torch VLLM_PLUGINS= /m --hf-overrides '{\"a\": 1}' -x")
    variables = (("OSS_FUSED_BACKEND", "torch"), ("VLLM_PLUGINS", ""))
    assert arm == Arm("oss", "/m", ("--hf-overrides", '{"a": 1}', "-x"), variables)


@pytest.mark.parametrize("text", ["/models/x", "a=", "a=--flag", "=m", "a b=m", "a=X=1", "a='m"])
def test_parse_arm_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="arm|quotation"):
        parse_arm(text)


@pytest.mark.parametrize(
    "text",
    ["128", "0:5", "5:0", "a:b", "-1:4", "1:2:3", "1:2@", "1:2@0", "1:2@3,", "1:2@3x", "1:2@3x0"],
)
def test_parse_lengths_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected INPUT:OUTPUT"):
        parse_lengths(text)


def prompts(lengths: list[Lengths], *args: list[int]) -> list[tuple[int, int, int]]:
    return [(c.concurrency, c.input_len, c.num_prompts) for c in make_grid(lengths, *args)]


def test_grid_takes_prompts_per_concurrency() -> None:
    short, long, own = parse_lengths("8:4"), parse_lengths("9:4"), parse_lengths("7:1@3,5")
    assert prompts([short], [1, 32], []) == [(1, 8, 8), (32, 8, 128)]
    assert [row[2] for row in prompts([short, long], [1, 32], [3, 64])] == [3, 64] * 2
    assert prompts([short, own], [1], [3]) == [(1, 8, 3), (3, 7, 12), (5, 7, 20)]
    assert prompts([parse_lengths("7:1@3x5,4")], [1], [3]) == [(3, 7, 5), (4, 7, 16)]
    with pytest.raises(ValueError, match="one per concurrency"):
        make_grid([short], [1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match=r"lengths 7:1 \[3, 3\]: expected each value once"):
        make_grid([parse_lengths("7:1@3,3")], [1], [])


def test_flags_defaults_give_way(fake_plan: MakePlan) -> None:
    plan = fake_plan(grid=make_grid([Lengths(2000, 100)], [1], []))
    flags = plan.flags_of(plan.arms[1])
    assert flags[:2] == ["--max-model-len", "2228"]
    assert "--enforce-eager" in flags and "--no-enable-prefix-caching" in flags
    assert flags[-2:] == ["--quantization", "q"]
    own = Arm("a", "m", ("--max_model_len=77", "--enable-prefix-caching"))
    flags = fake_plan(gpu=True).flags_of(own)
    assert flags == ["--max_model_len=77", "--enable-prefix-caching"]
    together = fake_plan(gpu=True, together=True).flags_of(Arm("a", "m"))
    assert "--kv-cache-memory-bytes" in together
    assert together[together.index("--gpu-memory-utilization") + 1] == "0.42"


def test_environment_defaults_give_way(
    fake_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    arm = Arm("a", "m", (), (("VLLM_CPU_KVCACHE_SPACE", "9"),))
    assert fake_plan().environment_of(None)["VLLM_CPU_KVCACHE_SPACE"] == "7"
    environment = fake_plan().environment_of(arm)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in fake_plan(gpu=True).environment_of(arm)


def test_run_alternates_and_ratios_pair_equal_prompts(fake_plan: MakePlan, tmp_path: Path) -> None:
    results = run(fake_plan(), tmp_path)
    assert "failure" not in results, results["failure"]
    order = [(row["arm"], row["round"], row["concurrency"]) for row in results["measurements"]]
    assert order == [
        (arm, number, concurrency)
        for number in (0, 1)
        for arm in ("slow", "fast")
        for concurrency in (1, 2)
    ]
    (chat,) = results["arms"]["fast"]["chat"]
    assert chat["answer"] == "fast: Paris"
    assert results["arms"]["slow"]["memory"]["weights_gib"] == 12.5
    cells = summary.condense(results["measurements"], ["slow", "fast"])
    for cell in cells:
        ratio = cell["arms"]["fast"]["ratios"]["output_throughput"]
        # rounds differ by the seed's spread, which the pairing takes out
        assert ratio["median"] == pytest.approx(2) and ratio["max"] == pytest.approx(ratio["min"])
        assert len(ratio["values"]) == 2


def test_a_load_warms_up_until_its_first_token_is_steady(
    fake_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that compiles under the first runs; what is measured comes after them."""
    times, seeds = iter([1400.0, 900.0, 100.0, 95.0] + [50.0] * 100), []

    def load(self: LoadClient, server: Any, cell: Any, seed: int, *_: Any, **__: Any) -> Any:
        seeds.append(seed)
        figures = dict.fromkeys(("p50_tpot_ms", "output_throughput"), 1.0)
        return figures | {"p50_ttft_ms": next(times)}

    monkeypatch.setattr(LoadClient, "run", load)
    plan = fake_plan(arms=[Arm("slow", "m")], rounds=1, repeats=2, warmups=9)
    results = run(plan, tmp_path)
    first, second = results["arms"]["slow"]["warmups"]
    assert (first, second) == ([1400.0, 900.0, 100.0, 95.0], [50.0, 50.0])
    assert [row["figures"]["p50_ttft_ms"] for row in results["measurements"]] == [50.0] * 4
    assert [row["warm_up_ttft_ms"] for row in results["measurements"]] == [95.0, 50.0] * 2
    assert len(set(seeds)) == len(seeds) == 4 + 2 + 4, "prompts of their own for every run"


def test_together_interleaves_each_load(fake_plan: MakePlan, tmp_path: Path) -> None:
    results = run(fake_plan(together=True, rounds=1, repeats=2), tmp_path)
    order = [(row["repeat"], row["concurrency"], row["arm"]) for row in results["measurements"]]
    assert order == [
        *((0, 1, "slow"), (0, 1, "fast"), (0, 2, "slow"), (0, 2, "fast")),
        *((1, 1, "fast"), (1, 1, "slow"), (1, 2, "fast"), (1, 2, "slow")),
    ]


def test_a_server_dying_under_load_is_named_and_what_was_measured_is_kept(
    fake_plan: MakePlan, tmp_path: Path
) -> None:
    from harness.processes import descendants

    before = set(descendants(os.getpid()))  # an earlier test's, such as torch's compile workers
    arms = [Arm("slow", "m"), Arm("fast", "m", (), (("FAKE_MODE", "dies_under_load"),))]
    kept: list[int] = []
    results = run(
        fake_plan(arms=arms), tmp_path, lambda so_far: kept.append(len(so_far["measurements"]))
    )
    assert kept == [1, 2, 3]
    assert [(r["arm"], r["concurrency"]) for r in results["measurements"]] == [
        ("slow", 1),
        ("slow", 2),
        ("fast", 1),
    ]
    assert results["stopped"] == "ServerError"
    assert re.match(r"server fast: .*under load \(c2 8:4\)", results["failure"])
    assert "engine core has died" in results["failure"]
    assert set(descendants(os.getpid())) <= before


def test_client_trouble_is_named(
    fake_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "dies")
    with pytest.raises(ServerError, match=r"client: ended unexpectedly(\n.*)*client trouble"):
        run(fake_plan(), tmp_path)


def test_nothing_is_measured_before_another_process_has_ended(
    fake_plan: MakePlan, tmp_path: Path
) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "fast: healthy" in text:
            assert not any("tok/s" in line for line in said)
            sleeper.kill()

    run(fake_plan(together=True, rounds=1, after=sleeper.pid, say=say), tmp_path)
    assert sleeper.wait() == -9 and any("tok/s" in line for line in said)
    # a process that has ended before holds nothing up
    assert run(fake_plan(rounds=1, after=sleeper.pid), tmp_path)["measurements"]


def test_each_server_is_streamed_from_behind_the_grid(fake_plan: MakePlan, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []

    def stream(server: Any) -> dict[str, Any]:
        server.check("while it streams")
        return {"ratio": len(server.name)}

    plan = fake_plan(together=True, rounds=1, stream=stream)
    results = run(plan, tmp_path, lambda results: kept.append(dict(results.get("streaming", {}))))
    assert results["streaming"] == {"slow": {"ratio": 4}, "fast": {"ratio": 4}} == kept[-1]
    assert kept[:-2] == [{}] * 4
