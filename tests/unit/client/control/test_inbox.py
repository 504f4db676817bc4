"""Messages on a control stream that don't ask for work."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

import pytest

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.worker import Worker
from potluck.client.control.inbox import Instructions
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.outgoing_log import OutgoingLog
from potluck.client.disclosure.releases import Discloser
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.host_sums import HostSums
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.client.handlers.repeated_failures import RepeatedFailures
from potluck.client.handlers.training_groups import TrainingGroups
from potluck.client.private_training import PrivacyGuard
from potluck.client.transfer.download import Downloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.saved_states import KeptStates, OwnFiles
from potluck.client.transfer.saved_updates import KeptUpdates
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.host.sum_sessions import SumSessions


@pytest.mark.parametrize("included", [True, False])
def test_settled_round_keeps_the_client_state_only_of_an_included_update(
    tmp_path: Path, included: bool
) -> None:
    """The id of the message that reports the round's end does not matter."""
    states = KeptStates(tmp_path)
    states.path("run/1.1/client-0", "correction").write_bytes(b"variate")
    states.pend("run", "client-0", "run/1.1/client-0")
    context = HandlerContext(
        clients=frozenset(),
        policy=DisclosurePolicy(),
        log=InstructionLog(),
        link=create_autospec(Link, instance=True),
        downloads=create_autospec(Downloads, instance=True),
        updates=create_autospec(KeptUpdates, instance=True),
        host_sums=create_autospec(HostSums, instance=True),
        states=states,
        own_files=create_autospec(OwnFiles, instance=True),
        worker=create_autospec(Worker, instance=True),
        trainers=create_autospec(Worker, instance=True),
        groups=create_autospec(TrainingGroups, instance=True),
        discloser=create_autospec(Discloser, instance=True),
        outgoing=create_autospec(OutgoingLog, instance=True),
        sums=create_autospec(SumSessions, instance=True),
        metrics=create_autospec(HostMetrics, instance=True),
        failures=RepeatedFailures(),
        guard=create_autospec(PrivacyGuard, instance=True),
    )
    instructions = Instructions(context, say=lambda message: None)
    instructions.receive(
        rpc.Instruction(
            id="settled",
            client_id="client-0",
            run_id="run",
            round=1,
            settle=rpc.Settle(included=included, update_id="run/1.1/client-0"),
        )
    )
    assert states.path("run/1.1/client-0", "correction").exists() is included
