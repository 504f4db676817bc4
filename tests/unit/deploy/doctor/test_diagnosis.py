"""Findings of `potluck doctor`, on files and on its own numbers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support import mounts
from support.operator_service import status, waits
from typer.testing import CliRunner

from potluck.common.net.build_version import software_version
from potluck.common.net.identity import Role
from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.common.net.tls import TlsFiles
from potluck.common.settings.configuration import load
from potluck.deploy.cli import app
from potluck.deploy.doctor import diagnosis
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, write_demo_files
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import ClientStatus
from potluck.server.config import CoordinatorConfig

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def described(
    versions: Mapping[str, int] = VERSIONS, **values: object
) -> operator_pb2.DescribeCoordinatorResponse:
    answer = operator_pb2.DescribeCoordinatorResponse(
        software_version=software_version(),
        protocol_version=PROTOCOL_VERSION,
        versions=versions,
        disk_free_bytes=50,
        disk_size_bytes=100,
        hosts_attending=3,
        clients_attending=24,
        runs_under_way=1,
    )
    answer.time.FromDatetime(NOW)
    answer.certificate_expires_at.FromDatetime(NOW + timedelta(days=100))
    for name, value in values.items():
        setattr(answer, name, value)
    return answer


def verdicts(answer: operator_pb2.DescribeCoordinatorResponse, now: datetime = NOW) -> set[str]:
    """Return the findings whose verdict is not good."""
    found = list(diagnosis.federation(answer, (), 0.1, now))
    for each in found:
        assert bool(each.remedy) == (each.verdict is not Verdict.OK), each
    return {f"{each.about} {each.verdict}" for each in found if each.verdict is not Verdict.OK}


def test_healthy_federation_has_no_findings() -> None:
    assert verdicts(described()) == set()


def test_finding_about_a_coordinator_of_another_build_names_both_builds() -> None:
    theirs = "0.1.0.dev7+gabcdef012"
    [found] = [
        each
        for each in diagnosis.federation(described(software_version=theirs), (), 0.1, NOW)
        if each.about == "its version"
    ]
    assert found.verdict == "warning"
    assert found.found.endswith(f"this machine has {software_version()}")
    assert theirs in found.found
    assert found.remedy == "install the same build on this machine"


def test_each_problem_that_a_coordinator_reports_gives_a_finding() -> None:
    assert verdicts(described(versions={**VERSIONS, "framing": 99})) == {"its version error"}
    assert verdicts(described(versions={})) == {"its version error"}
    assert verdicts(described(software_version="0.0.1")) == {"its version warning"}
    assert verdicts(described(disk_free_bytes=5)) == {"its disk warning"}
    assert verdicts(described(disk_free_bytes=0)) == {"its disk error"}
    assert verdicts(described(hosts_attending=0)) == {"hosts warning"}
    assert verdicts(described(object_store="https://s3")) == set()
    away = described(object_store="https://s3", object_store_trouble="the object store failed")
    assert verdicts(away) == {"object store error"}


def client(number: int, host: str, *, attending: bool, quarantined: bool = False) -> ClientStatus:
    found = ClientStatus(
        client_id=f"client-{number}", host_id=host, attending=attending, quarantined=quarantined
    )
    found.last_seen.FromDatetime(NOW - timedelta(minutes=number))
    return found


def finding_on_hosts(*clients: ClientStatus) -> Finding:
    found = diagnosis.federation(described(hosts_attending=1), clients, 0.1, NOW)
    return next(each for each in found if each.about == "hosts")


def test_disconnected_host_is_a_warning_with_its_name() -> None:
    found = finding_on_hosts(
        client(1, "host-0", attending=True), client(2, "host-1", attending=False)
    )
    assert found.verdict == "warning"
    assert found.found == (
        "1 host connected with 24 clients; 1 run under way; "
        "1 host disconnected: host-1 (last heard of 2 min 00 s ago)"
    )
    assert found.remedy.startswith("start it: `potluck-client --config FILE`; ")


def test_many_disconnected_hosts_are_counted_and_some_are_named() -> None:
    away = [client(number, f"host-{number}", attending=False) for number in range(12, 0, -1)]
    found = finding_on_hosts(*away).found
    assert "12 hosts disconnected: host-1 (last heard of 1 min 00 s ago), host-2 " in found
    assert found.endswith(", host-5 (last heard of 5 min 00 s ago) and 7 more")


def test_disconnected_host_with_clients_in_quarantine_only_is_no_finding() -> None:
    gone = client(2, "host-1", attending=False, quarantined=True)
    assert finding_on_hosts(client(1, "host-0", attending=True), gone).verdict == "ok"


def test_waiting_run_is_a_warning() -> None:
    answer = described()
    answer.runs.extend([status().status, waits(status(), clients=9).status, waits(status()).status])
    assert verdicts(answer) == {"run warning"}
    [finding] = [each for each in diagnosis.federation(answer, (), 0.1, NOW) if each.about == "run"]
    assert "tea (3f9ac0de): 6 of 9 clients are connected; waiting for 3 more until" in finding.found


@pytest.mark.parametrize(("minutes", "text"), [(5, "behind"), (-5, "ahead of")])
def test_clock_difference_is_an_error(minutes: int, text: str) -> None:
    answer = described()
    answer.time.FromDatetime(NOW + timedelta(minutes=minutes))
    [clock] = [each for each in diagnosis.federation(answer, (), 0.1, NOW) if each.about == "clock"]
    assert clock.verdict is Verdict.ERROR
    assert clock.found == f"this machine's clock is 5 min 00 s {text} the coordinator's clock"


def test_certificate_close_to_expiry_is_a_warning() -> None:
    answer = described()
    answer.certificate_expires_at.FromDatetime(NOW + timedelta(days=13))
    assert verdicts(answer) == {"its certificate warning"}


def test_problems_of_certificate_files_are_found(tmp_path: Path) -> None:
    pki.create_authority(tmp_path, "demo")
    issued = pki.issue(tmp_path, Role.HOST, "host-0", clients=["client-0:3"])
    tls = TlsFiles(certificate=issued.certificate, key=issued.key, authority=issued.authority)
    now = datetime.now(UTC)

    def verdict(at: datetime = now) -> Finding:
        return diagnosis.certificates(tls, at)

    assert verdict().verdict is Verdict.OK
    assert verdict().found.startswith("host 'host-0' of federation demo, valid until ")
    assert verdict(now + timedelta(days=360)).verdict is Verdict.WARNING
    expired = verdict(now + timedelta(days=400))
    assert expired.verdict is Verdict.ERROR
    assert "expired on" in expired.found
    assert "potluck pki" in expired.remedy
    issued.key.chmod(0o640)  # the mode that the systemd units need
    assert verdict().verdict is Verdict.OK
    issued.key.chmod(0o644)
    assert verdict().remedy == f"chmod 600 {issued.key}"
    issued.key.unlink()
    assert verdict().verdict is Verdict.ERROR


def test_revoked_certificate_of_the_coordinator_is_an_error(files: DemoFiles) -> None:
    certificate_register.revoke(files.folder / "pki", "coordinator")
    config = load(CoordinatorConfig, files.coordinator, environment_prefix="TEST")
    now = datetime.now(UTC)
    [unknown, *_] = diagnosis.coordinator_files(config, now)
    assert unknown.verdict is Verdict.OK, "it has no revocation list"
    listed = config.model_copy(update={"revoked": files.folder / "pki" / pki.REVOKED})
    [known, *_] = diagnosis.coordinator_files(listed, now)
    assert known.verdict is Verdict.ERROR
    assert "was revoked on" in known.found


@pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not() or "can mount")
def test_full_or_read_only_disk_is_found(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "full", megabytes=1) as full:
        assert diagnosis.state_directory(full / "state").verdict is Verdict.OK
        with contextlib.suppress(OSError), (full / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        found = diagnosis.state_directory(full / "state")
    assert found.verdict is Verdict.ERROR
    assert "No space left on device" in found.found
    assert "free disk space" in found.remedy
    with mounts.tmpfs(tmp_path / "fixed", megabytes=1, read_only=True) as fixed:
        assert diagnosis.state_directory(fixed).verdict is Verdict.ERROR


def test_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert diagnosis.port("port", "127.0.0.1", number, "listen").verdict is Verdict.WARNING
    assert diagnosis.port("port", "127.0.0.1", number, "listen").verdict is Verdict.OK


def test_installation_check_finds_no_problem_here() -> None:
    [found] = diagnosis.software()
    assert found.verdict is Verdict.OK, found


@pytest.fixture
def files(tmp_path: Path) -> DemoFiles:
    options = DemoOptions(
        task="digits", selector="uniform", strategy="fedavg", clients=4, hosts=2, count=2,
        rounds=1, seed=0, device="cpu",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return write_demo_files(tmp_path / "demo", options, port)


def test_doctor_checks_every_file_and_names_the_remedies(files: DemoFiles) -> None:
    operator = files.folder / "operator.toml"
    paths = [str(files.coordinator), *map(str, files.hosts)]
    result = CliRunner().invoke(
        app, ["doctor", *paths, "--config", str(operator), "--json"], standalone_mode=False
    )
    found = json.loads(result.stdout)
    assert list(found) == ["this machine", *paths, "the federation"]
    assert {each["about"] for each in found[paths[0]]} == {"certificate", "disk", "port"}
    assert {each["about"] for each in found[paths[1]]} == {
        "certificate",
        "disk",
        "device",
        "coordinator",
    }
    certificate, coordinator = found["the federation"]
    assert certificate["verdict"] == "ok"
    assert coordinator["verdict"] == "error"
    assert coordinator["found"].startswith("nothing listens at 127.0.0.1:")
    assert coordinator["remedy"] == "is the coordinator running?"
    assert result.return_value == 1


def test_doctor_names_no_option_that_it_lacks_if_there_is_no_operator_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"XDG_CONFIG_HOME": str(tmp_path)}).invoke(
        app, ["doctor", "--json"], standalone_mode=False
    )
    [finding] = json.loads(result.stdout)["the federation"]
    assert finding["found"].startswith("can't find a coordinator: ")
    assert "operator.toml" in finding["remedy"]
    assert "--coordinator" not in result.stdout


def test_doctor_names_an_invalid_configuration_file(tmp_path: Path, files: DemoFiles) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("listen = 1\nlsten = 2\n")
    result = CliRunner().invoke(app, ["doctor", str(broken), "--json"], standalone_mode=False)
    [finding] = json.loads(result.stdout)[str(broken)]
    assert finding["verdict"] == "error"
    assert "unknown key 'lsten'" in finding["found"]


def test_doctor_names_a_missing_configuration_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    result = CliRunner().invoke(app, ["doctor", missing, "--json"], standalone_mode=False)
    [finding] = json.loads(result.stdout)[missing]
    assert finding["found"] == f"{missing} can't be read: No such file or directory"
    assert "`potluck-client config` print" in finding["remedy"]


def test_finding_about_an_empty_file_separates_problem_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["doctor", "--config", str(tmp_path / "empty.toml")]
    )
    found, _, remedy = ended.stdout.partition("→")
    assert "'coordinator' is missing; 'tls' is missing" in " ".join(found.split())
    remedy, counted = remedy.strip().splitlines()
    assert remedy.strip() == "`potluck config operator` prints an example"
    assert counted == "1 ok, 1 error"
