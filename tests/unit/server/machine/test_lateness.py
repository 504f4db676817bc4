"""Clients awaited after their round, until when, and settings incompatible with late updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.common.errors import ConfigurationError
from potluck.server.machine.lateness import LateRegister
from potluck.server.plan.plan import draw_up
from potluck.server.store.records import AttemptKey, LateState, UpdateRow

UPDATE = UpdateRow(
    blake3="0" * 64,
    size=1,
    encoding="float32",
    delta=False,
    compressed=False,
    samples=1,
    steps=1,
    seconds=25.0,
    loss=0.0,
    normalizer=None,
    reports={},
)


def register(*, simulated: bool, most: int = 2) -> LateRegister:
    return LateRegister.of([], simulated=simulated, most_rounds=most)


def close(
    late: LateRegister,
    number: int,
    *,
    joined: dict[str, float] | None = None,
    missed: dict[str, UpdateRow | None] | None = None,
    seconds: float = 10.0,
) -> dict[str, LateState]:
    rows = late.close_round(
        AttemptKey("run", number, 1),
        joined or {},
        missed or {},
        model_blake3="f" * 64,
        round_seconds=seconds,
        work={},
    )
    return {row.client_id: row.state for row in rows}


def test_late_update_on_a_virtual_clock_joins_at_its_simulated_arrival() -> None:
    """It takes 25 s and its round ends after 10 s: 15 s are left, and the next round takes 10."""
    late = register(simulated=True, most=3)
    assert close(late, 1, missed={"a": UPDATE}) == {"a": LateState.AWAITED}
    assert late.joining(14.9) == []
    assert [row.client_id for row in late.joining(15.0)] == ["a"]
    close(late, 2)
    assert late.joining(4.9) == []
    assert [row.client_id for row in late.joining(5.0)] == ["a"]
    assert close(late, 3, joined={"a": 0.4}) == {"a": LateState.JOINED}
    assert late.awaited == []


def test_late_update_on_a_real_clock_joins_after_its_arrival() -> None:
    late = register(simulated=False)
    close(late, 1, missed={"b": None, "a": UPDATE})
    assert [row.client_id for row in late.awaited] == ["a", "b"]
    assert [row.client_id for row in late.joining(0.0)] == ["a"]
    late.receive("b", UPDATE)
    late.receive("stranger", UPDATE)
    assert [row.client_id for row in late.joining(0.0)] == ["a", "b"]
    late.lose("a")
    assert [row.client_id for row in late.joining(0.0)] == ["b"]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_late_client_is_dropped_after_the_maximum_number_of_rounds(most: int) -> None:
    late = register(simulated=False, most=most)
    close(late, 1, missed={"a": None})
    for number in range(2, most + 1):
        assert close(late, number) == {"a": LateState.AWAITED}
    assert close(late, most + 1) == {"a": LateState.DROPPED}
    assert late.find("a") is None


def test_failure_of_a_late_client_is_stored_with_the_next_round() -> None:
    late = register(simulated=False)
    close(late, 1, missed={"a": None, "b": None})
    assert late.fail("a", "no data") is not None
    assert late.fail("a", "again") is None
    assert close(late, 2) == {"a": LateState.DROPPED, "b": LateState.AWAITED}
    assert close(late, 3) == {"b": LateState.DROPPED}


def test_late_updates_are_awaited_again_after_a_restart() -> None:
    late = register(simulated=True, most=3)
    rows = late.close_round(
        AttemptKey("run", 1, 1),
        {},
        {"a": UPDATE},
        model_blake3="f" * 64,
        round_seconds=10.0,
        work={},
    )
    over = [replace(row, client_id="b", state=LateState.JOINED) for row in rows]
    again = LateRegister.of([*rows, *over], simulated=True, most_rounds=3)
    assert again.awaited == late.awaited


RUN = """
clients_per_round = 2
[task]
name = "digits"
[round]
late_updates = {rounds = 3}
"""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('[strategy]\nname = "scaffold"', "strategy scaffold: the tensors that its clients send"),
        ('[strategy]\nname = "median"', "strategy median: it does not weight"),
        ('[strategy]\nname = "feddf"', "strategy feddf"),
        ('[strategy]\nname = "rhfl-logits"', "strategy rhfl-logits: it does not weight"),
        ('[selector]\nname = "fedentropy"', "selector fedentropy: it chooses among"),
        ('[selector]\nname = "divfl"\nweighted = true', "selector divfl: its weights"),
        ("[host_sums]\nenabled = true", "host_sums"),
    ],
)
def test_settings_incompatible_with_late_updates_are_refused_with_the_reason(
    more: str, why: str
) -> None:
    with pytest.raises(ConfigurationError, match="late_updates is not compatible with") as refusal:
        draw_up(RUN + more, source="run.toml")
    assert why in refusal.value.message


def test_late_updates_are_refused_with_secure_aggregation() -> None:
    with pytest.raises(ConfigurationError, match="is not compatible with secure aggregation"):
        draw_up(
            "secure_aggregation = true\nexpected_clients = 9\n" + RUN.replace("= 2", "= 9"),
            source="r",
        )


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fednova"])
def test_late_updates_are_accepted_with_strategies_that_weight_by_samples(strategy: str) -> None:
    plan = draw_up(RUN + f'[strategy]\nname = "{strategy}"', source="run.toml")
    assert plan.run_file.kept_models.keep_last == 4
