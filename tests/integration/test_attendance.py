"""Deadlines of instructions for hosts that do not reconnect."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.pki import make_federation

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.clock import now
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts import attendance
from potluck.server.hosts.attendance import HostSession
from potluck.server.service.coordinator import Coordinator

PATIENCE_SECONDS = 240.0


def instruction(client: str) -> coordinator_pb2.Instruction:
    settle = coordinator_pb2.Settle(included=True)
    return coordinator_pb2.Instruction(id=f"settle/{client}", client_id=client, settle=settle)


async def test_instructions_for_disconnected_hosts_are_dropped_after_their_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "LOOK_SECONDS", 0.01)
    config = CoordinatorConfig(
        state_directory=tmp_path / "state", tls=make_federation(tmp_path / "pki").coordinator
    )
    async with Coordinator.opened(config, Instruments(MeasuredParty.COORDINATOR)) as coordinator:
        hosts = coordinator.attendance
        here = HostSession(host_id="here", client_ids=("here",), device="cpu", tasks=frozenset())
        hosts.attach(here)
        for client, seconds in (("away", 0.05), ("here", 0.05), ("patient", 3600.0)):
            hosts.instruct(instruction(client), deadline=now() + seconds, until_acknowledged=True)
        async with asyncio.timeout(PATIENCE_SECONDS):
            sent = [await here.outbox.get() for _ in range(2)]
        assert [each.instruction.WhichOneof("work") for each in sent if each] == [
            "settle",
            "abandon",
        ]
        assert hosts.pending("settle/away") is None
        assert hosts.pending("settle/here") is None
        assert hosts.pending("settle/patient") is not None
        back = HostSession(host_id="back", client_ids=("away",), device="cpu", tasks=frozenset())
        hosts.attach(back)
        assert back.outbox.empty()
