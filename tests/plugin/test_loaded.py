# SPDX-License-Identifier: MIT
"""A tensor that is missing or not finite is refused in every layer, at every load."""

from __future__ import annotations

import pytest

from oss_fused.errors import CheckpointError
from tests.plugin.checkpoints import changed, without
from tests.plugin.conftest import Engine, build, edit, tensors_of

pytestmark = pytest.mark.serve

OPTIONS = {"quantization": "oss_fp8"}
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder and tensors of a family's model; each test edits a copy of the file."""
    made = {}

    def get(family):
        if family not in made:
            folder = build(tmp_path_factory.mktemp(family), family)
            made[family] = folder, tensors_of(folder)
        return made[family]

    return get


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("llama", NORM, None),
        ("llama", "model.layers.0.input_layernorm.weight", None),
        ("llama", HEAD, None),
        ("llama", EMBEDDING, None),
        ("gpt_oss", "model.layers.1.mlp.router.weight", None),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", r"experts.3.w2_weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias", r"experts.3.w13_bias"),
        ("phi3", NORM, None),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight", None),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite(family, name, said, value, folders, engine):
    folder, tensors = folders(family)
    bad = changed(tensors, name, lambda t: t.view(-1)[-1].fill_(value))
    edit(folder, bad)
    with pytest.raises(CheckpointError, match=f"'.*{said or name}' .*holds NaN or Inf"):
        engine(folder, **OPTIONS)
    edit(folder, tensors)


def test_a_head_may_have_no_sink(folders, engine):
    """Its sink is -inf; NaN is no sink."""
    folder, tensors = folders("gpt_oss")
    name = "model.layers.1.self_attn.sinks"
    edit(folder, changed(tensors, name, lambda t: t[-1].fill_(float("-inf"))))
    assert len(engine(folder, **OPTIONS).generate()[0]) == 4
    edit(folder, changed(tensors, name, lambda t: t[-1].fill_(float("nan"))))
    with pytest.raises(CheckpointError, match=f"'{name}' .*holds NaN or Inf"):
        engine(folder, **OPTIONS)
    edit(folder, tensors)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, NORM])
def test_a_tensor_missing_from_a_model_of_vllms(name, folders, engine):
    folder, tensors = folders("phi3")
    edit(folder, {}, drop=(name,))
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        engine(folder, **OPTIONS)
    edit(folder, tensors)


def test_a_model_of_vllms_starts(folders, engine):
    folder, _ = folders("phi3")
    assert len(engine(folder, **OPTIONS).generate()[0]) == 4


@pytest.fixture(scope="module", params=["fp8", "keep"])
def mixtral(request, tmp_path_factory):
    """An engine of a Mixtral, with what a fresh one says of each of two checkpoints."""
    root = tmp_path_factory.mktemp("mixtral")
    options = OPTIONS | {"additional_config": {"oss_fused": {"experts": request.param}}}
    said, tensors = [], []
    for name, spread in (("new", 0.04), ("old", 0.06)):
        folder = build(root / name, "mixtral", initializer_range=spread, num_local_experts=4)
        served = Engine(folder, **options)
        tensors.append(tensors_of(folder))
        said.append(served.generate())
        if name == "new":
            served.close()
    yield served, tensors, said
    served.close()


def reload(served, tensors):
    served.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})


def test_a_reload_of_a_model_of_vllms(mixtral):
    served, (new, old), said = mixtral
    assert said[0] != said[1]
    reload(served, new)
    assert served.generate() == said[0]
    reload(served, old)
    assert served.generate() == said[1]


@pytest.mark.parametrize(
    "name",
    [HEAD, EMBEDDING, NORM, "model.layers.1.block_sparse_moe.experts.2.w3.weight"],
)
def test_a_part_of_a_model_of_vllms(name, mixtral):
    served, (new, _), said = mixtral
    bad = changed(new, name, lambda t: t.view(-1)[5].fill_(float("nan")))
    for tensors in (without(new, name), bad):
        with pytest.raises(CheckpointError, match=f"weights are as before: .*'{name}'"):
            reload(served, tensors)
        assert served.generate() == said[1]


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_head_with_a_copy_in_the_checkpoint(head_first, tmp_path, engine):
    """vLLM ties the head where the copy is equal; another one would overwrite the embedding."""
    folder = build(tmp_path / "old", "llama", tie_word_embeddings=True)
    old = tensors_of(folder)
    edit(folder, {HEAD: old[EMBEDDING].clone()})
    other = build(tmp_path / "new", "llama", tie_word_embeddings=True, initializer_range=0.04)
    edit(other, {HEAD: tensors_of(other)[EMBEDDING].clone()})
    expected = engine(other, **OPTIONS).generate()
    served = engine(folder, **OPTIONS)
    before = served.generate()
    assert served.model.lm_head.weight is served.model.model.embed_tokens.weight
    new = tensors_of(other)
    head = new.pop(HEAD)
    apart = changed({HEAD: head}, HEAD, lambda t: t[3].fill_(0.5))
    with pytest.raises(CheckpointError, match="as before: '.*' differs from .* another layer"):
        reload(served, apart | new if head_first else new | apart)
    assert served.generate() == before != expected
    reload(served, {HEAD: head} | new if head_first else new | {HEAD: head})
    assert served.generate() == expected
    # one without a copy
    reload(served, old)
    assert served.generate() == before
