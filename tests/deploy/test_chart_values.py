# SPDX-License-Identifier: MIT
"""The chart refuses senseless values by its schema, and contradictions when it renders."""

from __future__ import annotations

import helm_python
import pytest

from tests.deploy.test_kubernetes import DEFAULTS, with_model

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
    "token of the hub in the open": with_model(env=[{"name": "HF_TOKEN", "value": "x"}]),
    "token of the hub from nowhere": with_model(env=[{"name": "HF_TOKEN"}]),
    "variable that is no text": with_model(env=[{"name": "NCCL_DEBUG", "value": 1}]),
    "low port": {"servingEngineSpec": {"containerPort": 80}},
    "budget of nothing": {"podDisruptionBudget": {"maxUnavailable": 0}},
    "key on the command line, as vLLM takes it too": with_model(
        vllmConfig={"extraArgs": ["--api_key", "x"]}
    ),
    "TLS that the probes do not speak": with_model(
        vllmConfig={"extraArgs": ["--ssl-certfile=/models/cert.pem"]}
    ),
    "sizes beside requestGPU": with_model(vllmConfig={"extraArgs": ["--data_parallel_size=2"]}),
    "sizes by short flags": with_model(vllmConfig={"extraArgs": ["-tp", "2"]}),
    "stages by short flags": with_model(vllmConfig={"extraArgs": ["-pp=2"]}),
    "drain beside the grace period": with_model(vllmConfig={"extraArgs": ["--shutdown-timeout=1"]}),
    "typo in a variable": with_model(env=[{"name": "OSS_FUSED_BACKENDS", "value": "torch"}]),
    "a variable that moved": with_model(env=[{"name": "OSS_FUSED_EXPERTS", "value": "vllm"}]),
    "options beside additionalConfig": with_model(
        vllmConfig={"extraArgs": ["--additional_config={}"]}
    ),
    "an option that would replace additionalConfig": with_model(
        vllmConfig={"extraArgs": ["--additional-config.oss_fused.burst=1"]}
    ),
    "variable of the chart": with_model(env=[{"name": "AUTH", "value": "off"}]),
    "scraped by everybody": {"serviceMonitor": {"scrapeFrom": [{}]}},
    "scraped by nobody": {"serviceMonitor": {"scrapeFrom": []}},
    "colon in a metric": {"autoscaling": {"metricName": "vllm:num_requests_waiting"}},
    "output elsewhere": {"calibrationJob": {"output": "/etc"}},
    "output out of the volume": {"calibrationJob": {"output": "/models/../etc"}},
}


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_values_are_refused(chart, name) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        chart.validate_schema(SENSELESS[name])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            with_model(vllmConfig={"tensorParallelSize": 2}),
            r"requestGPU=1: expected .* 2 \* 1 \* 1",
        ),
        (with_model(vllmConfig={"dataParallelSize": 2}), r"requestGPU=1: expected .* 1 \* 1 \* 2"),
        (with_model(replicaCount=2), "ReadWriteMany or ReadOnlyMany"),
        ({"autoscaling": {"enabled": True}}, "found 4 replicas"),
        ({"servingEngineSpec": {"existingApiKeySecret": ""}}, "or allowAnonymous=true"),
        ({"servingEngineSpec": {"allowAnonymous": True}}, "and no Secret"),
        ({"servingEngineSpec": {"terminationGracePeriodSeconds": 15}}, "preStopSeconds=5"),
        ({"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 1}}, "is below"),
        ({"calibrationJob": {"enabled": True}}, "claimName"),
    ],
)
def test_contradictions_are_refused(chart, values, reason) -> None:
    with pytest.raises(helm_python.HelmError, match=reason):
        chart.render(values, name="demo", namespace="llm")


@pytest.mark.parametrize(
    ("names", "release"), [(("a", "a"), "demo"), (("gpt-oss-20b", "gpt-oss-120b"), "r" * 45)]
)
def test_two_models_do_not_share_objects(chart, names, release) -> None:
    """Kubernetes' names are cut to 52 characters."""
    model = DEFAULTS["servingEngineSpec"]["modelSpec"][0]
    values = {"servingEngineSpec": {"modelSpec": [model | {"name": name} for name in names]}}
    with pytest.raises(helm_python.HelmError, match=f"would be called .*, as those of {names[0]};"):
        chart.render(values, name=release, namespace="llm")
