# SPDX-License-Identifier: MIT
"""The hooks of vLLM: complete, as recorded, and refused by name where a release changes one."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import pkgutil
import sys
import tomllib
from inspect import signature
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import oss_fused.layers.vllm
import oss_fused.plugin
from oss_fused.errors import BackendUnavailableError
from oss_fused.plugin import compat, hooks, hooks_read
from oss_fused.plugin.signatures import Package, missing_arguments, takes
from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
RECORDED = {
    json.loads(path.read_text())["vllm"]: json.loads(path.read_text())["hooks"]
    for path in sorted((ROOT / "tests/plugin/hooks").glob("vllm-*.json"))
}
script = load_script("vllm_hooks")


@pytest.fixture(scope="module")
def installed() -> Package:
    return compat.vllm_package()


@pytest.fixture(scope="module")
def results(installed) -> dict[str, compat.HookResult]:
    return {result.path: result for result in compat.check_hooks(installed)}


def test_every_tested_release_is_recorded_and_fits(results):
    assert set(RECORDED) == set(compat.TESTED_VLLM)
    for recorded in RECORDED.values():
        assert recorded.keys() == results.keys()
        assert "missing" not in recorded.values()
        for path, call in hooks.CALLED.items():
            # the recorded text is a parameter list
            theirs = signature(eval(f"lambda {_plain(recorded[path])}: 0"))
            assert takes(theirs, call), path


def _plain(text: str) -> str:
    """A recorded parameter list with each default as 0."""
    given = ast.parse(f"def f{text}: ...").body[0].args
    for defaults in (given.defaults, given.kw_defaults):
        defaults[:] = [None if d is None else ast.Constant(0) for d in defaults]
    return ast.unparse(given)


def test_the_installed_release_is_as_recorded(results):
    recorded = RECORDED[importlib.metadata.version("vllm").split("+")[0]]
    assert [result for result in results.values() if result.problem] == []
    assert {path: result.found for path, result in results.items()} == recorded


def test_what_the_sources_say_is_what_python_sees(installed):
    """Inherited, re-exported, static, overloaded, of a dataclass."""
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.config import VerifyAndUpdateConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    for path, function in {
        "vllm.model_executor.layers.fusion.quant_activation:QuantizedActivation": (
            QuantizedActivation
        ),
        "vllm.model_executor.layers.linear:LinearMethodBase.tie_weights": (
            QuantizeMethodBase.tie_weights
        ),
        "vllm.model_executor.models.config:VerifyAndUpdateConfig.verify_and_update_config": (
            VerifyAndUpdateConfig.verify_and_update_config
        ),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": AsyncScheduler,
    }.items():
        names = [name for name in signature(function).parameters if name != "self"]
        assert list(installed.signature(path).parameters) == names, path


def imports_of_vllm() -> set[str]:
    found = set()
    for file in Path(oss_fused.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def test_every_import_of_vllm_is_listed(installed, results):
    """As itself, as a class with members, or as a module."""
    for path in imports_of_vllm():
        dotted = path.replace(":", ".")
        listed = any(
            known == path or known.startswith((f"{path}.", f"{dotted}:", f"{dotted}."))
            for known in results
        )
        assert listed, f"{path}: add it to plugin/hooks.py"


# name of a variable or attribute of ours -> the class of vLLM that it holds
HOLDS = {
    "cache_config": "vllm.config.cache:CacheConfig",
    "load_config": "vllm.config.load:LoadConfig",
    "moe": "vllm.model_executor.layers.fused_moe:FusedMoEConfig",
    "moe_config": "vllm.model_executor.layers.fused_moe:FusedMoEConfig",
    "vllm_config": "vllm.config:VllmConfig",
}


def test_what_is_read_of_configurations_is_listed():
    found = 0
    for file in Path(oss_fused.__file__).parent.glob("[lp]*/**/*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        modules = {node.asname for node in nodes if isinstance(node, ast.alias)}
        for node in nodes:
            if not isinstance(node, ast.Attribute):
                continue
            holder = getattr(node.value, "attr", getattr(node.value, "id", None))
            if holder not in modules and (kind := HOLDS.get(holder)):
                found += 1
                listed = hooks_read.READ[kind].split()
                assert node.attr in listed, f"{kind}.{node.attr}: add it to plugin/hooks_read.py"
    assert found > 50


def test_every_override_of_vllm_is_listed():
    for package in (oss_fused.layers.vllm, oss_fused.plugin):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    listed = {
        (mine, name) for (_, mine), names in hooks.OVERRIDDEN.items() for name in names.split()
    }
    prefixes = ("oss_fused.layers.vllm", "oss_fused.plugin")
    modules = [module for name, module in sys.modules.items() if name.startswith(prefixes)]
    for module in modules:
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            for name in _overridden(kind):
                path = f"{kind.__module__}:{kind.__qualname__}"
                assert (path, name) in listed, f"{path}.{name}: add it to plugin/hooks.py"


def _overridden(kind: type) -> set[str]:
    """Methods of ``kind`` or of our mixins that stand for one of a vLLM class."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("oss_fused.")]
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("vllm.")]
    names = {
        name
        for base in ours
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    }
    return {
        name
        for name in names
        if (name == "__call__" or not name.startswith("__"))
        and any(name in vars(base) for base in theirs)
    }


class Changed(Package):
    """The installed vLLM with one text in one of its files replaced."""

    def __init__(self, installed: Package, file: str, old: str, new: str) -> None:
        super().__init__(installed.root, "vllm")
        self.installed, self.path = installed, installed.root / file
        self.text = self.path.read_text()
        assert old in self.text
        self.text = self.text.replace(old, new)

    def _module(self, module: str) -> ast.Module | None:
        if self._file(module) == self.path:
            return ast.parse(self.text)
        return self.installed.module(module)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "model_executor/utils.py",
            "def replace_parameter(",
            "def exchange_parameter(",
            "vllm.model_executor.utils:replace_parameter is missing",
        ),
        (
            "v1/core/kv_cache_manager.py",
            "num_lookahead_tokens: int = 0,",
            "num_draft_tokens: int = 0,",
            "KVCacheManager.allocate_slots takes .*expected to take .*num_lookahead_tokens",
        ),
        (
            "v1/core/kv_cache_manager.py",
            "def cache_blocks(self, request: Request, num_computed_tokens: int)",
            "def cache_blocks(self, request: Request, num_computed_tokens: int, stale=False)",
            "KVCacheManager.cache_blocks has stale, which .*StepKVCacheManager.cache_blocks lacks",
        ),
        (
            "model_executor/model_loader/reload/meta.py",
            "def materialize_layer(layer",
            "def materialize_layer(device, layer",
            "materialize_layer has device, which .*_materialize lacks",
        ),
        (
            "v1/worker/gpu/input_batch.py",
            "    has_prefill:",
            "    has_prompt:",
            "InputBatch.has_prefill is missing",
        ),
    ],
)
def test_a_changed_hook_is_refused_by_name(file, old, new, problem, installed, monkeypatch):
    changed = Changed(installed, file, old, new)
    monkeypatch.setattr(compat, "vllm_package", lambda: changed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.0+cu130")
    with pytest.raises(BackendUnavailableError, match=problem) as refused:
        compat.check_vllm()
    message = str(refused.value)
    assert message.startswith("vllm==0.34.0+cu130: vllm.")
    assert "install vllm 0.32.0 or 0.33.0" in message and "VLLM_PLUGINS" in message


def test_an_untested_release_that_fits_only_warns(installed, monkeypatch, caplog):
    monkeypatch.setattr(compat, "vllm_package", lambda: installed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.0")
    compat.check_vllm()
    (record,) = caplog.records
    assert "not tested with vllm==0.34.0" in record.getMessage()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cu129", "0.32.0+cpu"])
def test_a_tested_release_is_not_compared_at_each_start(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(compat, "check_hooks", None)
    compat.check_vllm()
    assert not caplog.records


def test_no_vllm(monkeypatch):
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"not installed.*pip install vllm==0\.32"):
        compat.check_vllm()


def test_only_releases_with_every_hook_count(results, tmp_path):
    whole = dict.fromkeys(results, "()")
    first = next(iter(whole))
    releases = {
        "1.0": whole,
        "1.1": whole | {"of:another": "()"},
        "1.2": {path: "()" for path in whole if path != first},
        "1.3": whole | {first: "missing"},
    }
    for release, recorded in releases.items():
        (tmp_path / f"vllm-{release}.json").write_text(json.dumps({"hooks": recorded}))
    found = script.whole(tmp_path, list(results.values()))
    assert [path.stem for path in found] == ["vllm-1.0", "vllm-1.1"]


def test_the_script_shows_what_changed(installed, tmp_path, capsys, monkeypatch):
    against, output = tmp_path / "old.json", tmp_path / "next.json"
    version = importlib.metadata.version("vllm").split("+")[0]
    path = "vllm.model_executor.utils:replace_parameter"
    old = {"vllm": "0.1.0", "hooks": RECORDED[version] | {path: "(layer)"}}
    against.write_text(json.dumps(old))
    monkeypatch.setitem(hooks.CALLED, "vllm.model_executor.utils:gone", "")
    arguments = [str(installed.root), "--output", str(output), "--against", str(against)]
    assert script.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "wrong: vllm.model_executor.utils:gone is missing" in shown
    assert f"changed since 0.1.0: {path}: (layer) -> (layer, param_name" in shown
    assert "changed since 0.1.0: vllm.model_executor.utils:gone: not recorded" in shown
    assert shown.count("changed since") == 2
    written = json.loads(output.read_text())
    assert written["vllm"] == version
    assert written["hooks"]["vllm.model_executor.utils:gone"] == "missing"
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])


def test_what_names_the_releases_names_all_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = project["optional-dependencies"]["vllm"]
    (wanted,) = (Requirement(text) for text in given if text.startswith("vllm"))
    for release in compat.TESTED_VLLM:
        assert wanted.specifier.contains(release)
        for page in (
            "README.md",
            "docs/serving.md",
            "deploy/docker/Dockerfile",
            "deploy/cuda/requirements.lock",
            "deploy/cpu/requirements.lock",
        ):
            assert release in (ROOT / page).read_text(), page


def test_sinks_are_cut_once_whoever_cuts_them_in_vllm(monkeypatch):
    """0.33 gives the parameter a loader that takes a rank's heads, 0.32 none."""
    from oss_fused.plugin import models

    monkeypatch.setattr(models, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(models, "get_tensor_model_parallel_world_size", lambda: 2)
    weight = torch.arange(8.0)
    for theirs in (None, lambda param, weight: param.data.copy_(weight[:4])):
        decoder = torch.nn.Module()
        decoder.sinks = torch.nn.Parameter(torch.full((4,), torch.nan), requires_grad=False)
        if theirs:
            decoder.sinks.weight_loader = theirs
        layer = torch.nn.Module()
        layer.attn = decoder
        models.take_sinks(layer)
        parameters = dict(layer.named_parameters())
        assert models.OssGptOssModel._load_one(layer, "attn.sinks", weight, parameters)
        assert decoder.sinks.tolist() == [4, 5, 6, 7]


def f(source: str):
    return signature(eval(f"lambda {source}: 0"))


@pytest.mark.parametrize(
    ("ours", "theirs", "missing"),
    [
        ("a, b", "a, b", []),
        ("a, b=0", "a", []),
        ("a", "a, b=0", ["b"]),
        ("a, b", "a", ["b"]),
        ("a, **more", "a, b=0, *, c=0", []),
        ("*args", "a, b", []),
        ("a, *, b", "*args", []),
    ],
)
def test_arguments_that_an_override_lacks(ours, theirs, missing):
    assert missing_arguments(f(ours), f(theirs)) == missing
