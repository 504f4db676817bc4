"""Commands that connect to a coordinator: the options they share, and their event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from potluck.common.errors import NotFoundError
from potluck.deploy.operator.operator_client import OperatorClient, connect
from potluck.deploy.operator.operator_config import (
    OperatorConfig,
    OperatorFlags,
    load_operator_config,
)

# Options of several commands ----------------------------------------------------------------------

RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id, a unique beginning of it, or a name that no other run has.",
        show_default=False,
    ),
]
RunOrNewest = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run's id, a unique beginning of it, or a name that no other run has. Default: "
        "the newest run.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
BestModel = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Use the best model, by stop.measure or retention.keep_best.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-o",
        metavar="KEY=VALUE",
        help="Replace a value of the run file, for example -o rounds=5 -o training.epochs=2.",
        show_default=False,
    ),
]

# Connection ---------------------------------------------------------------------------------------

P = ParamSpec("P")

_PANEL = "Connection"


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=_PANEL)


_OPTIONS: dict[str, Any] = {
    "coordinator": Annotated[
        str | None, _option("--coordinator", "HOST:PORT", "Address of the coordinator.")
    ],
    "certificate": Annotated[
        Path | None, _option("--certificate", "FILE", "The operator's certificate.")
    ],
    "key": Annotated[Path | None, _option("--key", "FILE", "Its private key.")],
    "authority": Annotated[
        Path | None, _option("--authority", "FILE", "The federation's authority.pem.")
    ],
    "server_name": Annotated[
        str | None,
        _option("--server-name", "NAME", "Name in the coordinator's certificate, if not HOST."),
    ],
    "config": Annotated[
        Path | None, _option("--config", "FILE", "An operator.toml; see `potluck config operator`.")
    ],
}


def operator_command(
    command: Callable[Concatenate[OperatorClient, P], Awaitable[None]],
    *,
    first: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """Turn a coroutine whose first parameter is an `OperatorClient` into a typer command.

    The command also has the connection options, and runs the coroutine in its own event loop.
    first: function that checks the command's own arguments before the connection's files are read.
    """

    def connected(config: OperatorConfig, /, *args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(_connected(config, command, *args, **kwargs))

    return _with_options(command, connected, first)


def configured_command(
    command: Callable[Concatenate[OperatorConfig, P], None],
) -> Callable[..., None]:
    """Turn a function whose first parameter is an `OperatorConfig` into a typer command.

    The command also has the connection options.
    """
    return _with_options(command, command)


async def newest_run(client: OperatorClient) -> str:
    """Return the id of the run that was started last. Raises NotFoundError if there is none."""
    newest = await client.newest_run()
    if newest is None:
        raise NotFoundError("no run has been started yet; start one with `potluck run FILE`")
    return newest.run_id


def _with_options(
    command: Callable[..., Any],
    call: Callable[Concatenate[OperatorConfig, P], None],
    first: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """Wrap `call` as a typer command with the parameters of `command` except the first."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        flags: dict[str, Any] = {name: kwargs.pop(name, None) for name in _OPTIONS}
        if first is not None:
            first(*args, **kwargs)
        call(load_operator_config(OperatorFlags(**flags)), *args, **kwargs)

    own = list(inspect.signature(command).parameters.values())[1:]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    hints = get_type_hints(command, include_extras=True)
    # typer reads the options of a command from these two attributes.
    run.__annotations__ = {parameter.name: hints[parameter.name] for parameter in own} | _OPTIONS
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # inspect honours it
        [parameter.replace(annotation=hints[parameter.name]) for parameter in own] + shared
    )
    return run


async def _connected(
    config: OperatorConfig,
    command: Callable[Concatenate[OperatorClient, P], Awaitable[None]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    async with connect(config) as client:
        await command(client, *args, **kwargs)
