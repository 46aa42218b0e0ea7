# SPDX-License-Identifier: MIT
"""The report on a model: from a name or a config, on meta tensors, with charts."""

from __future__ import annotations

import json
import re

import pytest
from harness import model_report
from harness.comprehensive_report import Findings, fp8_retention, kernel_summary, make_report

from oss_fused.analysis.graph import ComputationGraphAnalyzer
from oss_fused.bench.roofline import Ceilings
from tests.loading import load_script
from tests.tags import Tags

script = load_script("analyze_model")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """The written report on a small gpt-oss, and what it was made of."""
    folder = tmp_path_factory.mktemp("reports")
    # one operation has fewer charts
    suite = json.loads((script.RESULTS / "h200" / "library-suite.json").read_text())
    suite["rows"] = [row for row in suite["rows"] if row["operation"] == "fp8_gemm"]
    (folder / "suite.json").write_text(json.dumps(suite))
    args = ["gpt-oss:tiny", "--tokens", "64", "--batch", "4", "--output", str(folder)]
    args += ["--suite", str(folder / "suite.json")]
    findings, analyzer = script.analyse(script.parse(args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "analyse", lambda args: (findings, analyzer))
        assert script.main(args) == 0
    return folder, findings, analyzer


def test_the_report_has_every_section_and_its_charts(gpt_oss):
    folder, _, _ = gpt_oss
    (page,) = folder.glob("comprehensive_report_*.md")
    assert re.fullmatch(r"comprehensive_report_\d{8}_\d{6}\.md", page.name)
    text = page.read_text()
    sections = re.findall(r"^## (.*)", text, re.M)
    assert sections == [
        "Executive summary",
        "Where the time goes",
        "Kernels that would help",
        "Communication among 2 ranks",
        "Performance",
        "Accuracy",
        "Recommendations",
        "Appendix",
    ]
    for words in ("best kernel: ", "mean speed-up", "memory efficiency", "FP8 retention: 9"):
        assert words in text
    # no Python objects
    assert re.search(r"kernels: gpus +\| NVIDIA H", text) and "{'" not in text
    images = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(images) == 6 and all((folder / name).stat().st_size > 5000 for name in images)
    tags = Tags(page.with_suffix(".html").read_text())
    assert tags.seen["img"] == len(images)
    assert "| fp8_gemm | 4096x4096x4096 |" in (folder / "summary.md").read_text()


def test_flops_and_bytes_are_those_of_the_shape(gpt_oss):
    folder, _, _ = gpt_oss
    found = json.loads((folder / "model_graph.json").read_text())
    hidden, wide, experts, top_k, vocab = 256, 256, 8, 4, 1024
    for phase, tokens in (("prefill", 64), ("decode", 4)):
        groups = {group["name"]: group for group in found[phase]["groups"]}
        assert groups["lm_head"]["flops"] == 2 * tokens * hidden * vocab
        products = 2 * 2 * tokens * top_k * (hidden * 2 * wide + wide * hidden)
        assert products <= groups["experts"]["flops"] <= 1.05 * products
        assert groups["q_proj"]["flops"] == 2 * 2 * tokens * hidden * hidden
        # every token may choose other experts, all of them at most
        active = min(experts, tokens * top_k) / experts
        weights = active * 2 * experts * 3 * hidden * wide * 2
        assert weights <= groups["experts"]["memory"] <= 1.3 * weights
        kernels = {one["kernel"] for one in found[phase]["kernels"]}
        assert {"moe_mxfp4", "moe_route", "fp8_linear", "add_rms_norm_quant"} <= kernels


def test_decode_waits_for_memory_and_prefill_does_not(gpt_oss):
    _, findings, analyzer = gpt_oss
    text = make_report("t", findings, analyzer, draw=False).text()
    decode = text[text.index("4 x 1 tokens behind 64") :]
    assert "compute-bound: none" in decode[:3000]
    volume = 64 * 256 * 2
    assert findings.communication["tensor_parallel"] == 2 * 2 * volume


def test_a_folder_with_a_config_and_bad_input(tmp_path, capsys):
    config = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 3}
    config |= {"num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    findings, analyzer = script.analyse(script.parse([str(tmp_path), "--tokens", "8"]))
    names = {node.type for node in findings.parts[0].graph.nodes}
    assert {"LlamaAttention", "LlamaRMSNorm", "Linear"} <= names
    text = make_report("t", findings, analyzer, draw=False).text()
    assert "--world-size 2: the model's 3 attention heads do not divide among 2 ranks" in text
    assert "expected one of 1, 3." in text
    assert script.main([str(tmp_path / "none")]) == 2
    assert "expected a folder with config.json" in capsys.readouterr().err
    assert script.main([str(tmp_path), "--suite", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.parse(["x", "--tokens", "0"])


def test_summary_lines_follow_the_rows():
    row = {"operation": "norm", "problem": "8", "status": "ok", "latency_ms": 1.0}
    rows = [
        {**row, "implementation": "pytorch", "tflops": 9.0, "latency_ms": 2.0},
        {**row, "implementation": "tilelang", "latency_ms": 0.25},
        {**row, "implementation": "oss_fused", "tflops": 2.0, "speedup": 2.0, "stable": False}
        | {"relative_error": 0.25, "bandwidth_utilization": 0.8},
        {**row, "implementation": "oss_fused", "problem": "9", "status": "wrong"},
    ]
    findings = Findings({"rows": rows, "ceilings": {"device": "d", "bandwidth_gbps": 1.0}})
    analyzer = ComputationGraphAnalyzer(Ceilings("d", 1.0, {"bfloat16": 1.0}))
    text = make_report("t", findings, analyzer, draw=False).text()
    for words in (
        "best kernel: norm at 8, 2000 GFLOP/s",
        "mean speed-up over the fastest other implementation: 0.25x over 1 problems",
        "mean speed-up over eager PyTorch: 2.00x over 1 problems",
        "largest relative error: 2.50e-01 (norm)",
        "unstable times: norm 8",
        "wrong *: norm 9",
        "tune norm at 8: slower than tilelang",
        "measure norm 8 again",
    ):
        assert words in text, words
    assert "FP8 retention" not in text
    assert (
        "| norm | 8 | 1 | 2000 | 0.25 (tilelang) | 2.00 | 80% | 2.50e-01 |"
        in kernel_summary(findings.rows).markdown()
    )
    texts = [{"candidates": [{"name": "w8a8", "perplexity_factor": f}]} for f in (1.25, 1.0)]
    assert fp8_retention({"texts": texts}) == 0.8 and fp8_retention({}) is None


def test_small_groups_are_drawn_as_one(monkeypatch):
    seen = []
    monkeypatch.setattr(model_report.charts, "png", lambda figure: seen.append(figure) or b"")
    made = [model_report.Group(f"g{i}", 1, 1, 1, 1.0) for i in range(12)]
    model_report._shares({"prefill": made})
    labels = [text.get_text() for text in seen[0].axes[0].get_legend().get_texts()]
    assert len(labels) == 9 and labels[0] == "other"
