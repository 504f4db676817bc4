from __future__ import annotations

import pytest

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


@pytest.mark.parametrize(
    ("encoding", "said"),
    [(transfer_pb2.ENCODING_FLOAT32, 0.5), (transfer_pb2.ENCODING_MASKED_UINT32, 0.0)],
)
def test_how_far_a_masked_training_has_come_is_not_said(
    encoding: transfer_pb2.Encoding.ValueType, said: float
) -> None:
    log = InstructionLog()
    instruction = rpc.Instruction(
        id="a", client_id="client-0", run_id="run", round=1, train=rpc.Train(encoding=encoding)
    )
    log.receive(instruction)
    ActiveInstruction(instruction=instruction, entry=log.entry("a")).progress(0.5)
    [progress] = log.progress()
    assert progress.fraction == said
