# SPDX-License-Identifier: MIT
"""Prometheus scrapes a real server: every query has data; alerts are right and documented."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from oss_fused.plugin.build_info import labels
from tests.deploy.conftest import ROOT

MONITORING = ROOT / "deploy/monitoring"
DASHBOARD = MONITORING / "grafana/dashboards/oss-fused.json"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="needs Prometheus: apt-get install prometheus",
)


def all_rules() -> list[dict]:
    files = sorted((MONITORING / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def rules(kind: str) -> list[dict]:
    return [rule for rule in all_rules() if kind in rule]


def queries() -> list[str]:
    """Every expression: of panels, of recording rules, and of alerts without their threshold."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    exprs += [rule["expr"] for rule in rules("record")]
    for rule in rules("alert"):
        figure = re.fullmatch(r"(.+) (>|<|==) [\d.e]+", rule["expr"])
        assert figure, f"{rule['alert']}: expected figure, comparison, number"
        exprs.append(figure[1])
    # the test's scrapes last seconds
    exprs = [expr.replace("$model", ".*").replace("$__rate_interval", "30s") for expr in exprs]
    return [re.sub(r"\[\d+[smh]\]", "[30s]", expr) for expr in exprs]


def test_every_alert_is_documented_and_tested() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    anchors = {
        f"docs/operations.md#{title.lower()}" for title in re.findall(r"^### (\w+)", page, re.M)
    }
    cases = {
        case["name"]
        for case in yaml.safe_load((MONITORING / "rules.test.yml").read_text())["tests"]
    }
    for rule in rules("alert"):
        assert rule["annotations"]["runbook_url"] in anchors, rule["alert"]
        assert rule["annotations"]["runbook_url"].endswith(f"#{rule['alert'].lower()}")
        assert rule["annotations"]["summary"] and rule["labels"]["severity"]
        assert rule["alert"] in cases, "promtool has no case that makes it fire"
    assert len(anchors) == len(rules("alert")), "an entry without an alert"


def test_the_runbook_says_when_a_stuck_server_alerts() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (text,) = re.findall(r"^### OssFusedStuck\n(.+?)\n\n", page, re.M | re.S)
    (alert,) = (rule for rule in rules("alert") if rule["alert"] == "OssFusedStuck")
    (figure,) = (rule for rule in rules("record") if rule["record"] == alert["expr"].split()[0])
    waits = int(alert["for"].removesuffix("m"))
    # tokens of before the standstill are in the rate for as long
    (window,) = re.findall(r"\[(\d+)m\]", figure["expr"])
    words = {5: "five", 10: "ten"}
    assert f"for {words[waits + int(window)]} minutes, or {words[waits]} where" in text


def test_nothing_is_made_up() -> None:
    """A figure that nothing feeds is absent: zero would look healthy."""
    exprs = {rule.get("alert") or rule["record"]: rule["expr"] for rule in all_rules()}
    made_up = [name for name, expr in exprs.items() if "vector(" in expr]
    # the very absence of servers is what it counts
    assert made_up == ["OssFusedNoServers"]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert [
        panel["title"]
        for panel in panels
        if any("vector(" in target["expr"] for target in panel["targets"])
    ] == ["Alerts firing"]


def test_no_rule_needs_a_single_api_server() -> None:
    """With several, Prometheus' client has neither process_* nor python_*."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exprs = [rule["expr"] for rule in all_rules()]
    exprs += [target["expr"] for panel in panels for target in panel["targets"]]
    assert not [expr for expr in exprs if re.search(r"\b(process|python)_", expr)]


def test_alerts_compare_upwards() -> None:
    for rule in rules("alert"):
        down = rule["alert"] in ("OssFusedNoServers", "OssFusedDown")
        assert rule["expr"].split()[-2] == ("==" if down else ">"), rule["alert"]


def test_provisioning_fits_together() -> None:
    source = yaml.safe_load(
        (MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source["uid"] and panel["targets"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_texts_name_labels_that_their_figures_have() -> None:
    """Grafana and Prometheus show nothing in the place of a label that is not there."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    texts = [(t["expr"], t["legendFormat"]) for panel in panels for t in panel["targets"]]
    texts += [(rule["expr"], rule["annotations"]["summary"]) for rule in rules("alert")]
    grouped = 0
    for expr, text in texts:
        groups = re.findall(r"\bby \(([^)]*)\)", expr)
        named = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text))
        if groups:
            grouped += bool(named)
            assert named <= set(re.findall(r"\w+", " ".join(groups))), text
    assert grouped > 5
    # a bar for each server that differs, and it says in what
    (versions,) = (text for expr, text in texts if expr.startswith("count by (version"))
    assert set(re.findall(r"{{(\w+)}}", versions)) == set(labels())


@needs_prometheus
def test_promtool_finds_no_fault() -> None:
    for command in (
        ["check", "rules", "rules/alerts.yml", "rules/recording.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "rules.test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
