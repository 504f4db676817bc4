"""Checks before a run starts that its selections can be verified, if its run file requests that."""

from __future__ import annotations

from typing import Final

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins

RULES: Final = "selection-rules"
"""Entry-point name of the function that checks a run file, in the group `potluck.integrations`."""


def check_verifiable(run_file: RunFile, *, source: str) -> None:
    """Raise ConfigurationError if the run's selections can't be verified as the run file
    requests."""
    if not run_file.selection.verifiable:
        return
    if not plugins.is_present(plugins.INTEGRATIONS, RULES):
        raise ConfigurationError(
            f"{source}: selection.verifiable = true needs the package potluck.verifiable, which "
            "this coordinator does not have; install all packages of Potluck, or remove "
            "[selection]"
        )
    try:
        plugins.integration(RULES)(run_file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error.message}", **error.metadata) from None
