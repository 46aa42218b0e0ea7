# SPDX-License-Identifier: MIT
"""patch_model on tiny transformers models: what it replaces, sameness of outputs, undo."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oss_fused.errors import SchemeError, UnsupportedModelError
from oss_fused.layers import FP8Linear, PatchPolicy, patch_model
from oss_fused.layers.hf.qk_norm_rope import can_fuse

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXACT = PatchPolicy(linears=None)
TOKENS = torch.arange(1, 25).view(2, 12)


def make(kind, **options):
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "GptOss" else {}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms that are not all ones, so that a forgotten weight shows
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


KINDS = ["Llama", "Qwen2", "Qwen3", "Mistral", "GptOss"]


@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_patch_keeps_logits_and_generation(kind):
    model = make(kind)
    before = logits(model)
    tokens = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    report = patch_model(model, EXACT)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=6, do_sample=False), tokens)
    expected = {"FusedRMSNorm": 5, "FusedGatedMLP": 2}
    if kind == "GptOss":
        expected["FusedGatedMLP"] = 0
        assert [name for name, _ in report.skipped] == [
            f"model.layers.{i}.mlp.experts" for i in (0, 1)
        ]
    if kind == "Qwen3":
        expected["FusedRMSNormRoPE"] = 2
    assert {k: report.count(k) for k in expected} == expected
    assert report.count("FP8Linear") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_patch_is_close_and_undo_is_exact(kind):
    model = make(kind)
    before, structure = logits(model), str(model)
    report = patch_model(model)
    after = logits(model)
    assert not torch.equal(after, before)
    error = (after - before).norm() / before.norm()
    assert error < 0.1
    assert report.count("FP8Linear") == (8 if kind == "GptOss" else 10)
    assert type(model.lm_head) is nn.Linear
    report.undo()
    assert str(model) == structure
    assert torch.equal(logits(model), before)
    report.undo()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_only_linears_keep_their_inputs(kind):
    """Every linear by itself, and logits closer than those of FP8 inputs."""
    model, both = make(kind), make(kind)
    before = logits(model)
    report = patch_model(model, PatchPolicy(linears="w8a16"))
    patch_model(both)
    assert report.count("FP8Linear") == (8 if kind == "GptOss" else 14)
    assert report.count("FusedGatedMLP") == 0
    linears = [m for m in model.modules() if isinstance(m, FP8Linear)]
    assert not any(m.quantize_inputs for m in linears)
    weights, weights_and_inputs = ((logits(m) - before).norm() for m in (model, both))
    assert 0 < weights < weights_and_inputs


def test_padded_batch_with_positions_of_its_own():
    model = make("Qwen3")
    # steps of 1 and of 2: a rotation by other positions of equal steps leaves every product alone
    positions = torch.stack([torch.arange(12), torch.arange(3, 27, 2)])
    with torch.no_grad():
        before = model(TOKENS, position_ids=positions).logits
        patch_model(model, EXACT)
        after = model(TOKENS, position_ids=positions).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_patch_goes_on_from_the_first(kind):
    model = make(kind)
    before = logits(model)
    first = patch_model(model, EXACT)
    patched = logits(model)
    second = patch_model(model)
    assert second.count("FP8Linear") and not second.count("FusedRMSNorm")
    assert not torch.equal(logits(model), patched)
    second.undo()
    assert torch.equal(logits(model), patched)
    first.undo()
    assert torch.equal(logits(model), before)


def test_undo_brings_back_a_forward_that_was_hooked():
    """As accelerate leaves a module that lies on several devices."""
    model = make("Qwen3")
    attention = model.model.layers[0].self_attn
    attention.forward = hooked = attention.forward
    patch_model(model, EXACT).undo()
    assert vars(attention)["forward"] == hooked


def test_policy_leaves_alone_what_it_names():
    model = make("Llama")
    policy = PatchPolicy(norms=False, ignore=("lm_head", "re:.*layers\\.0\\..*", "down_proj"))
    report = patch_model(model, policy)
    names = [name for name, _ in report.replaced]
    assert names and all(".layers.1." in name for name in names)
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear
    assert report.count("FP8Linear") == 4
    assert "4 x FP8Linear" in report.summary()


def test_a_name_without_dots_is_a_whole_part_of_a_name():
    policy = PatchPolicy(ignore=("norm",))
    assert policy.ignores("norm") and policy.ignores("model.norm")
    assert not policy.ignores("layers.0.q_norm") and not policy.ignores("norm.weight")


@pytest.mark.parametrize("ignored", ["gate_proj", "up_proj"])
def test_one_ignored_projection_keeps_the_other_wide(ignored):
    model = make("Llama")
    patch_model(model, PatchPolicy(ignore=(ignored,)))
    mlp = model.model.layers[0].mlp
    assert mlp.fused.gate_weight.dtype == mlp.fused.up_weight.dtype == torch.float32
    assert type(mlp.down_proj) is FP8Linear


@pytest.mark.parametrize("training", [True, False])
def test_new_layers_are_in_the_mode_of_the_old(training):
    model = make("Qwen3").train(training)
    patch_model(model)
    assert {module.training for module in model.modules()} == {training}


def test_a_subclass_of_linear_is_left_alone():
    """Its forward may do more than a product."""

    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make("Llama")
    attention = model.model.layers[0].self_attn
    attention.o_proj = own = Doubling(64, 64, bias=False)
    patch_model(model)
    assert attention.o_proj is own and type(attention.q_proj) is FP8Linear


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_the_activation_of_the_model_is_kept(activation):
    model = make("Llama", hidden_act=activation)
    mlp = model.model.layers[0].mlp
    x = 3 * torch.randn(5, 64)
    with torch.no_grad():
        # large enough that the two forms of GELU differ
        mlp.gate_proj.weight.mul_(10)
        expected = mlp(x)
        patch_model(model, EXACT)
        torch.testing.assert_close(model.model.layers[0].mlp(x), expected, rtol=1e-5, atol=1e-5)


def test_a_norm_of_odd_size_is_kept_and_reported():
    model = make("Llama", hidden_size=63, num_attention_heads=3, num_key_value_heads=1)
    before = logits(model)
    report = patch_model(model, EXACT)
    assert ("model.norm", "odd size 63") in report.skipped
    assert report.count("FusedRMSNorm") == 0 and report.count("FusedGatedMLP") == 2
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_attention_drops_out_in_training_only(training):
    model = make("Qwen3", attention_dropout=0.5).train(training)
    torch.manual_seed(1)
    before = logits(model)
    patch_model(model, EXACT)
    torch.manual_seed(1)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_the_attention_function_gets_what_transformers_gives_it(monkeypatch):
    """The window of a layer, and options of the call, beside scaling and dropout."""
    model = make("Qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    seen = []

    def attend(module, query, key, value, mask, **options):
        seen.append(options)
        return query.transpose(1, 2), None

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attend)
    with torch.no_grad():
        model(TOKENS, an_option=7)
        theirs = seen[:]
        seen.clear()
        patch_model(model, EXACT)
        model(TOKENS, an_option=7)
    assert [options["sliding_window"] for options in seen] == [None, 4]
    assert [options.keys() for options in seen] == [options.keys() for options in theirs]
    assert all(options["an_option"] == 7 for options in seen)


def test_norms_over_all_heads_are_not_fused_with_rope():
    attention = make("Qwen3").model.layers[0].self_attn
    assert can_fuse(attention)
    attention.q_norm = nn.RMSNorm(64)
    assert not can_fuse(attention)


def test_gradients_flow_through_a_patched_model():
    model, twin = make("Llama"), make("Llama")
    patch_model(model, EXACT)
    for m in (model, twin):
        m(TOKENS, labels=TOKENS).loss.backward()
    ours = model.model.layers[0].mlp.fused.gate_weight.grad
    theirs = twin.model.layers[0].mlp.gate_proj.weight.grad
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    from oss_fused.layers.hf import patch

    model = make("Llama")
    before, calls = str(model), []

    def fails_later(linear, **options):
        calls.append(linear)
        if len(calls) == 3:
            raise MemoryError("no room")
        return nn.Identity()

    monkeypatch.setattr(patch.FP8Linear, "from_linear", fails_later)
    with pytest.raises(MemoryError):
        patch_model(model)
    assert str(model) == before


def test_other_models_and_bad_policies_are_refused():
    with pytest.raises(UnsupportedModelError, match="model_type=None"):
        patch_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="linears='int4'"):
        PatchPolicy(linears="int4")
    with pytest.raises(SchemeError, match=r"ignore='re:\(': expected a regular expression"):
        PatchPolicy(ignore=("lm_head", "re:("))


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
def test_mlp_with_one_bias_is_kept_and_reported(projection):
    model = make("Llama")
    setattr(model.model.layers[0].mlp, projection, nn.Linear(64, 96))
    report = patch_model(model, EXACT)
    assert report.skipped == [("model.layers.0.mlp", "its projections have a bias")]
    assert report.count("FusedGatedMLP") == 1


def test_mlp_with_bias_is_kept_and_reported():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, mlp_bias=True)).eval()
    report = patch_model(model)
    assert report.count("FusedGatedMLP") == 0
    assert ("model.layers.0.mlp", "its projections have a bias") in report.skipped
    assert report.count("FP8Linear") == 14
