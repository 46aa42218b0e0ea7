# SPDX-License-Identifier: MIT
"""Every load is a first load: reloads, transfers and ``model.load_weights`` of engines that serve.

New memory is poisoned, so that nothing passes because of what memory happened to hold.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import layerwise, meta

from oss_fused.errors import CheckpointError
from tests.plugin.checkpoints import changed, without
from tests.plugin.conftest import Engine, build, calibrate, edit, tensors_of, to_mxfp4
from tests.plugin.cpu_kind import skip_without_fp8_cache

pytestmark = pytest.mark.serve

QKV = "model.layers.0.self_attn."


@dataclasses.dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str


class FileTransfer(NCCLWeightTransferEngine):
    """vLLM's transfer of weights, whose tensors come from a file instead of another GPU."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls: ClassVar = FileUpdate

    def init_transfer_engine(self, init_info):
        pass

    def update_weights(self, update_info):
        # vLLM's waits for a GPU
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        self.model.load_weights(list(load_file(update_info.path).items()))

    def shutdown(self):
        pass


WeightTransferEngineFactory.register_engine("oss_fused_test", FileTransfer)


@pytest.fixture(params=[0x00, 0xFF], autouse=True)
def _poisoned(request, monkeypatch):
    real = meta.materialize_meta_tensor

    def materialize(tensor):
        new = real(tensor)
        new.untyped_storage().fill_(request.param)
        return new

    monkeypatch.setattr(meta, "materialize_meta_tensor", materialize)


class Served:
    """An engine, its checkpoint and another one, with what a fresh engine says of both."""

    def __init__(self, root, make, **options):
        self.folders = [make(root / name, spread) for name, spread in (("a", 0.06), ("b", 0.04))]
        self.tensors = [tensors_of(folder) for folder in self.folders]
        self.expected = []
        for folder in reversed(self.folders):
            engine = Engine(
                folder,
                weight_transfer_config=WeightTransferConfig(backend="oss_fused_test"),
                **options,
            )
            self.expected.insert(0, engine.generate())
            if folder is not self.folders[0]:
                engine.close()
        self.engine = engine
        assert self.expected[0] != self.expected[1]

    def rpc(self, name, *args, **kwargs):
        return self.engine.llm.collective_rpc(name, args=args, kwargs=kwargs)

    def reload(self, tensors):
        self.rpc("reload_weights", weights_iterator=iter(list(tensors.items())))

    def load_weights(self, tensors):
        self.engine.model.load_weights(weights=list(tensors.items()))

    def transfer(self, tensors, parts=3):
        self.rpc("init_weight_transfer_engine", {})
        self.rpc("start_weight_update")
        names = list(tensors)
        try:
            for part in range(parts):
                path = self.folders[0] / "part.safetensors"
                save_file({name: tensors[name] for name in names[part::parts]}, path)
                self.rpc("update_weights", {"path": str(path)})
        finally:
            try:
                self.rpc("finish_weight_update")
            except CheckpointError:
                # vLLM keeps a transfer open whose end failed
                self.rpc("finish_weight_update")
                raise

    def says(self, which):
        assert self.engine.generate() == self.expected[which]


def make_qwen2(folder, spread):
    build(folder, "qwen2", initializer_range=spread)
    generator = torch.Generator().manual_seed(int(spread * 100))
    biases = {
        name: torch.randn(bias.shape, generator=generator).bfloat16() * 0.1
        for name, bias in tensors_of(folder).items()
        if name.endswith("_proj.bias")
    }
    edit(folder, biases)
    return folder


def make_calibrated(folder, spread):
    return calibrate(build(folder, "llama", initializer_range=spread), inputs="tensor", kv=True)


def make_gpt_oss(folder, spread):
    return to_mxfp4(build(folder, "gpt_oss", initializer_range=spread, intermediate_size=160))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    # one layer stays in bf16, one is quantised
    served = Served(
        tmp_path_factory.mktemp("qwen2"),
        make_qwen2,
        quantization="oss_fp8",
        additional_config={"oss_fused": {"ignore": ["model.layers.1.*"]}},
    )
    yield served
    served.engine.close()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    skip_without_fp8_cache()
    served = Served(tmp_path_factory.mktemp("calibrated"), make_calibrated)
    yield served
    served.engine.close()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("gpt_oss"), make_gpt_oss, quantization="oss_fp8")
    yield served
    served.engine.close()


def refused(served, way, tensors, match):
    """``way`` refuses ``tensors``; the old weights serve, and good ones are taken afterwards."""
    before = {n: p.data_ptr() for n, p in served.engine.model.named_parameters()}
    with pytest.raises(CheckpointError, match=match):
        getattr(served, way)(tensors)
    assert {n: p.data_ptr() for n, p in served.engine.model.named_parameters()} == before
    served.says(0)


WAYS = ["reload", "load_weights", "transfer"]


def takes(served, way):
    try:
        getattr(served, way)(served.tensors[1])
        served.says(1)
    finally:
        getattr(served, way)(served.tensors[0])
    served.says(0)


@pytest.mark.parametrize("way", WAYS)
def test_qwen2_takes_new_weights(way, qwen2):
    takes(qwen2, way)


@pytest.mark.parametrize("way", WAYS)
def test_qwen2_refuses_a_part(way, qwen2):
    new = qwen2.tensors[1]
    q_proj = f"{QKV}q_proj.weight"
    refused(qwen2, way, {q_proj: new[q_proj]}, "the checkpoint has no 'model.embed_tokens.weight'")


@pytest.mark.parametrize(
    "missing",
    [
        f"{QKV}k_proj.weight",
        f"{QKV}v_proj.bias",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_qwen2_refuses_a_load_without(missing, qwen2):
    refused(qwen2, "reload", without(qwen2.tensors[1], missing), f"'{missing}'")


def test_one_tensor_twice_is_not_two(qwen2):
    new = qwen2.tensors[1]
    # k and v have as many elements as q and, as often as vLLM counts, all of them come
    twice = [(n, t) for n, t in new.items() if n != f"{QKV}k_proj.weight"]
    twice.insert(0, (f"{QKV}v_proj.weight", new[f"{QKV}v_proj.weight"]))
    with pytest.raises(CheckpointError, match="k_proj.weight"):
        qwen2.rpc("reload_weights", weights_iterator=iter(twice))
    qwen2.says(0)


@pytest.mark.parametrize("way", WAYS)
def test_qwen2_refuses_bad_values(way, qwen2):
    # the last layer: others have their new weights by then
    name = "model.layers.1.mlp.down_proj.weight"
    bad = changed(qwen2.tensors[1], name, lambda t: t.view(-1)[3].fill_(float("nan")))
    refused(qwen2, way, bad, f"'{name}'")


def test_a_source_that_breaks_off(qwen2):
    def broken():
        for name, tensor in qwen2.tensors[1].items():
            yield name, tensor
            if name.startswith("model.layers.1."):
                raise OSError("connection lost")

    with pytest.raises(CheckpointError, match="connection lost"):
        qwen2.rpc("reload_weights", weights_iterator=broken())
    qwen2.says(0)


def test_a_transfer_that_breaks_off(qwen2):
    qwen2.rpc("start_weight_update")
    path = qwen2.folders[0] / "part.safetensors"
    save_file(dict(list(qwen2.tensors[1].items())[:9]), path)
    qwen2.rpc("update_weights", {"path": str(path)})
    with pytest.raises(ValueError, match="Invalid update_info"):
        qwen2.rpc("update_weights", {"wrong": 1})
    qwen2.says(0)
    qwen2.transfer(qwen2.tensors[0])
    qwen2.says(0)


def test_a_load_that_never_ends_keeps_no_model():
    from oss_fused.layers.vllm import reload

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    # as _record leaves a model
    model.load_weights = functools.partial(reload._load_weights, model)
    alive = weakref.ref(model)
    reload._sessions[model] = session = reload.Session(model)
    assert session.model is model
    session.roll_back(RuntimeError("refused"))
    assert model.load_weights.args == (model,)
    del session
    del model
    gc.collect()
    assert alive() is None and not reload._sessions


@pytest.mark.parametrize("way", WAYS)
def test_calibrated_takes_new_weights(way, calibrated):
    takes(calibrated, way)


@pytest.mark.parametrize(
    "missing",
    [
        f"{QKV}k_proj.weight_scale",
        f"{QKV}k_proj.weight",
        f"{QKV}v_proj.input_scale",
        f"{QKV}k_scale",
        "model.layers.1.mlp.down_proj.weight_scale",
    ],
)
def test_calibrated_refuses_a_load_without(missing, calibrated):
    refused(calibrated, "reload", without(calibrated.tensors[1], missing), missing)


def test_calibrated_refuses_a_load_without_kv_scales(calibrated):
    names = [n for n in calibrated.tensors[1] if n.endswith(("k_scale", "v_scale"))]
    refused(calibrated, "reload", without(calibrated.tensors[1], *names), r"0.self_attn.k_scale'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_calibrated_refuses_another_dtype(dtype, calibrated):
    name = "model.layers.1.mlp.down_proj.weight"
    cast = calibrated.tensors[1][name].float().to(dtype)
    tensors = calibrated.tensors[1] | {name: cast}
    refused(calibrated, "reload", tensors, f"'{name}' is {dtype}")


@pytest.mark.parametrize("way", WAYS)
def test_gpt_oss_takes_new_weights(way, gpt_oss):
    takes(gpt_oss, way)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("gate_up_proj_blocks", "w13_weight'"),
        ("down_proj_scales", "w2_weight_scale'"),
        ("down_proj_bias", "w2_bias'"),
    ],
)
def test_gpt_oss_refuses_a_load_without(missing, named, gpt_oss):
    tensors = without(gpt_oss.tensors[1], f"model.layers.1.mlp.experts.{missing}")
    refused(gpt_oss, "reload", tensors, named)


def test_gpt_oss_refuses_a_bad_scale(gpt_oss):
    name = "model.layers.1.mlp.experts.down_proj_scales"
    bad = changed(gpt_oss.tensors[1], name, lambda t: t.view(-1)[5].fill_(255))
    refused(gpt_oss, "transfer", bad, f"'{name}' holds 255")


def test_other_models_load_as_vllm_has_it(tmp_path, engine):
    folder = build(tmp_path, "llama")
    served = engine(folder)
    before = served.generate()
    served.llm.collective_rpc("reload_weights")
    assert served.generate() == before
    assert "load_weights" not in vars(served.model)
    assert layerwise.get_layerwise_info(served.model).kernel_tensors is None


def test_states_come_back_as_the_same_objects():
    from oss_fused.layers.vllm.reload import _State

    module = torch.nn.Linear(2, 2)
    parameters, weight = module._parameters, module.weight
    state = _State(module)
    before = copy.copy(vars(module))
    del module.weight
    module.register_buffer("weight", torch.zeros(1))
    module.extra = 1
    state.restore(module)
    assert vars(module) == before and module._parameters is parameters
    assert module.weight is weight and not module._buffers
