"""The command `potluck-relay`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import structlog
import typer

from potluck.common.errors import ConfigurationError
from potluck.common.net.build_version import software_version
from potluck.common.plain_text import plain
from potluck.common.process.command_line import (
    MetricsAddressOption,
    run_command_line,
    version_option,
)
from potluck.common.process.ending import Ending
from potluck.common.process.logs import LogFormat, LogLevel, configure_logging
from potluck.common.process.memory import keep_freed_memory
from potluck.relay.config import RelayConfig, example_config, load_config
from potluck.relay.relay_state import RelayState

log = structlog.get_logger()

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Relay models and updates between a Potluck coordinator and the hosts of one site.

Hosts dial the relay instead of the coordinator, with their own certificates. Each model is
fetched once, however many hosts ask for it, and updates are kept on disk until the coordinator has
them. The relay dials the coordinator; no connection comes from outside.

    potluck pki issue pki relay gate --clients client-0:9 --host gate.hospital.example

    potluck-relay config > relay.toml

    potluck-relay check --config relay.toml

    potluck-relay --config relay.toml

In the hosts' configuration, `coordinator` becomes gate.hospital.example:7443. Nothing else changes.
""",
)


@app.callback(invoke_without_command=True)
def relay(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; `potluck-relay config` prints one.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator, HOST:PORT.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="Address that hosts dial, HOST:PORT.")] = None,
    state_directory: Annotated[
        Path | None, typer.Option(help="Folder for files in transfer.")
    ] = None,
    metrics_address: MetricsAddressOption = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Format of log lines.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Minimum level of log lines.")] = None,
    version: Annotated[bool, version_option("potluck-relay")] = False,
) -> int:
    """Run the relay until it is stopped.

    Flags override POTLUCK_RELAY_… variables, which override the file.
    """
    del version
    if context.invoked_subcommand is not None:
        return 0
    if config is None:
        raise ConfigurationError(
            "no configuration file given; pass --config FILE, or run `potluck-relay config` to "
            "print an example file"
        )
    overrides = {
        "coordinator": coordinator,
        "listen": listen,
        "state_directory": state_directory,
        "metrics_address": metrics_address,
        "log_format": log_format,
        "log_level": log_level,
    }
    return _serve(load_config(config, overrides))


@app.command("config")
def print_example() -> None:
    """Print an annotated example of the configuration file."""
    typer.echo(example_config(), nl=False)


@app.command("check")
def check(
    config: Annotated[Path, typer.Option(help="The configuration file of the relay.")],
) -> None:
    """Check everything that the relay needs, and print the results. Changes nothing.

    It checks the certificate and its clients, the address to listen on, the state directory, and
    whether the coordinator admits the relay. Run it on the relay's machine, before the relay
    starts.

    potluck-relay check --config relay.toml
    """
    from potluck.relay.relay_check import check_relay

    settings = load_config(config, {})
    for line in check_relay(settings):
        typer.echo(plain(line))


def _serve(config: RelayConfig) -> int:
    """Run the relay until SIGTERM or SIGINT. Return the exit code."""
    configure_logging(config.log_format, config.log_level)
    keep_freed_memory()
    log.info(
        "starting",
        version=software_version(),
        coordinator=config.coordinator,
        state=str(config.state_directory),
    )
    log.debug("settings", **config.model_dump(mode="json"))
    with Ending() as ending:
        state = RelayState(config.state_directory)
        try:
            asyncio.run(_run(config, state, ending))
        finally:
            state.close()
        log.info("stopped", signal=ending.signal.name if ending.signal else None)
    return ending.code


async def _run(config: RelayConfig, state: RelayState, ending: Ending) -> None:
    from potluck.relay.relay_service import serving

    stop = asyncio.Event()
    ending.tell(stop.set)
    async with serving(config, state) as address:
        log.info("listening", address=address)
        await stop.wait()


def main() -> None:
    """Entry point of the console script."""
    run_command_line(app, program="potluck-relay")


if __name__ == "__main__":
    main()
