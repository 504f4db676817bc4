"""Certificates that end or change while a federation is at work: real processes throughout."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, until
from support.promises import in_time

from potluck.client.config import load_config
from potluck.common.errors import IdentityError
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.deploy.doctor.diagnosis import Verdict
from potluck.deploy.doctor.party_checks import admission
from potluck.deploy.operator.operator_client import connect
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.slow

CUT_OFF_SECONDS = 5.0
"""Time within which the product promises to disconnect a revoked peer."""


def pki_folder(federation: Federation) -> Path:
    return federation.files.folder / "pki"


def shown_serial(federation: Federation) -> str:
    """Return the serial number of the certificate that the coordinator shows to new connections."""
    host, _, port = federation.files.operator.coordinator.rpartition(":")
    files = federation.files.operator.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        der = secure.getpeercert(binary_form=True)
    assert der is not None
    return f"{x509.load_der_x509_certificate(der).serial_number:x}"


async def gone(federation: Federation, host: str) -> None:
    """Wait until a host is no longer connected."""
    while host in await federation.attending_hosts():  # noqa: ASYNC110  # by another process
        await asyncio.sleep(0.05)


async def test_a_host_revoked_mid_run_is_cut_off_within_5_s_and_cannot_return(
    tmp_path: Path,
) -> None:
    settings = {"revoked": "pki/revoked.pem"}
    async with crash_federation(
        tmp_path,
        rounds=2,
        count=6,
        assignments=["round.leavers=drop", "round.quorum=0.3"],
        coordinator=settings,
    ) as federation:
        folder = pki_folder(federation)
        await federation.until_attending()
        federation.points.hold("train-client-0", "train-client-2")
        run_id = await federation.start_run()
        await until(lambda: federation.points.reached("train-client-0"))
        await until(lambda: federation.points.reached("train-client-2"))

        # Changes the file that the coordinator watches.
        certificate_register.revoke(folder, "host-0")
        await in_time(CUT_OFF_SECONDS, gone(federation, "host-0"))

        elsewhere = tmp_path / "operator"  # a copy of the authority's folder
        shutil.copytree(folder, elsewhere)
        certificate_register.revoke(elsewhere, "host-1")
        newest = (elsewhere / pki.REVOKED).read_bytes()
        assert await federation.operator.install_revocations(newest) == (2, 1)
        await in_time(CUT_OFF_SECONDS, gone(federation, "host-1"))

        federation.points.release()
        for number in (0, 1):
            log = federation.files.log(f"host-{number}")
            assert await federation.processes.hosts[number].ended() == 1
            assert "was revoked on" in log.read_text()
            again = await federation.processes.start_host(number)
            assert await again.ended() == 1
            assert f"host 'host-{number}' (serial" in log.read_text()
        await federation.finished(run_id)
        assert await federation.attending_hosts() == {"host-2"}

        # The check of `potluck doctor`.
        for number, verdict in ((1, Verdict.ERROR), (2, Verdict.OK)):
            config = load_config(federation.files.hosts[number], {})
            finding = await asyncio.to_thread(admission, config)
            assert finding.verdict is verdict, finding
            assert ("was revoked on" in finding.found) == (number == 1)
        assert await federation.attending_hosts() == {"host-2"}, "asking replaces no host"

        await federation.kill_coordinator()  # a restart keeps the pushed list
        await federation.restart_coordinator()
        again = await federation.processes.start_host(1)
        assert await again.ended() == 1


async def test_revocation_list_of_another_authority_is_refused(tmp_path: Path) -> None:
    async with crash_federation(tmp_path, rounds=1, hosts=1) as federation:
        await federation.until_attending()
        pki.create_authority(tmp_path / "other", "demo")
        forged = (tmp_path / "other" / pki.REVOKED).read_bytes()
        with pytest.raises(IdentityError, match="not signed by this federation's authority"):
            await federation.operator.install_revocations(forged)
        assert await federation.attending_hosts() == {"host-0"}


async def test_renewing_all_certificates_during_a_run_loses_no_round(tmp_path: Path) -> None:
    async with crash_federation(tmp_path, rounds=3) as federation:
        folder = pki_folder(federation)
        await federation.until_attending()
        federation.points.hold("train-client-0")
        run_id = await federation.start_run()
        await until(lambda: federation.points.reached("train-client-0"))
        before = shown_serial(federation)

        for name in ("coordinator", "host-0", "host-1", "host-2", "operator"):
            certificate_register.renew(folder, name)
        renewed = certificate_register.find(folder, "coordinator")[-1].summary.serial
        assert renewed != before
        assert shown_serial(federation) == renewed
        # Hosts that still use an old certificate are disconnected, and reconnect with the new one.
        for number in range(3):
            certificate_register.revoke(folder, f"host-{number}", superseded=True)
        newest = (folder / pki.REVOKED).read_bytes()
        assert await federation.operator.install_revocations(newest) == (3, 3)
        federation.points.release()
        await federation.finished(run_id)
        assert [round_.round for round_ in await federation.history(run_id)] == [1, 2, 3]
        async with connect(federation.files.operator) as newcomer:
            assert await newcomer.list_runs()
        assert await federation.attending_hosts() == {"host-0", "host-1", "host-2"}


def shown_by_host(clients: Sequence[operator_pb2.ClientStatus]) -> set[datetime]:
    """Return the expiry times of the connected hosts' certificates, as the coordinator saw them."""
    ends = [each.certificate_expires_at for each in clients if each.attending]
    return {end.ToDatetime(UTC) for end in ends}


async def test_host_reconnects_with_a_renewed_certificate_on_its_own(tmp_path: Path) -> None:
    policy = ["round.leavers=drop"]  # a client that disconnects for a moment is lost
    async with crash_federation(
        tmp_path, rounds=1, clients=2, hosts=1, count=2, assignments=policy
    ) as federation:
        folder, operator = pki_folder(federation), federation.operator
        await federation.until_attending()
        before = shown_by_host(await operator.list_clients())
        federation.points.hold("train-client-0")
        run_id = await federation.start_run()
        await until(lambda: federation.points.reached("train-client-0"))
        certificate_register.renew(folder, "host-0", days=30, new_key=True)
        ends = {certificate_register.find(folder, "host-0")[-1].summary.not_after}
        assert before != ends
        async with asyncio.timeout(PATIENCE_SECONDS):
            while shown_by_host(await operator.list_clients()) != ends:  # noqa: ASYNC110  # by a host
                await asyncio.sleep(0.05)
        federation.points.release()
        await federation.finished(run_id)
        [entry] = await federation.history(run_id)
        assert {m.state for m in entry.members} == {operator_pb2.MEMBER_STATE_INCLUDED}
        said = federation.files.log("host-0").read_text()
        assert said.count("certificate renewed, reconnecting") == 1
        assert "not connected" not in said.partition('"attending"')[2]


async def test_host_with_an_expired_certificate_waits_for_a_renewed_one(tmp_path: Path) -> None:
    async with crash_federation(tmp_path, rounds=1, hosts=1, start_hosts=False) as federation:
        folder = pki_folder(federation)
        begun = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=40)
        claims = [
            str(claim) for claim in certificate_register.find(folder, "host-0")[-1].identity.claims
        ]
        pki.issue(folder, Role.HOST, "host-0", clients=claims, days=1, now=begun, force=True)
        await federation.start_hosts()
        await federation.until_attending()
        log = federation.files.log("host-0")
        await until(lambda: "expired on" in log.read_text())
        await federation.until_attending(0)
        certificate_register.renew(folder, "host-0", new_key=True)
        await federation.until_attending()
        await federation.finished(await federation.start_run())


async def test_damaged_renewal_keeps_the_previous_certificate_in_use(tmp_path: Path) -> None:
    async with crash_federation(tmp_path, rounds=1, hosts=1) as federation:
        folder = pki_folder(federation)
        before = shown_serial(federation)
        certificate = folder / "coordinator.pem"
        good = certificate.read_bytes()
        certificate.write_bytes(good[:200])
        assert shown_serial(federation) == before
        certificate.write_bytes(good)
        path, _ = certificate_register.renew(folder, "coordinator", new_key=True)
        tls = TlsFiles(
            certificate=path, key=path.with_suffix(".key"), authority=folder / "authority.pem"
        )
        tls.load()
        assert shown_serial(federation) != before
