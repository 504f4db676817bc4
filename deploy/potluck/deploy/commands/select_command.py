"""`potluck select`: shows which clients a selector would choose, without any training."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from potluck.common.errors import PluginError, PotluckError
from potluck.common.settings.plugins import SELECTORS, create, find, installed
from potluck.deploy.operator.offline_selection import (
    OfflineRound,
    parse_options,
    read_profile_file,
    select_offline,
)
from potluck.deploy.terminal import terminal
from potluck.deploy.view.pictures import check_picture
from potluck.server.rounds.selection_privacy import Protection, verdict_on
from potluck.server.selection import Population, Selector


def _print_selectors(wanted: bool) -> None:
    """Print the installed selectors, one per line, and end the command."""
    if not wanted:
        return
    names = installed(SELECTORS)
    width = max((len(name) for name in names), default=0)
    for name in names:
        try:
            text = summary(find(SELECTORS, name))
        except PluginError as error:
            text = f"not usable here: {error.message}"
        typer.echo(f"{name:{width}}  {text}")
    raise typer.Exit


def summary(plugin: object) -> str:
    """Return the first paragraph of a plug-in's docstring in one line."""
    return " ".join((inspect.getdoc(plugin) or "").partition("\n\n")[0].split())


def _print_treatments(unit: Protection | None) -> None:
    """Print how each installed selector works in a run with noise, one per line, and end the
    command."""
    if unit is None:
        return
    names = installed(SELECTORS)
    width = max((len(name) for name in names), default=0)
    for name in names:
        try:
            found = verdict_on(cast(Selector, find(SELECTORS, name)()), name, unit)
            text = ": ".join(filter(None, (found.treatment.value, found.reason)))
        except PotluckError as error:
            text = f"not usable here: {error.message}"
        typer.echo(f"{name:{width}}  {text}")
    raise typer.Exit


def select(
    *,
    selector: Annotated[
        str,
        typer.Option(
            "--selector", metavar="NAME", help="Name of the selector.", show_default=False
        ),
    ],
    profiles: Annotated[
        Path,
        typer.Option(
            "--profiles",
            metavar="FILE",
            help="JSON file of profiles, as `potluck profiles` writes it.",
            show_default=False,
        ),
    ],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 1,
    clients_per_round: Annotated[
        int,
        typer.Option(
            "--clients-per-round",
            min=1,
            help="Clients to select in each round.",
            show_default=False,
        ),
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the run.")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="KEY=VALUE", help="An option of the selector; repeatable."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per round, for programs.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Also plot the selected clients of each round to this file.",
        ),
    ] = None,
    listed: Annotated[  # noqa: ARG001  the callback does it
        bool,
        typer.Option(
            "--list",
            help="Only list the installed selectors.",
            is_eager=True,
            callback=_print_selectors,
        ),
    ] = False,
    privacy: Annotated[  # noqa: ARG001  the callback does it
        Protection | None,
        typer.Option(
            "--privacy",
            help="Only list how selectors work with this unit of [privacy].",
            is_eager=True,
            callback=_print_treatments,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a selector on a profile file, without training.

    Prints which clients it would select in each round, and why. Every client is assumed to be
    available and to finish. A run with the same seed and profiles would select the same cohorts.

        potluck select --selector kl --profiles profiles.json --clients-per-round 9
    """
    if plot is not None:
        check_picture(plot)
    chosen = create(Selector, selector, parse_options(option or ()))
    population = read_profile_file(profiles)
    if clients_per_round > len(population):
        typer.echo(
            f"note: --clients-per-round is {clients_per_round}, and {profiles} has "
            f"{len(population)} clients; all are selected",
            err=True,
        )
    played = select_offline(
        chosen, population, selector, rounds=rounds, count=clients_per_round, seed=seed
    )
    kept = list(played) if plot is not None or not as_json else played
    if as_json:
        _print_lines(kept, population)
    else:
        terminal().print(_table(kept, population))
    if plot is not None:
        from potluck.deploy.view.selection_plots import plot_selection  # matplotlib takes a second

        cohorts = {played.round: played.selection.rows for played in kept}
        plot_selection(
            population, cohorts, plot, title=f"{selector}: {clients_per_round} clients a round"
        )


def _print_lines(rounds: Iterable[OfflineRound], population: Population) -> None:
    for played in rounds:
        reasons = dict(_chosen(played, population))
        line = {"round": played.round, "cohort": list(reasons), "reasons": reasons}
        typer.echo(json.dumps(line, ensure_ascii=False))


def _table(rounds: Iterable[OfflineRound], population: Population) -> Table:
    table = Table("round", "client", "why", box=None, pad_edge=False, header_style="bold")
    for played in rounds:
        number = str(played.round)
        for client, reason in _chosen(played, population):
            table.add_row(number, client, reason)
            number = ""
        table.add_section()
    return table


def _chosen(played: OfflineRound, population: Population) -> list[tuple[str, str]]:
    ids = [str(population.ids[int(row)]) for row in played.selection.rows]
    return list(zip(ids, played.selection.reasons, strict=True))
