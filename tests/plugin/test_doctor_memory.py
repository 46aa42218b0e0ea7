# SPDX-License-Identifier: MIT
"""doctor.py counts the bytes of weights that a served model holds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.plugin.doctor import served_bytes
from oss_fused.quant.checkpoint.reader import CheckpointReader
from tests.plugin.conftest import build, calibrate

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(torch.cuda.is_available(), reason="about what a CPU holds"),
]

# scales of weights that are quantised while loading are in no checkpoint: 4 bytes a row of 256
TOLERANCE = 0.02


@pytest.mark.parametrize(
    ("family", "experts"),
    [("llama", None), ("gpt_oss", "mxfp4"), ("gpt_oss", "fp8"), ("gpt_oss", "bf16")],
)
def test_what_is_counted_is_held(family, experts, tmp_path, engine):
    folder = calibrate(
        build(tmp_path / "model", family, vocab_size=256), ignore=(), experts=experts
    )
    counted = served_bytes(CheckpointReader(folder, quantised=True), quantised=False)
    held = sum(parameter.nbytes for parameter in engine(folder).model.parameters())
    assert counted == pytest.approx(held, rel=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_what_is_quantised_while_loading_is_counted_too(family, tmp_path, engine):
    folder = build(tmp_path / "model", family, vocab_size=256)
    counted = served_bytes(CheckpointReader(folder, quantised=True), quantised=True)
    served = engine(folder, quantization="oss_fp8")
    held = sum(parameter.nbytes for parameter in served.model.parameters())
    assert counted == pytest.approx(held, rel=TOLERANCE)
