"""Requirements of verifiable selection on a run, checked before the run starts."""

from __future__ import annotations

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import RunFile
from potluck.verifiable.draws import RECOMPUTED


def check_run(run_file: RunFile) -> None:
    """Raise ConfigurationError if a run's settings don't allow the commitments that it asks for."""
    if run_file.selection.verifiable and run_file.round.late_updates.rounds:
        raise ConfigurationError(
            "selection.verifiable: hosts train by the last selection only, but round.late_updates "
            "continues trainings of earlier ones; remove one of both settings"
        )
    if not run_file.selection.hosts_verify:
        return
    selector = run_file.selector.name
    if selector not in RECOMPUTED:
        raise ConfigurationError(
            f"selection.hosts_verify: hosts can't recompute selector '{selector}'; choose "
            f"{' or '.join(RECOMPUTED)}, or remove hosts_verify and audit the run with "
            "`potluck audit-selection`",
            selector=selector,
        )
    if run_file.selector_limits.at_most_per:
        raise ConfigurationError(
            "selection.hosts_verify: hosts can't recompute selections under "
            "selector_limits.at_most_per, because hosts don't receive the tags of other hosts; "
            "remove one of both settings"
        )
