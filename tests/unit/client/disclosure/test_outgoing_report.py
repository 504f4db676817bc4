"""The report of sent data in plain words: a line for each entry, or one for a whole run."""

from __future__ import annotations

from typing import Any

from potluck.client.disclosure.outgoing_report import line, summary


def entry(kind: str, round_number: int, **what: Any) -> dict[str, Any]:
    return {
        "at": f"2026-01-02T03:04:{round_number:02}.000+00:00",
        "kind": kind,
        "federation": "f",
        "coordinator": "here",
        "run": "r",
        "round": round_number,
        **what,
    }


ANSWERS = [
    entry("answer", number, question="loss", model=f"m{number}", numbers={"loss": 1.0 / number})
    for number in (1, 2, 4)
]
UPDATE = entry(
    "update",
    2,
    model="base",
    blake3="digest",
    bytes=100,
    weighting="exact",
    report={
        "samples": 61, "steps": 4, "seconds": 0.25, "loss": 2.5, "normalizer": None,
        "reports": {"utility": 9.0},
    },
)  # fmt: skip
HELD_OUT = entry(
    "held-out counts", 3, model="m", samples=5, correct=3, loss_sum=1.5, by_class=[2, 3]
)
FAILURE = entry("failure", 1, reason="TRAINING_FAILED", message="no samples")


def test_outgoing_summary_has_one_line_per_kind_of_message_of_a_run() -> None:
    assert list(summary([ANSWERS[0], UPDATE, *ANSWERS[1:], FAILURE])) == [
        (
            "2026-01-02 03:04:04 UTC 3 times the answer to 'loss', with 3 models, "
            "for rounds 1 to 4 "
            "of run r of federation f: loss 0.25 to 1"
        ),
        (
            "2026-01-02 03:04:02 UTC 1 times an update without masks (number of samples: exact), "
            "with 1 model, 100 bytes in all, for round 2 of run r of federation f: samples 61; "
            "steps 4; seconds 0.25; loss 2.5; utility 9"
        ),
        (
            "2026-01-02 03:04:01 UTC 1 times a failure (TRAINING_FAILED), for "
            "round 1 of run r "
            "of federation f"
        ),
    ]


def test_outgoing_report_has_one_line_per_entry() -> None:
    assert [line(each) for each in (ANSWERS[1], UPDATE, HELD_OUT, FAILURE)] == [
        (
            "2026-01-02 03:04:02 UTC the answer to 'loss', with model m2, for round 2 of run r of "
            "federation f: loss 0.5"
        ),
        (
            "2026-01-02 03:04:02 UTC an update without masks (number of samples: "
            "exact), 100 bytes, BLAKE3 "
            "digest, of model base, for round 2 of run r of federation f: samples 61; steps 4; "
            "seconds 0.25; loss 2.5; utility 9"
        ),
        (
            "2026-01-02 03:04:03 UTC counts on held-out samples, with model m, for "
            "round 3 of run r "
            "of federation f: samples 5; correct 3; loss_sum 1.5; by_class [2, 3]"
        ),
        (
            "2026-01-02 03:04:01 UTC a failure (TRAINING_FAILED), “no "
            "samples”, for round 1 of "
            "run r of federation f"
        ),
    ]


def test_outgoing_summary_separates_runs_and_questions() -> None:
    other = {**ANSWERS[0], "run": "s"}
    context = {**ANSWERS[0], "question": "context"}
    assert len(list(summary([ANSWERS[0], other, context]))) == 3


def test_outgoing_report_names_the_evaluated_model() -> None:
    own = {**HELD_OUT, "subject": "its own model"}
    assert "counts on held-out samples with its own model, with model m" in line(own)
    assert len(list(summary([HELD_OUT, own, own]))) == 2
