"""The one notice about evaluations that are missing in a round."""

from __future__ import annotations

from potluck.common.learning.measures import MeasuredModel
from potluck.common.learning.spread import Coverage, coverages
from potluck.server.hosts.held_out_evaluation import (
    MissingEvaluation,
    failed,
    malformed,
    notice,
    silent,
)

ROUND = MeasuredModel.ROUND


def covered(clients: int, asked: int, least_share: float = 1.0) -> dict[str, Coverage]:
    return coverages(
        [{"near": 10}] * clients, ["near"], missing=asked - clients, least_share=least_share
    )


def test_notice_groups_clients_by_reason_with_the_largest_group_first() -> None:
    missing = [
        silent("a", present=False, seconds=9),
        failed("b", "TRAINING_FAILED", "client 'b' has no scanner"),
        failed("c", "TRAINING_FAILED", "client 'c' has no scanner"),
        silent("d", present=True, seconds=9),
    ]
    assert notice(3, ROUND, missing, covered(2, 6)) == (
        "round 3: the model metrics are over 2 of 6 clients (20 samples): "
        "2 failed with TRAINING_FAILED (b, c; for example: client 'b' has no scanner); "
        "1 disconnected (a); 1 did not answer within 9 s (d); "
        "partial: they count neither for the best model nor for [stop]"
    )


def test_notice_names_the_evaluated_model_if_it_is_not_the_round_model() -> None:
    line = notice(1, MeasuredModel.TUNED, [malformed("a", "no")], covered(3, 4, 0.5))
    assert line == (
        "round 1: the tuned metrics are over 3 of 4 clients (30 samples): "
        "1 sent invalid numbers (a; no)"
    )


def test_notice_about_a_thousand_clients_with_different_reasons_is_one_short_line() -> None:
    missing = [
        failed(f"client-{number}", f"REASON_{number}", f"{number} " + "long\n" * 1000)
        for number in range(1000)
    ]
    missing += [MissingEvaluation(client="x", why=f"why {number}") for number in range(9)]
    line = notice(1, ROUND, missing, covered(0, len(missing)))
    assert line.startswith(
        "round 1: the model metrics are missing: none of 1009 clients measured them: "
        "1000 failed with OTHER (client-0, client-1, client-2, client-3, client-4 and 995 more; "
        "for example: 0 long long "
    )
    assert "; 7 for other reasons; partial" in line
    assert len(line) < 600
    assert "\n" not in line


def test_notice_names_a_disclosure_refusal() -> None:
    line = notice(1, ROUND, [failed("a", "DISCLOSURE_REFUSED", "not mine")], covered(1, 2))
    assert "1 refused with DISCLOSURE_REFUSED (a; not mine)" in line
