"""Shipped Kubernetes, systemd and Slurm files are well-formed and match our programs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.repository import ROOT

from kubernetes_rules import kubernetes_rules
from potluck.client.config import ClientConfig
from potluck.common.net.build_version import RELEASE
from potluck.common.settings.configuration import parse
from potluck.server.config import CoordinatorConfig

ASSETS = ROOT / "deploy" / "assets"
BASE = ASSETS / "kubernetes" / "base"
OWN_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator; validators of Kubernetes's own kinds lack their schemas."""

UNITS = ("potluck-server.service", "potluck-client@.service", "potluck-relay.service")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def objects() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return [each for name in kustomization["resources"] for each in documents(BASE / name)]


def identifier(each: dict[str, Any]) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def check_monitor(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "monitoring.coreos.com/v1"
    endpoints = {"ServiceMonitor": "endpoints", "PodMonitor": "podMetricsEndpoints"}[each["kind"]]
    assert set(each["spec"]) == {"selector", endpoints}
    wanted = each["spec"]["selector"]["matchLabels"].items()
    kinds = {"ServiceMonitor": "Service", "PodMonitor": "Deployment"}
    found = [
        one
        for one in objects()
        if one["kind"] == kinds[each["kind"]] and wanted <= one["metadata"]["labels"].items()
    ]
    assert found
    ports = {endpoint["port"] for endpoint in each["spec"][endpoints]}
    assert ports == {"metrics"}


@pytest.mark.parametrize("each", objects(), ids=identifier)
@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_kubernetes_manifests_match_the_schema(each: dict[str, Any], version: str) -> None:
    if each["kind"] == "PrometheusRule":
        assert (BASE / "rules.yaml").read_text() == kubernetes_rules(), "run: make pages"
    elif each["kind"] in OWN_KINDS:
        check_monitor(each)
    else:
        kubernetes_validate.validate(each, version, strict=True)


def test_kubernetes_monitors_set_the_job_labels_used_by_the_rules() -> None:
    jobs = set()
    for each in objects():
        for endpoint in [
            *each.get("spec", {}).get("endpoints", ()),
            *each.get("spec", {}).get("podMetricsEndpoints", ()),
        ]:
            [job] = [rule for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
            assert set(job) == {"targetLabel", "replacement"}
            jobs.add(job["replacement"])
    named = re.findall(r'\bjob="([^"]+)"', kubernetes_rules())
    assert set(named) - {"potluck-relay"} == jobs  # the manifests run no relays


def test_kubernetes_validator_refuses_a_misspelt_field() -> None:
    [stateful] = [each for each in objects() if each["kind"] == "StatefulSet"]
    stateful["spec"]["replicsa"] = stateful["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(stateful, "1.28", strict=True)


def test_configurations_in_manifests_are_accepted_by_the_programs() -> None:
    found = {
        each["metadata"]["name"]: each["data"]["potluck.toml"]
        for each in objects()
        if each["kind"] == "ConfigMap"
    }
    server = parse(CoordinatorConfig, found["coordinator"], source="coordinator")
    client = parse(ClientConfig, found["host-0"], source="host-0")
    assert server.metrics_address == client.metrics_address == "", "the containers set it"
    told = {
        each["name"]: each["value"]
        for found in objects()
        if found["kind"] in ("StatefulSet", "Deployment")
        for container in found["spec"]["template"]["spec"]["containers"]
        for each in container["env"]
    }
    assert told == {
        f"POTLUCK_{party}_METRICS_ADDRESS": "0.0.0.0:9464" for party in ("SERVER", "CLIENT")
    }
    services = [each for each in objects() if each["kind"] == "Service"]
    assert [f"{each['metadata']['name']}.potluck.svc:7443" for each in services] == [
        client.coordinator
    ]


def test_kubernetes_manifests_name_the_current_release() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert {image["newTag"] for image in kustomization["images"]} == {RELEASE}


def test_kustomize_builds_the_gpu_overlay() -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    command = [program, "kustomize", str(ASSETS / "kubernetes" / "gpu")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    [host] = [each for each in yaml.safe_load_all(made) if each["kind"] == "Deployment"]
    [container] = host["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == f"potluck/client:{RELEASE}"
    kubernetes_validate.validate(host, "1.28", strict=True)


@pytest.mark.parametrize("name", UNITS)
def test_systemd_units_document_the_key_permissions_of_their_group(name: str) -> None:
    header = (ASSETS / "systemd" / name).read_text().split("[Unit]")[0]
    assert "install -m 640 -o root -g potluck certificate.pem key.pem authority.pem" in header
    assert "Group=potluck\n" in (ASSETS / "systemd" / name).read_text()


@pytest.mark.parametrize("name", UNITS)
def test_systemd_units_pass_systemd_analyze(tmp_path: Path, name: str) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ASSETS / "systemd" / name).read_text()
    unit = tmp_path / name.replace("@.", "@lab-a.")
    unit.write_text(text.replace("/opt/potluck/bin", str(Path(sys.executable).parent)))
    done = subprocess.run(
        [program, "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    again = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, check=False, timeout=60
    )
    assert b"NoNewPrivilege" in again.stderr  # the check does find mistakes


def test_slurm_batch_script_is_a_single_valid_file() -> None:
    [script] = ASSETS.parent.rglob("*.sbatch")
    assert script == ASSETS.parent / "potluck" / "deploy" / "machines" / "hosts.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
