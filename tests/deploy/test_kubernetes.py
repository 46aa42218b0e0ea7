# SPDX-License-Identifier: MIT
"""The chart renders, its manifests fit Kubernetes' schemas, and senseless values are refused."""

from __future__ import annotations

import copy
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import ROOT

CHART = ROOT / "deploy/kubernetes/oss-fused"
EXAMPLES = sorted((ROOT / "deploy/kubernetes/examples").glob("*.yaml"))
# of the Prometheus operator, LeaderWorkerSet and KServe: no schema on PyPI (docs/deploy.md)
FOREIGN = ("ServiceMonitor", "LeaderWorkerSet", "InferenceService")
EVERYTHING = {
    "servingEngineSpec": {"existingApiKeySecret": "key"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"allowEgress": True},
    "calibrationJob": {"enabled": True, "claimName": "models", "args": ["--kv-cache", "fp8"]},
}
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def chart():
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


def render(chart, values: dict[str, Any]) -> dict[str, dict]:
    chart.validate_schema(values)
    texts = chart.render(values, name="demo", namespace="llm").values()
    documents = [d for text in texts for d in yaml.safe_load_all(text) if d]
    return {document["kind"]: document for document in documents}


def with_model(**changes: Any) -> dict[str, Any]:
    """Values whose only model differs from the default in ``changes``."""
    model = copy.deepcopy(DEFAULTS["servingEngineSpec"]["modelSpec"][0])
    model["vllmConfig"] |= changes.pop("vllmConfig", {})
    return {"servingEngineSpec": {"modelSpec": [model | changes]}}


def check(document: dict) -> None:
    if document["kind"] not in FOREIGN:
        for version in ("1.29", "1.35"):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("values", [{}, EVERYTHING, with_model(requestGPU=0)])
def test_manifests_fit_the_schemas(chart, values) -> None:
    documents = render(chart, values)
    for document in documents.values():
        check(document)
    assert {"Deployment", "Service", "PersistentVolumeClaim", "NetworkPolicy"} <= set(documents)
    if values is EVERYTHING:
        assert {"HorizontalPodAutoscaler", "ServiceMonitor", "Job"} <= set(documents)
        assert "replicas" not in documents["Deployment"]["spec"], "the autoscaler's"


def test_helm_lint(chart) -> None:
    report = helm_python.lint(CHART, EVERYTHING, strict=True)
    # 1 is information
    assert not report["errors"] and all(m["severity"] == 1 for m in report["messages"])


def test_pods_are_confined(chart) -> None:
    documents = render(chart, EVERYTHING)
    for kind in ("Deployment", "Job"):
        pod = documents[kind]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]
    server = documents["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert "key" not in str(server["args"]) and "KEY" not in str(server["env"])
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["exec"]["command"][-1].endswith("healthcheck.py")


SENSELESS = {
    "unknown key": {"servingEngineSpecs": {}},
    "no model": {"servingEngineSpec": {"modelSpec": []}},
    "bad name": with_model(name="Bad_Name"),
    "latest": with_model(tag="latest"),
    "three GPUs": with_model(vllmConfig={"tensorParallelSize": 3}, requestGPU=3),
    "no memory": with_model(requestMemory="0"),
    "negative replicas": with_model(replicaCount=-1),
    "path out of the volume": with_model(modelURL="/models/../etc"),
    "more than all memory": with_model(vllmConfig={"gpuMemoryUtilization": 1.5}),
    "no tokens": with_model(vllmConfig={"maxModelLen": 0}),
    "key on the command line": with_model(vllmConfig={"extraArgs": ["--api-key=x"]}),
    "key in the environment": with_model(env=[{"name": "VLLM_API_KEY", "value": "x"}]),
    "low port": {"servingEngineSpec": {"containerPort": 80}},
    "budget of nothing": {"podDisruptionBudget": {"maxUnavailable": 0}},
    "colon in a metric": {"autoscaling": {"metricName": "vllm:num_requests_waiting"}},
    "output elsewhere": {"calibrationJob": {"output": "/etc"}},
}


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_values_are_refused(chart, name) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        chart.validate_schema(SENSELESS[name])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (with_model(vllmConfig={"tensorParallelSize": 2}), "needs requestGPU=2"),
        ({"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 2}}, "is below"),
        ({"calibrationJob": {"enabled": True}}, "claimName"),
    ],
)
def test_contradictions_are_refused(chart, values, reason) -> None:
    with pytest.raises(helm_python.HelmError, match=reason):
        chart.render(values, name="demo", namespace="llm")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_manifests(path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert document["apiVersion"] and document["metadata"]["name"]
        check(document)
        if document["kind"] == "LeaderWorkerSet":
            template = document["spec"]["leaderWorkerTemplate"]
            for role in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
                check(pod | {"spec": template[role]["spec"]})
