"""A host behind a relay that answers for the updates of another host."""

from __future__ import annotations

from potluck.relay.expected_updates import ExpectedUpdates
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


def summed(update_id: str, client: str) -> rpc.Instruction:
    """Return an instruction to train for a sum of the relay's hosts."""
    work = rpc.Train(encoding=transfer_pb2.ENCODING_SUM)
    instruction = rpc.Instruction(id=update_id, client_id=client, run_id="run", train=work)
    instruction.time_left.FromSeconds(60)
    return instruction


def test_host_behind_a_relay_can_end_only_the_wait_for_its_own_updates() -> None:
    expected = ExpectedUpdates(lambda: 0.0, lambda _: None, lambda _: None)
    expected.see(summed("run/1/1/a", "a"), "host-0")
    expected.answered("run/1/1/a", "host-1")
    expected.received([transfer_pb2.SumMember(update_id="run/1/1/a", client_id="b")])
    assert expected.awaited("run")
    expected.answered("run/1/1/a", "host-0")
    assert not expected.awaited("run")
    expected.see(summed("run/1/1/a", "a"), "host-0")
    expected.received([transfer_pb2.SumMember(update_id="run/1/1/a", client_id="a")])
    assert not expected.awaited("run")
