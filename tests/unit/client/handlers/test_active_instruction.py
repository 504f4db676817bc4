from __future__ import annotations

import pytest

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


@pytest.mark.parametrize(
    ("encoding", "weighting", "said"),
    [
        (transfer_pb2.ENCODING_FLOAT32, rpc.WEIGHTING_UNSPECIFIED, 0.5),
        (transfer_pb2.ENCODING_FLOAT32, rpc.WEIGHTING_EXACT, 0.5),
        (transfer_pb2.ENCODING_FLOAT32, rpc.WEIGHTING_BUCKETED, 0.0),
        (transfer_pb2.ENCODING_FLOAT32, rpc.WEIGHTING_EQUAL, 0.0),
        (transfer_pb2.ENCODING_MASKED_UINT32, rpc.WEIGHTING_EXACT, 0.0),
    ],
)
def test_training_progress_is_reported_only_with_exact_sample_counts(
    encoding: transfer_pb2.Encoding.ValueType, weighting: rpc.Weighting.ValueType, said: float
) -> None:
    log = InstructionLog()
    train = rpc.Train(encoding=encoding, weighting=weighting)
    instruction = rpc.Instruction(id="a", client_id="client-0", run_id="run", round=1, train=train)
    log.receive(instruction)
    ActiveInstruction(instruction=instruction, entry=log.entry("a")).progress(0.5)
    [progress] = log.progress()
    assert progress.fraction == said
