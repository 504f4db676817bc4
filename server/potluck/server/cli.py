"""`potluck-server`: the coordinator process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from potluck.common.errors import PotluckError
from potluck.common.net.build_version import software_version
from potluck.common.net.listening import check_not_in_use
from potluck.common.process.command_line import (
    FAILED,
    MetricsAddressOption,
    run_command_line,
    version_option,
)
from potluck.common.process.ending import GRACE_SECONDS, Ending
from potluck.common.process.logs import LogFormat, LogLevel, configure_logging
from potluck.common.process.memory import keep_freed_memory
from potluck.common.settings.configuration import load
from potluck.server.config import CoordinatorConfig, example_config

log = structlog.get_logger()

ENVIRONMENT_PREFIX = "POTLUCK_SERVER"

ConfigFile = Annotated[
    Path, typer.Option("--config", help="The coordinator's configuration file (TOML).")
]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="The coordinator's configuration file (TOML).")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to listen on, HOST:PORT, instead of the file's.")
    ] = None,
    metrics_address: MetricsAddressOption = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Format of log lines, instead of the file's.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write address and process id here once hosts can connect."),
    ] = None,
    version: Annotated[bool, version_option("potluck-server")] = False,
) -> int:
    """Run the coordinator of a federation until SIGTERM or Ctrl-C.

    Hosts and operators connect over mutually authenticated TLS. Runs that a stop or a crash
    interrupted are resumed at the next start.

    ```console
    potluck-server --config coordinator.toml
    ```
    """
    del version
    if context.invoked_subcommand is not None:
        return 0
    if config is None:
        raise typer.BadParameter(
            "--config is missing; `potluck-server config` prints an example of the file"
        )
    settings = _settings(
        config, listen=listen, metrics_address=metrics_address, log_format=log_format
    )
    configure_logging(settings.log_format, LogLevel(settings.log_level))
    keep_freed_memory()
    log.info("starting", version=software_version(), state=str(settings.state_directory))
    log.debug("settings", **settings_for_the_log(settings))
    with Ending() as ending:
        asyncio.run(run(settings, ending, ready_file))
    return ending.code


@app.command("config")
def print_config() -> None:
    """Print an annotated example of the configuration file."""
    typer.echo(example_config(), nl=False)


@app.command("rebuild")
def rebuild_database(config: ConfigFile) -> None:
    """Rebuild rounds that the database has lost.

    The records in the state directory are used; the rounds' models must be on disk. The coordinator
    must be stopped.

    ```console
    potluck-server rebuild --config coordinator.toml
    ```
    """
    from potluck.server.service.rebuild import rebuild  # imports torch, which takes seconds

    lines = list(rebuild(_settings(config)))
    for line in lines or ["nothing is missing"]:
        typer.echo(line)


@app.command("backup")
def back_up_state(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the backup.")],
    config: ConfigFile,
) -> None:
    """Back up the coordinator, even while it runs.

    The backup has a snapshot of the database, the model files that it references, and the other
    files of the state directory. PostgreSQL is dumped with pg_dump, which must be installed.

    ```console
    potluck-server backup backup-1 --config coordinator.toml
    ```
    """
    from potluck.server.service.backup import back_up  # imports torch, which takes seconds

    for line in back_up(_settings(config), folder):
        typer.echo(line)


@app.command("restore")
def restore_state(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the backup to restore.")],
    config: ConfigFile,
) -> None:
    """Restore a backup while the coordinator is stopped.

    All files are verified first. A restore that was killed can be repeated.

    ```console
    potluck-server restore backup-1 --config coordinator.toml
    ```
    """
    from potluck.server.service.restore import restore  # imports torch, which takes seconds

    settings = _settings(config)
    for line in restore(settings, folder):
        typer.echo(line)
    if settings.revoked is None:
        typer.echo(
            "if certificates were revoked after this backup, set `revoked` in the configuration "
            "to the newest revoked.pem before you start the coordinator"
        )


def _settings(config: Path, **overrides: Any) -> CoordinatorConfig:
    """Return the configuration in a file, with some settings overridden. Raises
    ConfigurationError."""
    return load(
        CoordinatorConfig, config, environment_prefix=ENVIRONMENT_PREFIX, overrides=overrides
    )


async def run(settings: CoordinatorConfig, ending: Ending, ready_file: Path | None = None) -> None:
    """Serve until the process gets a signal to stop. Raises PotluckError if the coordinator can't
    start or continue."""
    check_not_in_use(settings.listen)
    from potluck.server.service.serving import serving  # it imports torch, which takes seconds

    stop = asyncio.Event()
    errors: list[PotluckError] = []

    def broken(error: PotluckError) -> None:
        log.error("coordinator can't continue", reason=error.message)
        ending.leave_after(GRACE_SECONDS, FAILED)
        errors.append(error)
        stop.set()

    ending.tell(stop.set)
    async with serving(settings, broken) as address:
        log.info("listening", address=address)
        if ready_file is not None:
            _announce(ready_file, address)
        await stop.wait()
        log.info("stopping")
    if errors:
        raise errors[0]
    log.info("stopped")


def settings_for_the_log(settings: CoordinatorConfig) -> dict[str, Any]:
    """Return the settings as plain values, without sinks' options and the database's password.

    Raises ConfigurationError if the database's URL is invalid.
    """
    from potluck.server.store.sql.database import parse_url, shown_url  # slow: imports SQLAlchemy

    shown = settings.model_dump(mode="json", exclude={"tls", "sinks"})
    return shown | {"database": shown_url(parse_url(settings.database_url()))}


def _announce(path: Path, address: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    temporary.replace(path)


def main() -> None:
    """Run the program; entry point of `potluck-server`."""
    run_command_line(app, program="potluck-server")


if __name__ == "__main__":
    main()
