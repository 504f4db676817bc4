"""The order of tests for pytest's workers: longest first, so that all workers end together.

`--dist loadfile` gives a worker a whole file. The files of `APART` take longest, and their tests
share nothing that is costly; so each of these tests may go to another worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

BOUNDARIES: Final = "tests/e2e/test_faults_at_every_boundary.py"
APART: Final = (BOUNDARIES, "tests/e2e/test_composition_matrix.py")
"""Files whose tests are given to workers one by one. Those of the second come last, after the
longer files, and keep all workers busy to the end."""

LONGEST: Final = (
    f"{BOUNDARIES}::test_coordinator_killed_at_any_write_gives_the_same_run[pretrained]",
    "tests/e2e/test_compose.py",
    f"{BOUNDARIES}::test_coordinator_killed_at_any_write_gives_the_same_run[masked]",
    "tests/e2e/test_faults_at_random.py",
    "tests/e2e/test_extras.py",
    f"{BOUNDARIES}::test_coordinator_killed_at_any_write_gives_the_same_run[asking]",
    "tests/e2e/test_faults_of_strategies.py",
    f"{BOUNDARIES}::test_coordinator_killed_at_any_write_gives_the_same_run[open]",
    "tests/e2e/test_prometheus.py",
    f"{BOUNDARIES}::test_coordinator_killed_at_any_write_gives_the_same_run[sums]",
    "tests/e2e/test_experiment_on_ray.py",
    "tests/e2e/test_faults_of_backups.py",
    f"{BOUNDARIES}::test_host_killed_at_any_write_gives_the_same_run[open]",
    f"{BOUNDARIES}::test_relay_killed_at_any_write_gives_the_same_run",
    "tests/e2e/test_deploy.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_moving_a_script.py",
    "tests/e2e/test_deploy_slurm.py",
    "tests/e2e/test_late_updates.py",
)
"""Tests that take more than about 50 seconds, longest first."""


def unit_of(nodeid: str) -> str:
    """Return the file of a test, or the test itself if it may run apart from its file."""
    file = nodeid.partition("::")[0]
    return nodeid if file in APART else file


def ordered(tests: Sequence[str]) -> list[str]:
    """Return tests in the order to run them: `LONGEST`, then the files with the most tests."""
    sizes = Counter(unit_of(test) for test in tests)

    def key(test: str) -> tuple[int, int]:
        unit = unit_of(test)
        return LONGEST.index(unit) if unit in LONGEST else len(LONGEST), -sizes[unit]

    return sorted(tests, key=key)
