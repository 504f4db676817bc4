"""Commands of `potluck` that other packages provide, found by their entry points.

An entry point of the group `potluck.commands` names either a function that typer accepts or a typer
app. If the app has a command with the entry point's name, only this command is added; otherwise the
app becomes a group of commands. The entry point is loaded when its command is called or listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from potluck.common.errors import PluginError, PotluckError
from potluck.common.settings import plugins
from potluck.common.settings.extras import MissingLibraryError, missing_extra, missing_library

# Groups -------------------------------------------------------------------------------------------

OTHERS: Final = "From other packages"
"""Title of the help group for commands that are not in `GROUPS`."""

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Run": ("demo", "config", "run", "watch", "stop", "resume", "delete"),
    "Look": ("runs", "model", "evaluate", "export", "report", "page"),
    "Federation": ("doctor", "clients", "pki", "deploy"),
    "Privacy": ("privacy", "profiles", "audit", "audit-labels", "audit-selection"),
    "Research": (
        *("new", "select", "bench", "experiment", "preset", "data", "traces", "pretrained"),
    ),
}
"""Command names by the title of their group in the help. Groups and names are in the help's
order."""


def group_of(command: str) -> str:
    """Return the title of a command's group."""
    return next((title for title, names in GROUPS.items() if command in names), OTHERS)


def in_order(commands: Sequence[str]) -> list[str]:
    """Return names of commands in the order of the help; those of other packages come last."""
    listed = [name for names in GROUPS.values() for name in names]
    return [name for name in listed if name in commands] + [
        name for name in commands if name not in listed
    ]


# Commands of other packages -----------------------------------------------------------------------


class InstalledCommands(TyperGroup):
    """The built-in commands of `potluck`, and those that other packages provide."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, group by group."""
        own = super().list_commands(ctx)
        return in_order(
            own + [name for name in plugins.installed(plugins.COMMANDS) if name not in own]
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; `audit selection` means `audit-selection`."""
        joined = "-".join(args[:2])
        if len(args) > 2 and joined in self.list_commands(ctx):
            args = [joined, *args[2:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with that name, in its group; None if there is none."""
        found: Any = super().get_command(ctx, cmd_name) or _installed(cmd_name)
        if found is not None:
            found.rich_help_panel = group_of(cmd_name)
        return found


def _installed(name: str) -> Any:
    """Return the command that another package provides under that name; None if there is none."""
    if name not in plugins.installed(plugins.COMMANDS):
        return None
    try:
        return _loaded(name)
    except PluginError as error:
        return _broken(name, error)


def _loaded(name: str) -> Any:
    found = plugins.find_callable(plugins.COMMANDS, name)
    group = typer.Typer(rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        of_that_name = [each for each in found.registered_commands if each.name == name]
        if of_that_name:
            group.registered_commands += of_that_name
        else:
            group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    return get_group(group).commands[name]


def _broken(name: str, error: PluginError) -> TyperCommand:
    """Return a stand-in for a command that can't be loaded: calling it raises the error.

    So the other commands still work. If a library is missing, help and error name its extra.
    """
    why, extra = missing_library(error.__cause__), missing_extra(error.__cause__)
    shown: PotluckError = error
    text = "Can't be loaded; call it to see why."
    if why is not None and extra is not None:
        shown = MissingLibraryError(f"`potluck {name}` needs the extra '{extra}': {why}")
        text = f"Needs the extra '{extra}', which is not installed."

    def explain() -> None:
        raise shown from error

    return TyperCommand(
        name,
        callback=explain,
        help=text,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
