"""The command `potluck-client`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from potluck.client.config import ClientConfig, example_config, load_config
from potluck.common.errors import ConfigurationError
from potluck.common.monitoring.metrics_server import monitoring
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

if TYPE_CHECKING:
    from potluck.client.base.state_directory import StateDirectory
    from potluck.client.training.processes.device_process import WorkerProcesses

log = structlog.get_logger()

app = typer.Typer(
    add_completion=False,
    help="Connect to a Potluck coordinator, and train for the clients of this host.",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def attend(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; `potluck-client config` prints one.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator, HOST:PORT.")
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option(help="Clients of this host, e.g. client-0:5; repeatable.")
    ] = None,
    state_directory: Annotated[
        Path | None, typer.Option(help="Folder for models and updates.")
    ] = None,
    data_directory: Annotated[
        Path | None, typer.Option(help="Folder of the clients' data.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: auto, cpu, cuda:N or cuda:0,cuda:1.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads of PyTorch.")] = None,
    workers: Annotated[
        str | None, typer.Option(help="Number of trainings in parallel, or auto.")
    ] = None,
    metrics_address: MetricsAddressOption = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Format of log lines.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Minimum level of log lines.")] = None,
    version: Annotated[bool, version_option("potluck-client")] = False,
) -> int:
    """Connect to a coordinator and train until stopped.

    Flags override POTLUCK_CLIENT_… variables, which override the file.
    """
    del version
    if context.invoked_subcommand is not None:
        return 0
    if config is None:
        raise ConfigurationError(
            "no configuration file is given; pass --config FILE (`potluck-client config` prints "
            "an example)"
        )
    overrides: dict[str, Any] = {
        "coordinator": coordinator,
        "clients": tuple(clients) if clients else None,
        "state_directory": state_directory,
        "data_directory": data_directory,
        "device": device,
        "threads": threads,
        "workers": workers,
        "metrics_address": metrics_address,
        "log_format": log_format,
        "log_level": log_level,
    }
    return _serve(load_config(config, overrides))


@app.command("config")
def print_example() -> None:
    """Print an annotated example of the configuration file."""
    typer.echo(example_config(), nl=False)


@app.command("enroll")
def enroll(
    folder: Annotated[Path, typer.Argument(help="Folder for the key.", show_default=False)],
    name: Annotated[str, typer.Option(help="The host's name.", show_default=False)],
    federation: Annotated[str, typer.Option(help="The federation's name.", show_default=False)],
    clients: Annotated[
        list[str],
        typer.Option(help="Clients of the host, e.g. client-0:5; repeatable.", show_default=False),
    ],
) -> None:
    """Make a key and a certificate request; the key never leaves this machine.

    Send NAME.csr to the operator, who signs it with `potluck pki sign` and returns NAME.pem and
    authority.pem. An existing key is kept.

    potluck-client enroll pki --name lab-a --federation demo --clients client-0:5
    """
    from potluck.common.net.identity import Identity, Role, parse_claims
    from potluck.common.net.key_files import make_request

    claims = parse_claims(clients)
    identity = Identity(federation=federation, role=Role.HOST, name=name, claims=claims)
    key, request, fingerprint = make_request(folder, identity)
    typer.echo(f"key          {key}  (secret; keep it on this machine)")
    typer.echo(f"request      {request}")
    typer.echo(f"fingerprint  {fingerprint}")
    typer.echo(
        "Send the request to the operator, and the fingerprint over another channel. The "
        "operator runs:"
    )
    typer.echo(f"  potluck pki sign FOLDER {request.name} --clients {','.join(map(str, claims))}")
    typer.echo(
        f"Then put {name}.pem and authority.pem, which the operator sends back, beside the key."
    )


@app.command("disclosures")
def show_disclosures(
    config: Annotated[Path, typer.Option(help="The configuration file of the host.")],
    every: Annotated[
        bool,
        typer.Option("--all", help="Show each answer, evaluation, update and failure on a line."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the data that this host's clients sent: what, when, to whom, at what cost.

    Lists profiles, and secure sums with their numbers of clients. For each run, lists the answers
    to questions, the counts on held-out samples, and the updates without masks, with the reported
    numbers of samples and steps, seconds and losses. Can be used while the host runs; changes
    nothing.
    """
    from potluck.client.disclosure.report import Records

    settings = load_config(config, {})
    records = Records(
        settings.state_directory, settings.disclosure, independent=settings.independent_root
    )
    if as_json:
        typer.echo(records.values())
    else:
        for line in records.lines(each=every):
            typer.echo(plain(line))


@app.command("privacy")
def show_privacy(
    config: Annotated[Path, typer.Option(help="The configuration file of the host.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the privacy loss of this host's clients: spent, left, asked, sent and refused.

    The loss of trainings with noise is added up over a data epoch; the loss of profiles and sums
    of counts, over all data epochs. Needs the extra `privacy`. Can be used while the host runs;
    changes nothing.
    """
    from potluck.common.settings.plugins import integration

    settings = load_config(config, {})
    report = integration("privacy-report")(settings.state_directory, settings.disclosure)
    if as_json:
        typer.echo(report.values())
    else:
        for line in report.lines():
            typer.echo(plain(line))


@app.command("kept")
def show_kept(
    config: Annotated[Path, typer.Option(help="The configuration file of the host.")],
    client: Annotated[str | None, typer.Option(help="List only tensors of this client.")] = None,
    run: Annotated[
        str | None, typer.Option(help="List only this run; the first characters of its id suffice.")
    ] = None,
    purpose: Annotated[
        str | None, typer.Option(help="List only this kind: model, personal or correction.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="File of the run's model (`potluck model`); needs -o.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the tensors to this file.")
    ] = None,
) -> None:
    """List the tensors that clients keep on this host and never send, or write them to a file.

    With --model, the file contains the client's whole model: the run's tensors, with the client's
    own tensors in their place. Can be used while the host runs; changes nothing.

    potluck-client kept --config host.toml --client ward-3 --model model.safetensors -o ours
    """
    from potluck.client.transfer.saved_states import chosen_states, described, write_whole

    settings = load_config(config, {})
    states = chosen_states(settings.state_directory, client=client, run=run, purpose=purpose)
    if output is None:
        for state in states:
            typer.echo(plain(described(state)))
        return
    typer.echo(plain(write_whole(states, model, output)))


@app.command("selections")
def show_selections(
    config: Annotated[Path, typer.Option(help="The configuration file of the host.")],
    run: Annotated[
        str | None, typer.Option(help="List only this run; the first characters of its id suffice.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the selections that coordinators committed to, and check their hash chain.

    For runs with verifiable selection. Each line is an attempt at a round. It shows how many
    clients the coordinator selected, which are on this host, and whether this host recomputed the
    cohort. It ends with the digest of the attempt's last document; compare it with the output of
    `potluck audit selection`. Fails if a chain is broken. Can be used while the host runs; changes
    nothing.
    """
    from potluck.common.net.identity import expand_clients
    from potluck.common.settings.plugins import integration

    settings = load_config(config, {})
    clients = expand_clients(settings.clients)
    report = integration("selection-report")(settings.state_directory, clients, run)
    if as_json:
        typer.echo(report.values())
    else:
        for line in report.lines():
            typer.echo(plain(line))


def _serve(config: ClientConfig) -> int:
    """Run the host until SIGTERM or SIGINT. Return the exit code."""
    configure_logging(config.log_format, config.log_level)
    keep_freed_memory()
    log.info(
        "starting",
        version=software_version(),
        coordinator=config.coordinator,
        clients=",".join(config.clients),
        state=str(config.state_directory),
    )
    log.debug("settings", **config.model_dump(mode="json"))
    with Ending() as ending:
        from potluck.client.base.state_directory import StateDirectory
        from potluck.client.training.processes.device_process import worker_processes
        from potluck.client.training.processes.worker_count import planned_workers

        # Fork before this process has threads, which may hold locks, and before it locks the state
        # directory: workers would inherit that lock, and keep it if the host is killed.
        with worker_processes(planned_workers(config)) as processes:
            state = StateDirectory(config.state_directory)
            try:
                asyncio.run(_attend(config, state, ending, processes))
            finally:
                if processes is not None:
                    processes.close()  # first, since workers write to the state directory
                state.close()
        log.info("stopped", signal=ending.signal.name if ending.signal else None)
    return ending.code


async def _attend(
    config: ClientConfig,
    state: StateDirectory,
    ending: Ending,
    processes: WorkerProcesses | None,
) -> None:
    from potluck.client.agent import Agent, attend_until
    from potluck.client.base.host_metrics import HostMetrics

    stop = asyncio.Event()
    ending.tell(stop.set)
    metrics = HostMetrics()
    if config.metrics_tls is not None:
        config.metrics_tls.check(config.tls)
    async with monitoring(
        config.metrics_address, metrics.instruments, metrics.ready, config.metrics_tls
    ):
        device, generator = _device(config.device), random.Random()
        agent = Agent(
            config,
            state,
            device=device,
            generator=generator,
            metrics=metrics,
            processes=processes,
        )
        await attend_until(agent, stop)


def _device(device: str) -> str:
    if device == "cpu":
        return device  # nothing to look up, so torch may be imported later
    from potluck.client.training.device import resolve_device

    return ",".join(resolve_device(name) for name in device.split(","))


def main() -> None:
    """Entry point of the console script."""
    run_command_line(app, program="potluck-client")


if __name__ == "__main__":
    main()
