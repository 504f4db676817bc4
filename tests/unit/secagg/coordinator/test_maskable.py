"""Reasons to refuse a run with masked updates, checked before any training."""

from __future__ import annotations

import pytest

from potluck.common.errors import ConfigurationError
from potluck.secagg.coordinator.maskable import weight_bound
from potluck.server.plan.plan import draw_up

TASK = '[task]\nname = "digits"\nclients = 10\n'
MASKED = "secure_aggregation = true\n"


@pytest.mark.parametrize(
    ("top", "tables", "message"),
    [
        ("", '[strategy]\nname = "median"\n', "median and secure aggregation are not compatible"),
        ("", '[strategy]\nname = "trimmed-mean"\n', "trimmed-mean reads single updates"),
        ("", '[strategy]\nname = "clipped-mean"\n', "clipped-mean reads single updates"),
        ("", '[strategy]\nname = "fedatt"\n', "fedatt reads single updates"),
        (
            "",
            '[strategy]\nname = "scaffold"\nkeeper = "coordinator"\n',
            "scaffold reads single updates",
        ),
        (
            "",
            '[strategy]\nname = "scaffold"\n',
            "scaffold is not compatible with secure agg",
        ),
        ("", "[model]\nkeep = ['3.*']\n", r"`keep` of \[model\] is not compatible with secure"),
        ("", '[selector]\nname = "oort"\n', "oort needs numbers that each client reports"),
        (
            "",
            '[selector]\nname = "clustered-sampling"\nunbiased = true\n',
            "clustered-sampling sets the weight of each update",
        ),
        ("", '[selector]\nname = "delta"\n', "delta needs each update's gram"),
        ("", '[selector]\nname = "ocs"\n', "ocs sets the weight of each update"),
        (
            "",
            '[selector]\nname = "clustered-sampling"\nby = "updates"\nweights = "samples"\n',
            "clustered-sampling needs each update's sketch",
        ),
        (
            "",
            '[selector]\nname = "pyramidfl"\n',
            "pyramidfl needs numbers that each client",
        ),
        ("", '[selector]\nname = "fedpns"\n', "fedpns needs each update's gram"),
        ("", '[transport.up]\nencoding = "int8"\n', "transport.up and secure aggregation"),
        ("", '[transport.up]\nencoding = "bfloat16"\n', "transport.up and secure aggregation"),
        ("", "[transport.up]\ndelta = true\n", "transport.up and secure aggregation"),
        ("", "[transport.up]\ncompress = true\n", "masks don't compress"),
        ("", "[virtual_clock]\nenabled = true\n", "the simulated seconds .* reveal its number"),
        ("clients_per_round = 4\n", "", "a round of 4 clients can't be on 5 hosts"),
        (
            "clients_per_round = 9\n",
            "[masking]\nhosts = 10\n",
            "a round of 9 clients can't be on 10 hosts",
        ),
        (
            "clients_per_round = 129\n",
            "",
            "too large for secure aggregation, which supports up to 128",
        ),
        ("clients_per_round = 6\n", "[round]\nover_selection = 6\n", "needs 8 of 12 clients"),
        ("", '[selector]\nname = "everyone"\n', "everyone has all clients train in a round"),
        ("", "[masking]\ncolluding_hosts = 9\n", "lower round.over_selection or masking.colluding"),
        (
            "",
            "[round]\ndeadline_seconds = 90000\n",
            "lower round.deadline_seconds to 86220 or less",
        ),
        ("", "[masking]\nhosts = 2\n", "greater than or equal to 3"),
        ("", "[masking]\nclip = 0\n", "greater than 0"),
        ("", "[masking]\nbits = 16\n", "32.*64"),
    ],
)
def test_settings_incompatible_with_masked_updates_are_refused_with_the_reason(
    top: str, tables: str, message: str
) -> None:
    if not message.startswith(("greater", "32")):
        draw_up(top + TASK + tables, source="run file")  # valid without masks
    with pytest.raises(ConfigurationError, match=message):
        draw_up(MASKED + top + TASK + tables, source="run file")


@pytest.mark.parametrize(
    "strategy",
    ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova"],
)
def test_strategies_that_average_are_accepted_with_masked_updates(strategy: str) -> None:
    plan = draw_up(f'{MASKED}{TASK}[strategy]\nname = "{strategy}"\n', source="run file")
    assert plan.rules.policy.needed(9) == 6, "below the quorum of a sum there is none"


def test_weight_bound_of_equally_weighted_clients_is_1() -> None:
    bounds = []
    for text in ("", 'weighting = "equal"\n'):
        plan = draw_up(MASKED + text + TASK, source="run file")
        bounds.append(weight_bound(plan.run_file, plan.strategy))
    assert bounds == [10_000, 1]


def test_masked_round_has_at_most_as_many_attempts_as_a_sum() -> None:
    text = "[round]\nattempts = 7\n"
    assert draw_up(TASK + text, source="run file").rules.policy.attempts == 7
    assert draw_up(MASKED + TASK + text, source="run file").rules.policy.attempts == 3


def test_hics_fl_with_reported_entropies_is_accepted_with_masked_updates() -> None:
    table = '[selector]\nname = "hics-fl"\n'
    with pytest.raises(ConfigurationError, match="hics-fl needs each update's output-move"):
        draw_up(MASKED + TASK + table, source="run file")
    draw_up(f'{MASKED}{TASK}{table}entropies = "told"\n', source="run file")
