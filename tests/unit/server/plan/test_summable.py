"""Settings incompatible with host sums are refused before the run; the error names both."""

import pytest

from potluck.common.errors import ConfigurationError
from potluck.common.updates.fixed_point import LARGEST_WEIGHT
from potluck.server.plan.path_rules import fixed_point_terms
from potluck.server.plan.plan import RunPlan, draw_up

START = 'task.name = "colored-digits"\nhost_sums.enabled = true\n'


def plan(*lines: str) -> RunPlan:
    return draw_up(START + "\n".join(lines), source="run.toml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("secure_aggregation = true", "secure_aggregation and host_sums"),
        ('transport.up.encoding = "int8"', "transport.up and host_sums"),
        ("transport.up.delta = true", "transport.up and host_sums"),
        (
            "virtual_clock.enabled = true\nvirtual_clock.deadline_seconds = 3",
            "virtual_clock and host_sums",
        ),
        ("virtual_clock.enabled = true\nround.over_selection = 1", "virtual_clock and host_sums"),
        ("clients_per_round = 65530\nround.over_selection = 7", "a cohort of 65537 and host_sums"),
        ('strategy.name = "median"', "strategy median and host_sums.*single updates"),
        ('strategy.name = "clipped-mean"\nstrategy.clip = 1.0', "clipped-mean and host_sums"),
        ('strategy.name = "lora-stacking"', "lora-stacking"),
        ('strategy.name = "scaffold"\nstrategy.keeper = "coordinator"', "scaffold and host_sums"),
        ('selector.name = "fedpns"', "selector fedpns and host_sums.*gram"),
        ('selector.name = "greedyfed"', "selector greedyfed and host_sums"),
        (
            'selector.name = "clustered-sampling"\nselector.unbiased = true',
            "clustered-sampling and host_sums",
        ),
        ('selector.name = "fedentropy"', "selector fedentropy and host_sums.*skips uploads"),
    ],
)
def test_settings_that_need_single_updates_are_refused_with_host_sums(
    line: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(line)


@pytest.mark.parametrize(
    "line",
    [
        'selector.name = "oort"',
        'selector.name = "everyone"',
        "round.over_selection = 2",
        "virtual_clock.enabled = true",
        'strategy.name = "scaffold"',
        'strategy.name = "fedbio"',
    ],
)
def test_settings_compatible_with_host_sums_are_accepted(line: str) -> None:
    plan(line)


def test_weight_unit_and_cap_of_host_sums_follow_from_the_run_file() -> None:
    def weights(*lines: str) -> tuple[int, int]:
        made = plan(*lines)
        terms = fixed_point_terms(made.run_file, made.strategy)
        terms.check()
        return terms.weight_unit, terms.weight_cap

    assert weights() == (1024, LARGEST_WEIGHT)
    assert weights("sample_limits.maximum = 50", "host_sums.weight_unit = 8") == (8, 50)
    assert weights('weighting = "equal"') == (1, 1)
    # SCAFFOLD averages over clients, not over samples.
    assert weights('strategy.name = "scaffold"') == (1, 1)


def test_weight_unit_that_is_not_a_power_of_two_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="power of two"):
        plan("host_sums.weight_unit = 1000")
