from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from potluck.common.errors import ConfigurationError
from potluck.common.learning.virtual_clock import VirtualClock, pace
from potluck.common.run_file.runfile import parse_run_file


def drawn(clock: VirtualClock, clients: int, samples: int = 1000) -> list[float]:
    return [
        samples * pace(clock, seed=0, client=f"client-{k}", round_number=1) for k in range(clients)
    ]


@pytest.mark.parametrize(
    ("tail", "mean", "largest_of_ten"),
    [(1.0, 2_000, 3_929), (10.0, 11_000, 30_290), (100.0, 101_000, 293_897)],
)
def test_drawn_durations_have_the_expected_mean_and_maximum(
    tail: float, mean: float, largest_of_ten: float
) -> None:
    """N = 1000; 20,000 draws have a relative error under 1.5 %."""
    seconds = np.array(drawn(VirtualClock(enabled=True, tail_per_sample=tail), 20_000))
    assert seconds.min() >= 1000
    assert seconds.mean() == pytest.approx(mean, rel=0.03)
    assert seconds.reshape(-1, 10).max(axis=1).mean() == pytest.approx(largest_of_ten, rel=0.04)


@given(seed=st.integers(0, 2**63 - 1), client=st.text(max_size=20), number=st.integers(0, 99))
def test_virtual_clock_gives_the_same_duration_for_the_same_arguments(
    seed: int, client: str, number: int
) -> None:
    clock = VirtualClock(enabled=True)
    found = [pace(clock, seed=seed, client=client, round_number=number) for _ in range(2)]
    assert found[0] == found[1] >= 1.0


def test_simulated_duration_depends_on_the_seed_client_and_round() -> None:
    def seconds(draw: str, *, seed: int = 0, client: str = "a", number: int = 1) -> float:
        clock = VirtualClock.model_validate({"enabled": True, "draw": draw})
        return pace(clock, seed=seed, client=client, round_number=number)

    assert len({seconds("round"), seconds("round", number=2), seconds("round", seed=1)}) == 3
    assert seconds("round") != seconds("round", client="b")
    assert seconds("client") == seconds("client", number=2)
    assert seconds("client") != seconds("client", client="b")


def test_virtual_clock_is_a_table_of_the_run_file() -> None:
    text = '[task]\nname = "digits"\n[virtual_clock]\nenabled = true\ntail_per_sample = 10\n'
    clock = parse_run_file(text, source="test").virtual_clock
    assert (clock.enabled, clock.tail_per_sample, clock.deadline_seconds) == (True, 10.0, None)
    assert not parse_run_file('[task]\nname = "digits"\n', source="test").virtual_clock.enabled


def test_slower_setting_of_the_virtual_clock_slows_single_clients() -> None:
    def seconds(client: str, **slower: float) -> float:
        named = {name.replace("_", "-").replace("to", ":"): each for name, each in slower.items()}
        clock = VirtualClock(enabled=True, slower=named)
        return pace(clock, seed=0, client=client, round_number=1)

    for client in ("client-0", "client-5", "client-12"):
        assert seconds(client, client_0to12=4.0) == 4 * seconds(client)
    for client in ("client-13", "client", "other-3", "client-x"):
        assert seconds(client, client_0to12=4.0) == seconds(client)
    assert seconds("client-7", client_7=2.0) == 2 * seconds("client-7")
    assert seconds("client-70", client_7=2.0) == seconds("client-70")


def test_client_with_a_drop_out_chance_is_late_about_that_often() -> None:
    clock = VirtualClock(
        enabled=True, tail_per_sample=0.0, deadline_seconds=50.0, drop_outs={"client-0:1": 0.3}
    )

    def late(client: str, rounds: range) -> int:
        return sum(
            pace(clock, seed=3, client=client, round_number=number) > 50.0 for number in rounds
        )

    assert 250 < late("client-1", range(1, 1001)) < 350
    assert late("client-2", range(1, 1001)) == 0
    assert late("client-0", range(1)) == 0, "before round 1 no client trains"
    assert clock.drop_out_chance("client-0") == 0.3


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("seconds_per_sample", 1e9),
        ("tail_per_sample", 1e9),
        ("deadline_seconds", 1e9),
        ("slower", {"a": 1e9}),
    ],
)
def test_settings_that_could_make_durations_infinite_are_refused(key: str, most: Any) -> None:
    VirtualClock.model_validate({key: most})
    for value in (1e308, np.inf, np.nan):
        with pytest.raises(ValidationError, match=key):
            VirtualClock.model_validate({key: {"a": value} if key == "slower" else value})


def test_drop_outs_without_a_deadline_are_refused() -> None:
    text = '[task]\nname = "digits"\n[virtual_clock]\nenabled = true\ndrop_outs = {a = 0.5}\n'
    with pytest.raises(ConfigurationError, match="`drop_outs` needs `deadline_seconds`"):
        parse_run_file(text, source="test")
