"""The conditions that an update path sets for the plan of a run.

A path is how the updates of a run become a model: as single updates, with noise in their sum, as
sums from hosts, or masked. It is a plug-in of the group `potluck.update_paths`. The module
`updates.update_path` has the methods used while a run is under way; a plan uses only the methods
below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins
from potluck.common.settings.plugins import Plugin
from potluck.common.updates.fixed_point import LARGEST_WEIGHT, FixedPointTerms
from potluck.server.strategy import Strategy, Summation

OPEN, SUMMED, MASKED, NOISED = "open", "summed", "masked", "noised"

COLLECTOR = "coordinator"
"""Name of the plug-in that collects secure sums of label counts, in the group
`potluck.secure_sums`."""


class PathRules(Plugin):
    """Conditions that an update path (open, noised, summed or masked) sets for a run. This base
    class sets none."""

    group = plugins.UPDATE_PATHS

    resumes: ClassVar[bool] = True
    """False if a coordinator that restarts must give up the current attempt."""
    members_only: ClassVar[bool] = False
    """True if only clients with a valid member record can be selected."""

    @classmethod
    def check_sizes(cls, run_file: RunFile) -> None:
        """Raise ConfigurationError if the path does not allow the run's cohort size or number of
        rounds."""

    @classmethod
    def policy(cls, run_file: RunFile) -> RoundPolicy:
        """Return the run's settings of rounds, changed as the path requires."""
        return run_file.round

    @classmethod
    def fewest_hosts(cls, run_file: RunFile) -> int:  # noqa: ARG003  # other paths read it
        """Return the minimum number of hosts that a round's clients must be on; 0 for no
        minimum."""
        return 0

    @classmethod
    def suffices(cls, hosts: Sequence[str], run_file: RunFile) -> bool:  # noqa: ARG003  # likewise
        """Return True if a cohort can result in a model, provided that none of its clients is lost.

        hosts: host of each client; empty if unknown.
        """
        return True


def path_name(run_file: RunFile) -> str:
    """Return the name of a run's update path: open, noised, summed or masked."""
    if run_file.secure_aggregation:
        return MASKED
    if run_file.privacy is not None and run_file.privacy.at_coordinator:
        return NOISED
    return SUMMED if run_file.host_sums.enabled else OPEN


def path_of(run_file: RunFile) -> type[PathRules]:
    """Return the class of a run's update path.

    Raises ConfigurationError if the run requests secure sums and this coordinator can't compute
    them.
    """
    name, disclosure = path_name(run_file), run_file.profiles.disclosure
    if disclosure in ("cells", UNSAFE_STEPWISE) and not collects_sums():
        raise ConfigurationError(
            f'profiles.disclosure = "{disclosure}" needs the package potluck.secagg, which '
            "this coordinator does not have; install all packages of Potluck, or choose another "
            "disclosure"
        )
    if name == MASKED and not plugins.is_present(plugins.UPDATE_PATHS, name):
        raise ConfigurationError(
            "secure_aggregation = true needs the package potluck.secagg, which this coordinator "
            "does not have; install all packages of Potluck, or remove secure_aggregation from "
            "the run file"
        )
    if name == NOISED and not plugins.is_present(plugins.UPDATE_PATHS, name):
        raise ConfigurationError(
            'privacy.noise = "coordinator" needs the package potluck.privacy, which this '
            "coordinator does not have; install all packages of Potluck, or remove [privacy]"
        )
    found: type[PathRules] = plugins.find(plugins.UPDATE_PATHS, name)
    return found


def collects_sums() -> bool:
    """Return True if this coordinator can collect secure sums of label counts."""
    return plugins.is_present(plugins.SECURE_SUMS, COLLECTOR)


def fixed_point_terms(run_file: RunFile, strategy: Strategy) -> FixedPointTerms:
    """Return how clients convert updates to integers and weight them, which is the same in all
    rounds."""
    alike = run_file.weighting is Weighting.EQUAL or strategy.summation is Summation.EQUAL
    cap = 1 if alike else run_file.sample_limits.maximum or LARGEST_WEIGHT
    sums = run_file.host_sums
    return FixedPointTerms(
        quantum_bits=sums.quantum_bits,
        weight_unit=1 if alike else sums.weight_unit,
        weight_cap=min(cap, LARGEST_WEIGHT),
    )
