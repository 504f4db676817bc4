"""A real Prometheus scrapes a federation's processes over mutual TLS, as the pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.federation import set_values
from support.pki import make_federation
from support.prometheus import hurried_config, prometheus_running, why_not

from potluck.common.net.tls import TlsFiles
from potluck.deploy.local.demo import reserved_ports
from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def job(name: str, files: TlsFiles | None, authority: Path, *ports: int) -> dict[str, Any]:
    """Return a job of scrape_configs."""
    tls = {"ca_file": str(authority)}
    if files is not None:
        tls |= {"cert_file": str(files.certificate), "key_file": str(files.key)}
    targets = [f"127.0.0.1:{port}" for port in ports]
    return {
        "job_name": name,
        "scheme": "https",
        "tls_config": tls,
        "static_configs": [{"targets": targets}],
    }


async def test_prometheus_needs_its_certificate_to_scrape(tmp_path: Path) -> None:
    parties = make_federation(tmp_path / "metrics-pki")
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=2,
        hosts=1,
        count=2,
        rounds=1,
        seed=7,
        device="cpu",
    )
    table = parties.coordinator.model_dump(mode="json") | {"scrapers": ["operator"]}
    with reserved_port() as port, reserved_ports(2) as ports:
        files = write_demo_files(tmp_path / "federation", options, port)
        for path, number in zip((files.coordinator, files.hosts[0]), ports, strict=True):
            set_values(path, {"metrics_address": f"127.0.0.1:{number}", "metrics_tls": table})
        authority = parties.operator.authority
        config = hurried_config(
            tmp_path,
            [
                job("potluck-coordinator", parties.operator, authority, ports[0]),
                job("potluck-host", parties.operator, authority, ports[1]),
                job("stranger", None, authority, *ports),
            ],
        )
        async with LocalFederation(files) as federation:
            await federation.start()
            async with prometheus_running(tmp_path, config) as prometheus:
                await prometheus.until('up{job="potluck-coordinator"} == 1')
                await prometheus.until('up{job="potluck-host"} == 1')
                await prometheus.until('count(up{job="stranger"}) == 2')
                await prometheus.until('potluck_build_info{party="host"}')
                assert await prometheus.query('up{job="stranger"} == 1') == []
                assert await prometheus.query('potluck_build_info{job="stranger"}') == []
