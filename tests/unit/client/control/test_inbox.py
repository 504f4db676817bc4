"""What arrives on a control stream and is no work."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

import pytest

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.control.handlers import Duties
from potluck.client.control.inbox import Instructions
from potluck.client.control.instruction_log import InstructionLog
from potluck.client.transfer.saved_states import KeptStates
from potluck.client.transfer.saved_updates import KeptUpdates
from potluck.rpc.v1 import coordinator_pb2 as rpc


@pytest.mark.parametrize("included", [True, False])
def test_a_settled_round_keeps_or_drops_what_was_kept_of_the_update_it_names(
    tmp_path: Path, included: bool
) -> None:
    """Whatever the instruction itself is called."""
    states = KeptStates(tmp_path)
    states.path("run/1.1/client-0").write_bytes(b"variate")
    states.pend("run", "client-0", "run/1.1/client-0")
    instructions = Instructions(
        duties=create_autospec(Duties, instance=True),
        ledger=InstructionLog(),
        kept=create_autospec(KeptUpdates, instance=True),
        states=states,
        say=lambda message: None,
        metrics=create_autospec(HostMetrics, instance=True),
    )
    instructions.receive(
        rpc.Instruction(
            id="settled",
            client_id="client-0",
            run_id="run",
            round=1,
            settle=rpc.Settle(included=included, update_id="run/1.1/client-0"),
        )
    )
    assert states.path("run/1.1/client-0").exists() is included
