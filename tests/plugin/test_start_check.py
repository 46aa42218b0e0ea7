# SPDX-License-Identifier: MIT
"""The self-check of a server that starts: passes, stops by name, leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.plugin import doctor, self_check
from oss_fused.plugin.preflight import FAIL, OK
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.self_check import FILE, SelfCheck, load_self_check

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_gpt_oss"
ON = {"additional_config": {"oss_fused": {"self_check": True}}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("self-check") / "tiny"
    recipe = make_recipe({"experts": "mxfp4", "self_check": "on"})
    Run(recipe, RunOptions(TINY, folder)).execute()
    return folder


def test_a_server_checks_itself_and_leaves_nothing(
    checkpoint, tmp_path, engine, monkeypatch
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(checkpoint, folder)
    passed: list[str] = []
    monkeypatch.setattr(
        self_check.logger, "info", lambda text, *values: passed.append(text % values)
    )
    core = engine(folder, **ON).llm.llm_engine.engine_core.engine_core
    assert len(passed) == 1 and "124 log-probabilities of 4 prompts differ by 0.0" in passed[0]
    worker = core.model_executor.driver_worker.worker
    assert not worker.model_runner.requests and worker.model_runner.input_batch.num_reqs == 0
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert len(pool.cached_block_hash_to_block) == 0 and not core.scheduler.has_requests()

    state = load_file(folder / "model.safetensors")
    state["model.layers.1.self_attn.v_proj.weight_scale"] *= 8
    save_file(state, folder / "model.safetensors")
    core.collective_rpc("reload_weights")
    # the last step of a worker's start
    with pytest.raises(
        CheckpointError, match=r"self_check: .*prompt \d, position \d+ .*expected -"
    ):
        worker.compile_or_warm_up_model()


class Runner:
    """Keeps what a worker is asked to run."""

    def __init__(self, sizes: tuple[int, ...], logprobs: torch.Tensor | None) -> None:
        self.steps: list[SchedulerOutput] = []
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=s)) for s in sizes]
        self.model_runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
        self.vllm_config = SimpleNamespace(num_lookahead_tokens=0, speculative_config=None)
        self.logprobs = logprobs

    def execute_model(self, step: SchedulerOutput) -> None:
        self.steps.append(step)

    def sample_tokens(self, grammar: None) -> Any:
        if self.logprobs is None:
            return None
        name = self.steps[-1].scheduled_new_reqs[0].req_id
        output = SimpleNamespace(
            prompt_logprobs_dict={name: SimpleNamespace(logprobs=self.logprobs)}
        )
        return SimpleNamespace(get_output=lambda: output)


CHECK = SelfCheck(prompts=[{"token_ids": range(17), "logprobs": [-1.0] * 16}])


def test_a_prompt_is_one_step_and_one_that_ends_it() -> None:
    worker = Runner((16, 8), torch.full((16, 1), -1.01))
    self_check.run(worker, CHECK)
    first, last = worker.steps
    request = first.scheduled_new_reqs[0]
    # 18 slots; 0 is vLLM's null block, and no two groups share one
    assert request.block_ids == ([1, 2], [3, 4, 5])
    assert request.sampling_params.prompt_logprobs == 0
    assert first.num_scheduled_tokens == {request.req_id: 17}
    assert first.total_num_scheduled_tokens == 17
    assert last.finished_req_ids == {request.req_id} and last.total_num_scheduled_tokens == 0


def test_a_wrong_rank_stops_and_one_without_logits_does_not() -> None:
    self_check.run(Runner((16,), None), CHECK)
    with pytest.raises(CheckpointError, match="prompt 0, position 1 "):
        self_check.run(Runner((16,), torch.full((16, 1), -9.0)), CHECK)


def test_a_failing_step_still_ends_its_request() -> None:
    worker = Runner((16,), None)
    worker.sample_tokens = lambda grammar: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        self_check.run(worker, CHECK)
    assert worker.steps[-1].finished_req_ids


def config(folder: Path, **changes: Any) -> Any:
    model = {
        "model": str(folder),
        "revision": None,
        "runner_type": "generate",
        "logprobs_mode": "raw_logprobs",
        "max_model_len": 64,
        "quantization": "oss_fp8",
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{**model, **{k: v for k, v in changes.items() if k in model}}
        ),
        kv_transfer_config=changes.get("kv_transfer_config"),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=changes.get("max_num_batched_tokens", 64)
        ),
        additional_config=changes.get("additional_config", {}),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner_type": "pooling"}, "self_check=True with a pooling model"),
        ({"kv_transfer_config": object()}, "self_check=True with --kv-transfer-config"),
        ({"logprobs_mode": "raw_logits"}, "self_check=True with --logprobs-mode raw_logits"),
        ({"max_model_len": 17}, "max_model_len: self_check=True runs prompts of 17 tokens"),
        ({"max_num_batched_tokens": 16}, "max_num_batched_tokens: self_check=True"),
    ],
)
def test_a_server_that_cannot_check_itself_is_refused(tmp_path, changes, message) -> None:
    (tmp_path / FILE).write_text(CHECK.model_dump_json())
    self_check.check_possible(config(tmp_path))
    with pytest.raises(SchemeError, match=message):
        self_check.check_possible(config(tmp_path, **changes))


def test_a_checkpoint_without_the_file_is_refused_before_it_loads(tmp_path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no self_check.json.*--dataset or --self-check on"
    ):
        self_check.check_possible(config(tmp_path))


@pytest.mark.parametrize(("option", "runs"), [(True, 1), (False, 0)])
def test_off_it_does_nothing(tmp_path, monkeypatch, option, runs) -> None:
    (tmp_path / FILE).write_text(CHECK.model_dump_json())
    ran: list[SelfCheck] = []
    monkeypatch.setattr(self_check, "run", lambda worker, check: ran.append(check))
    options = {"oss_fused": {"self_check": option}}
    worker = SimpleNamespace(vllm_config=config(tmp_path, additional_config=options))
    assert self_check._warm_up(lambda worker: "times", worker) == "times"
    assert ran == [load_self_check(tmp_path)] * runs
    # nothing may have asked before: vLLM's own model classes have no settings of this package's
    worker.vllm_config.kv_transfer_config = object()
    with pytest.raises(SchemeError, match="kv-transfer") if option else nullcontext():
        self_check._warm_up(lambda worker: "times", worker)
    # other quantisations have no such options
    worker.vllm_config.model_config.quantization = None
    self_check._warm_up(lambda worker: "times", worker)
    assert len(ran) == runs


LOGS = {
    "ERROR [core.py] CheckpointError: self_check: off by 3\nERROR more": "self_check: off by 3",
    "  Value error, m: has no self_check.json [type=value_error]\n    For further": "m: has no "
    "self_check.json [type=value_error]",
}


@pytest.mark.parametrize("broken", [None, *LOGS])
def test_doctor_runs_it(tmp_path, monkeypatch, broken) -> None:
    asked: dict[str, Any] = {}
    method = "oss_fp8"

    def run(command: list[str], **options: Any) -> Any:
        asked.update(json.loads(command[-1]))
        if broken:
            return subprocess.CompletedProcess(command, 1, broken, "RuntimeError: see above")
        return subprocess.CompletedProcess(command, 0, f'SMOKE [[1, 2], -3.0, "{method}"]', "")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    check = doctor._check_smoke(doctor.Options(model=tmp_path, self_check=True))
    assert asked["additional_config"] == ON["additional_config"]
    if broken:
        assert check.status == FAIL and check.detail == f"ended with status 1: {LOGS[broken]}"
    else:
        assert check.status == OK and check.detail.endswith("; the self-check passed")
        # vLLM's own methods compare nothing
        method = "compressed-tensors"
        check = doctor._check_smoke(doctor.Options(model=tmp_path, self_check=True))
        assert check.status == FAIL and "nothing was compared with quantization" in check.detail
        assert doctor._check_smoke(doctor.Options(model=tmp_path)).status == OK


@pytest.mark.gpu
@pytest.mark.parametrize("burst", [1, 4])
def test_on_a_gpu_in_graphs(checkpoint, engine, compiled, burst) -> None:
    """vLLM's model runner V2, behind graph capture, with and without bursts."""
    from tests.plugin.conftest import GRAPHS

    options = {"oss_fused": {"self_check": True, "burst": burst}}
    tokens, _ = engine(checkpoint, **GRAPHS, additional_config=options).generate()
    assert len(tokens) == 4
