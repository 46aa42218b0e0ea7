# SPDX-License-Identifier: MIT
"""The chart renders what it promises, and its manifests fit Kubernetes' schemas."""

from __future__ import annotations

import copy
import json
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from oss_fused import envs
from oss_fused.quant.settings import ServingOptions, parse_options
from tests.deploy.conftest import CHART, ROOT

EXAMPLES = sorted((ROOT / "deploy/kubernetes/examples").glob("*.yaml"))
# of the Prometheus operator, LeaderWorkerSet and KServe: no schema on PyPI (docs/deploy.md)
FOREIGN = ("ServiceMonitor", "LeaderWorkerSet", "InferenceService")
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def with_model(**changes: Any) -> dict[str, Any]:
    """Values whose only model differs from the default in ``changes``."""
    model = copy.deepcopy(DEFAULTS["servingEngineSpec"]["modelSpec"][0])
    model["vllmConfig"] |= changes.pop("vllmConfig", {})
    return {"servingEngineSpec": {"modelSpec": [model | changes]}}


EVERYTHING = {
    **with_model(pvcAccessMode=["ReadWriteMany"]),
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"allowEgress": True},
    "calibrationJob": {"enabled": True, "claimName": "models", "args": ["--kv-cache", "fp8"]},
}


def render(chart, values: dict[str, Any]) -> dict[str, dict]:
    chart.validate_schema(values)
    texts = chart.render(values, name="demo", namespace="llm").values()
    documents = [d for text in texts for d in yaml.safe_load_all(text) if d]
    return {document["kind"]: document for document in documents}


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
        # Services of the namespace would set variables, such as VLLM_PORT
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert places(container) >= WRITTEN
            assert container["resources"]["limits"]["memory"]
    server = container_of(documents)
    assert "key" not in str(server["args"]) and "KEY" not in str(server["env"])
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["exec"]["command"][-1].endswith("healthcheck.py")


# what the image writes to: docs/deploy.md, "Images"
WRITTEN = {"/cache", "/tmp", "/home/oss"}


def places(container: dict[str, Any]) -> set[str]:
    """Where something is mounted to which the container can write."""
    mounts = container["volumeMounts"]
    return {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}


def pod_of(documents: dict[str, dict]) -> dict[str, Any]:
    return documents["Deployment"]["spec"]["template"]["spec"]


def container_of(documents: dict[str, dict]) -> dict[str, Any]:
    return pod_of(documents)["containers"][0]


def environment_of(documents: dict[str, dict]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container_of(documents)["env"]}


@pytest.mark.parametrize(("grace", "pre_stop"), [(65, 5), (300, 20), (30, 0)])
def test_streams_may_end_within_the_grace_period(chart, grace, pre_stop) -> None:
    engine = {"terminationGracePeriodSeconds": grace, "preStopSeconds": pre_stop}
    documents = render(chart, {"servingEngineSpec": engine})
    container = container_of(documents)
    assert pod_of(documents)["terminationGracePeriodSeconds"] == grace
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(pre_stop)]
    assert environment_of(documents)["GRACE_PERIOD"] == str(grace - pre_stop)
    check(documents["Deployment"])


def test_key_is_the_default_and_its_absence_is_asked_for(chart) -> None:
    documents = render(chart, {})
    assert environment_of(documents)["AUTH"] == "on"
    secret = next(v for v in pod_of(documents)["volumes"] if v["name"] == "secrets")["secret"]
    assert secret["secretName"] == "oss-fused-api-key" and not secret.get("optional")
    assert secret["items"] == [{"key": "api_key", "path": "api_key"}]
    anonymous = {"existingApiKeySecret": "", "allowAnonymous": True}
    documents = render(chart, {"servingEngineSpec": anonymous})
    assert environment_of(documents)["AUTH"] == "off"
    assert all(volume["name"] != "secrets" for volume in pod_of(documents)["volumes"])


def options_of(documents: dict[str, dict]) -> ServingOptions:
    """What the server reads of the container's --additional-config."""
    start = "--additional-config="
    texts = [arg.removeprefix(start) for arg in container_of(documents)["args"] if start in arg]
    return parse_options(json.loads(texts[0])["oss_fused"] if texts else None)[1]


def test_monitor_is_set_and_can_be_turned_off(chart) -> None:
    assert options_of(render(chart, {})).monitor_every == 2000
    options = {"monitor_every": 0, "expert_kernels": "vllm", "monitor_policy": "/cache/p'\".json"}
    values = with_model(vllmConfig={"additionalConfig": {"oss_fused": options}})
    assert options_of(render(chart, values)) == ServingOptions(**options)
    values = with_model(vllmConfig={"additionalConfig": {}})
    assert options_of(render(chart, values)) == ServingOptions()


def test_variables_that_a_user_may_set_are_this_packages(chart) -> None:
    items = chart_schema()["properties"]["servingEngineSpec"]["properties"]["modelSpec"]["items"]
    _, known = items["properties"]["env"]["items"]["properties"]["name"]["anyOf"]
    assert set(known["enum"]) == set(envs.VARIABLES)
    name = {"name": "OSS_FUSED_BACKEND", "value": "torch"}
    assert environment_of(render(chart, with_model(env=[name])))["OSS_FUSED_BACKEND"] == "torch"


def chart_schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def allowed(documents: dict[str, dict], namespace: str, labels: dict[str, str]) -> bool:
    """Whether the policy lets a pod of these labels and that namespace reach the server's port."""

    def matches(selector: dict | None, found: dict[str, str]) -> bool:
        return selector is None or selector.get("matchLabels", {}).items() <= found.items()

    own = {"kubernetes.io/metadata.name": "llm"}
    theirs = {"kubernetes.io/metadata.name": namespace}
    policy = documents["NetworkPolicy"]["spec"]
    server = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert matches(policy["podSelector"], server), "the policy is about another pod"
    port = container_of(documents)["ports"][0]["name"]
    for rule in policy["ingress"]:
        assert [p["port"] for p in rule["ports"]] == [port]
        for peer in rule["from"]:
            # without a namespace selector a peer is of the policy's own namespace
            inside = (
                matches(peer["namespaceSelector"], theirs)
                if "namespaceSelector" in peer
                else theirs == own
            )
            if inside and matches(peer.get("podSelector"), labels):
                return True
    return False


def test_network_policy_lets_prometheus_in_and_nobody_else(chart) -> None:
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    monitored = {"serviceMonitor": {"enabled": True}}
    documents = render(chart, monitored)
    assert allowed(documents, "monitoring", prometheus)
    assert allowed(documents, "llm", {"app": "client"}), "the same namespace still may"
    assert not allowed(documents, "monitoring", {"app": "other"})
    assert not allowed(documents, "other", prometheus)
    assert not allowed(render(chart, {}), "monitoring", prometheus)
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}
    peer = {"namespaceSelector": namespace, "podSelector": {"matchLabels": {"app": "prom"}}}
    monitored["serviceMonitor"]["scrapeFrom"] = [peer]
    assert allowed(render(chart, monitored), "observability", {"app": "prom"})
    # a client's list replaces the namespace, not Prometheus
    clients = {"networkPolicy": {"allowFrom": [{"podSelector": {"matchLabels": {"app": "web"}}}]}}
    documents = render(chart, monitored | clients)
    assert allowed(documents, "observability", {"app": "prom"})
    assert allowed(documents, "llm", {"app": "web"})
    assert not allowed(documents, "llm", {"app": "client"})


def test_network_policy_lets_the_server_reach_the_hub_if_it_must(chart) -> None:
    dns = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    hub = {"ports": [{"protocol": "TCP", "port": 443}]}

    def egress(values: dict[str, Any]) -> list[dict]:
        documents = render(chart, values)
        check(documents["NetworkPolicy"])
        return documents["NetworkPolicy"]["spec"]["egress"]

    assert egress({}) == [dns]
    online = with_model(hubOffline=False, modelURL="org/model")
    assert egress(online) == [dns, hub]
    assert egress(online | {"networkPolicy": {"allowEgress": True}}) == [dns, {}]
    assert environment_of(render(chart, online))["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(
    ("sizes", "gpus"), [((1, 1, 1), 1), ((2, 2, 1), 4), ((2, 1, 4), 8), ((1, 1, 2), 0)]
)
def test_gpus_of_every_parallelism(chart, sizes, gpus) -> None:
    names = ("tensorParallelSize", "pipelineParallelSize", "dataParallelSize")
    values = with_model(requestGPU=gpus, vllmConfig=dict(zip(names, sizes)))
    container = container_of(render(chart, values))
    flags = dict(arg.split("=", 1) for arg in container["args"] if arg.startswith("--"))
    tp, pp, dp = sizes
    assert flags["--tensor-parallel-size"] == str(tp)
    assert flags.get("--pipeline-parallel-size", "1") == str(pp)
    assert flags.get("--data-parallel-size", "1") == str(dp)
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus


def test_long_contexts_are_written_out(chart) -> None:
    """Helm reads numbers as floats, which a template prints as 1.048576e+06."""
    monitored = {"oss_fused": {"monitor_every": 1000000}}
    values = with_model(vllmConfig={"maxModelLen": 1048576, "additionalConfig": monitored})
    documents = render(chart, values)
    assert "--max-model-len=1048576" in container_of(documents)["args"]
    assert options_of(documents).monitor_every == 1000000


def test_several_replicas_on_a_claim_that_they_can_share(chart) -> None:
    many = {"pvcAccessMode": ["ReadWriteMany"], "requestGPU": 0}
    spec = render(chart, with_model(replicaCount=3, **many))["Deployment"]["spec"]
    assert spec["replicas"] == 3 and spec["strategy"]["type"] == "RollingUpdate"
    # a new pod on another node could not mount the claim while the old one has it
    spec = render(chart, with_model(requestGPU=0))["Deployment"]["spec"]
    assert spec["strategy"]["type"] == "Recreate"


def test_upgrade_replaces_a_changed_calibration(chart) -> None:
    def job(**changes: Any) -> str:
        settings = {"enabled": True, "claimName": "models"} | changes
        return render(chart, {"calibrationJob": settings})["Job"]["metadata"]["name"]

    assert job() == job()
    assert len({job(), job(tag="0.2.0"), job(args=["--kv-cache", "fp8"])}) == 3
    assert len(job()) <= 63


def test_calibration_pulls_its_image_as_the_server_does(chart) -> None:
    job = {"calibrationJob": {"enabled": True, "claimName": "models"}}
    registry = {"imagePullSecrets": [{"name": "registry"}], "runtimeClassName": "nvidia"}
    documents = render(chart, job | {"servingEngineSpec": registry})
    check(documents["Job"])
    for kind in ("Deployment", "Job"):
        assert registry.items() <= documents[kind]["spec"]["template"]["spec"].items()
    plain = render(chart, job)["Job"]
    assert "imagePullSecrets" not in plain["spec"]["template"]["spec"]
    assert plain["metadata"]["name"] != documents["Job"]["metadata"]["name"], "a Job is immutable"


@pytest.mark.parametrize("word", ["123", "true", "1e3"])
def test_words_that_yaml_takes_for_others_stay_text(chart, word) -> None:
    values = with_model(name=word, storageClass=word)
    values["servingEngineSpec"] |= {"existingApiKeySecret": word, "runtimeClassName": word}
    values["calibrationJob"] = {"enabled": True, "claimName": word}
    texts = chart.render(values, name=word, namespace="llm").values()
    for document in (d for text in texts for d in yaml.safe_load_all(text) if d):
        check(document)


def test_token_of_the_hub_comes_from_a_secret(chart) -> None:
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    values = with_model(env=[{"name": "HF_TOKEN", "valueFrom": secret}], hubOffline=False)
    documents = render(chart, values)
    check(documents["Deployment"])
    assert container_of(documents)["env"][-1] == {"name": "HF_TOKEN", "valueFrom": secret}


def probes(found: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and content of every probe below ``found``."""
    if isinstance(found, list):
        return [probe for each in found for probe in probes(each)]
    if not isinstance(found, dict):
        return []
    own = [(name, probe) for name, probe in found.items() if name.endswith("Probe")]
    return own + probes(list(found.values()))


def test_probes_wait_for_the_health_check(chart, entrypoint) -> None:
    """Kubernetes ends a probe after one second where nothing is said."""
    files = [yaml.safe_load_all(path.read_text()) for path in EXAMPLES]
    found = probes([*render(chart, {}).values(), *(d for file in files for d in file)])
    assert len(found) == 6
    for name, probe in found:
        assert probe["timeoutSeconds"] > entrypoint.TIMEOUT_SECONDS
        if name == "readinessProbe":
            # how long a server that is gone still gets requests
            assert probe["periodSeconds"] * probe["failureThreshold"] <= 30


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
                (container,) = template[role]["spec"]["containers"]
                assert container["securityContext"]["readOnlyRootFilesystem"]
                assert places(container) >= WRITTEN
