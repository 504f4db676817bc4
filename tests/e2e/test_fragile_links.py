"""Links whose connections break before a megabyte, and thin uplinks: rounds complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.federation import crash_federation, set_values
from support.fragile_link import fragile_link, thin_link

from potluck.rpc.v1 import operator_pb2

CARRIES = 700_000
MODEL_PARAMETERS = 1_000_000  # 4 MB
THIN_PARAMETERS = 120_000  # 480 kB
THIN_BYTES_PER_SECOND = 40_000


@pytest.mark.slow
async def test_connections_that_are_reset_before_a_megabyte_is_through(tmp_path: Path) -> None:
    async with crash_federation(
        tmp_path,
        clients=2,
        hosts=2,
        count=2,
        rounds=1,
        assignments=[f"task.parameters={MODEL_PARAMETERS}"],
        start_hosts=False,
    ) as federation:
        port = int(federation.files.operator.coordinator.rpartition(":")[2])
        async with fragile_link(port, carries=CARRIES) as link:
            for path in federation.files.hosts:
                set_values(path, {"coordinator": f"127.0.0.1:{link.port}"})
            await federation.start_hosts()
            await federation.until_attending()
            run_id = await federation.start_run()
            await federation.finished(run_id)
            history = await federation.history(run_id)
            states = {member.state for entry in history for member in entry.members}
            assert states == {operator_pb2.MEMBER_STATE_INCLUDED}
            moved = 2 * 2 * 4 * MODEL_PARAMETERS  # two clients, down and up
            assert moved / CARRIES < link.resets < 10 * moved / CARRIES
            models = 2 * 4 * MODEL_PARAMETERS  # what broke off on its way is not counted
            assert models <= sum(entry.bytes_down for entry in history) < 1.01 * models
            print(f"{link.resets} resets")


@pytest.mark.slow
async def test_updates_over_a_thin_uplink_behind_a_buffering_proxy_are_sent_once(
    tmp_path: Path,
) -> None:
    shape: dict[str, Any] = {
        "clients": 2,
        "hosts": 1,
        "count": 2,
        "rounds": 1,
        "assignments": [f"task.parameters={THIN_PARAMETERS}"],
    }
    for folder in ("direct", "thin"):
        (tmp_path / folder).mkdir()
    async with crash_federation(tmp_path / "direct", **shape) as federation:
        run_id = await federation.start_run()
        await federation.finished(run_id)
        [direct] = await federation.history(run_id)
    async with crash_federation(tmp_path / "thin", start_hosts=False, **shape) as federation:
        port = int(federation.files.operator.coordinator.rpartition(":")[2])
        async with thin_link(
            port, bytes_per_second=THIN_BYTES_PER_SECOND, buffer_bytes=2 << 20
        ) as link:
            for path in federation.files.hosts:
                set_values(path, {"coordinator": f"127.0.0.1:{link.port}"})
            await federation.start_hosts()
            await federation.until_attending()
            run_id = await federation.start_run()
            await federation.finished(run_id)
            [thin] = await federation.history(run_id)
        assert {member.state for member in thin.members} == {operator_pb2.MEMBER_STATE_INCLUDED}
        assert thin.model_blake3 == direct.model_blake3
        updates = 2 * 4 * THIN_PARAMETERS
        print(f"{link.sent_up / updates:.2f} times the bytes, {link.connections} connections")
        assert link.sent_up < 1.5 * updates
