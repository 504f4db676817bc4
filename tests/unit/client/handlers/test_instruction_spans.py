"""A host's spans of an instruction; none if they would reveal a secret."""

from __future__ import annotations

import pytest
from support.collector import running_collector

from potluck.client.handlers.active_instruction import spans_of
from potluck.client.handlers.instruction_log import InstructionStage
from potluck.common.tracing import TracingSettings, open_tracer
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1.transfer_pb2 import ENCODING_MASKED_UINT32 as MASKED

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"
STAGES = ["compute", "download"]


@pytest.mark.parametrize(
    ("work", "shown"),
    [
        ({"train": rpc.Train()}, [*STAGES, "train"]),
        ({"train": rpc.Train(weighting=rpc.WEIGHTING_EXACT)}, [*STAGES, "train"]),
        ({"train": rpc.Train(weighting=rpc.WEIGHTING_BUCKETED)}, []),
        ({"train": rpc.Train(weighting=rpc.WEIGHTING_EQUAL)}, []),
        ({"train": rpc.Train(encoding=MASKED)}, []),
        ({"evaluate": rpc.Evaluate()}, []),
    ],
)
def test_training_span_is_sent_only_with_exact_sample_counts(
    work: dict[str, rpc.Train | rpc.Evaluate], shown: list[str]
) -> None:
    with running_collector() as collector:
        settings = TracingSettings(endpoint=f"http://127.0.0.1:{collector.port}")
        tracer = open_tracer(settings, "potluck-host")
        instruction = rpc.Instruction(run_id="ab12", round=3, client_id="a", trace_parent=PARENT)
        for name, value in work.items():
            getattr(instruction, name).CopyFrom(value)
        spans = spans_of(tracer, instruction)
        assert tracer is not None
        if spans is not None:
            for stage in (InstructionStage.DOWNLOADING, InstructionStage.COMPUTING):
                spans.enter(stage)
            spans.end("")
        tracer.close()
    assert sorted(each.name for each in collector.spans) == shown


def test_instruction_has_no_spans_without_a_tracer() -> None:
    assert spans_of(None, rpc.Instruction(trace_parent=PARENT)) is None
