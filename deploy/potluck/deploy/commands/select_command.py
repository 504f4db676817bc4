"""`potluck select`: shows which clients a selector would choose, without any training."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from potluck.common.errors import ConfigurationError, PluginError, PotluckError
from potluck.common.run_file.run_settings import PluginTable
from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.common.settings.plugins import SELECTORS, create, find, installed
from potluck.deploy.commands.old_options import CommandWithOldOptions
from potluck.deploy.commands.run_command import read_run_file
from potluck.deploy.operator.offline_selection import (
    OfflineRound,
    parse_options,
    read_profile_file,
    select_offline,
)
from potluck.deploy.terminal import terminal
from potluck.deploy.view.pictures import check_picture
from potluck.server.plan.compatibility import check_answer_noise
from potluck.server.plan.selection_privacy import Protection, Treatment, verdict_on
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


def _chosen_run(
    file: Path | None,
    selector: str | None,
    options: Mapping[str, object],
    *,
    clients_per_round: int | None,
    seed: int | None,
) -> tuple[RunFile, str]:
    """Return the run file with the command line's choices in it, and the name of its source.

    Without a file, the command line must name the selector and the number of clients. A selector
    from the command line replaces the file's selector and its options.
    """
    if file is not None:
        text, source = read_run_file(file)
        run_file = parse_run_file(text, source=source)
    elif selector is None or clients_per_round is None:
        missing = "--selector" if selector is None else "--clients-per-round"
        raise typer.BadParameter("it is missing; give it, or name a run file", param_hint=missing)
    else:
        run_file, source = RunFile(task=PluginTable(name="digits")), ""
    table = run_file.selector
    given = dict(table.options) if selector is None else {}
    chosen = {**given, **options, "name": selector or table.name}
    changed: dict[str, object] = {"selector": PluginTable.model_validate(chosen)}
    if clients_per_round is not None:
        changed["clients_per_round"] = clients_per_round
    if seed is not None:
        changed["seed"] = seed
    return run_file.model_copy(update=changed), source


def _check_privacy(run_file: RunFile, selector: Selector, source: str) -> None:
    """Print how the run's noise treats the selector. Raises ConfigurationError if it is refused."""
    if run_file.privacy is None:
        return
    name, unit = run_file.selector.name, Protection(run_file.privacy.unit)
    verdict = verdict_on(selector, name, unit)
    if verdict.treatment is Treatment.REFUSED:
        raise ConfigurationError(f"{source}: {verdict.refusal}", selector=name)
    check_answer_noise(run_file, selector, source=source)
    text = ": ".join(filter(None, (verdict.treatment.value, verdict.reason)))
    typer.echo(f'note: selector {name} with [privacy] and unit = "{unit}": {text}', err=True)


def select(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Run file with selector, clients_per_round, seed and [privacy]; - reads standard "
            "input.",
            show_default=False,
        ),
    ] = None,
    *,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            metavar="NAME",
            help="Name of the selector, instead of the run file's.",
            show_default=False,
        ),
    ] = None,
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
        int | None,
        typer.Option(
            "--clients-per-round",
            min=1,
            help="Number of clients per round, instead of the run file's.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            help="Seed of the run. Default: the run file's, or 0.",
            show_default=False,
        ),
    ] = None,
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
    available and to finish. A run with the same seed and profiles would select the same cohorts. If
    the run file has [privacy], selectors that noise can't cover are refused, as in a run.

        potluck select --selector kl --profiles profiles.json --clients-per-round 9
        potluck select run.toml --profiles profiles.json --rounds 3
    """
    if plot is not None:
        check_picture(plot)
    run_file, source = _chosen_run(
        file,
        selector,
        parse_options(option or ()),
        clients_per_round=clients_per_round,
        seed=seed,
    )
    name = run_file.selector.name
    count = run_file.clients_per_round + run_file.round.over_selection
    chosen = create(Selector, name, run_file.selector.options)
    _check_privacy(run_file, chosen, source)
    population = read_profile_file(profiles)
    if count > len(population):
        asked = "--clients-per-round" if clients_per_round else f"clients_per_round of {source}"
        typer.echo(
            f"note: {asked} is {count}, and {profiles} has {len(population)} clients; all are "
            "selected",
            err=True,
        )
    played = select_offline(
        chosen, population, name, rounds=rounds, count=count, seed=run_file.seed
    )
    kept = list(played) if plot is not None or not as_json else played
    if as_json:
        _print_lines(kept, population)
    else:
        terminal().print(_table(kept, population))
    if plot is not None:
        # Imports matplotlib, which takes a second.
        from potluck.deploy.view.selection_plots import plot_selection

        cohorts = {played.round: played.selection.rows for played in kept}
        plot_selection(population, cohorts, plot, title=f"{name}: {count} clients a round")


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


app = typer.Typer()
app.command("select", cls=CommandWithOldOptions)(select)
