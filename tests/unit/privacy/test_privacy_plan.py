"""The printed plan of a run whose noise hides whole clients."""

from __future__ import annotations

import pytest

from potluck.common.run_file.runfile import parse_run_file
from potluck.privacy.privacy_plan import plan_lines

RUN = """
rounds = 30
clients_per_round = 2
task.name = "digits"
[privacy]
unit = "client"
noise = "coordinator"
"""


def planned(privacy: str) -> list[list[str]]:
    run_file = parse_run_file(RUN + privacy, source="run.toml")
    lines = plan_lines(
        run_file, samples=(100,), trainings=None, targets=(1.0, 8.0), source="run.toml"
    )
    return [line.split() for line in lines]


def test_privacy_plan_of_client_noise_lists_epsilon_by_trainings() -> None:
    said, heads, row, _, _, _, targets, noises = planned("noise_multiplier = 4.0")
    assert "as the coordinator computes it" in " ".join(said)
    assert heads == ["unit", "noise", "3", "8", "15", "30", "fixed"]
    assert row[0] == "client"
    noise, *losses, fixed = map(float, row[1:])
    assert noise == 4.0
    assert losses == sorted(losses)
    assert fixed == pytest.approx(6.325715, rel=0.01)
    assert fixed < losses[-1]
    assert targets == ["ε", "=", "1", "ε", "=", "8"]
    assert float(noises[0]) > float(noises[1])


def test_computed_noise_reaches_its_epsilon_after_the_planned_trainings() -> None:
    _, heads, row, *_ = planned("epsilon = 3.0\ntrainings = 10")
    assert heads[-2] == "10"
    assert float(row[-2]) == pytest.approx(3.0, rel=0.01)
