"""The commands of `potluck`: its own, and those that other packages provide.

Other packages provide commands by entry points of the group `potluck.commands`. An entry point
names either a function that typer accepts or a typer app. If the app has a command with the entry
point's name, only this command is added; otherwise the app becomes a group of commands.

A command's module is imported when the command is called or listed, so that no command waits for
the libraries of another.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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


# Commands -----------------------------------------------------------------------------------------

_OWN: Final[Mapping[str, str]] = {
    "audit": "disclosure_audit_command",
    "audit-labels": "label_audit_command",
    "clients": "client_commands",
    "config": "config_command",
    "delete": "existing_run_commands",
    "demo": "demo_command",
    "doctor": "doctor_command",
    "model": "model_command",
    "pki": "pki_commands",
    "profiles": "profile_commands",
    "report": "report_command",
    "resume": "existing_run_commands",
    "run": "run_command",
    "runs": "existing_run_commands",
    "select": "select_command",
    "stop": "existing_run_commands",
    "watch": "existing_run_commands",
}
"""Module of this package whose `app` has the command, by the command's name."""


class AllCommands(TyperGroup):
    """The commands of `potluck`. Those of other packages don't replace its own."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # given by typer
        """Return the command with that name, or None."""
        if cmd_name not in self.commands:
            return None
        return self.commands[cmd_name]  # `get` would hide a KeyError of the command's module

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # given by typer
        """Return the names of all commands, group by group."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; `audit selection` means `audit-selection`."""
        joined = "-".join(args[:2])
        if len(args) > 2 and joined in self.commands:
            args = [joined, *args[2:]]
        return super().resolve_command(ctx, args)


class _Commands(MutableMapping[str, Any]):
    """Commands by name, in the order of the help. A command is imported when it is looked up."""

    def __init__(self, loaded: Mapping[str, Any]) -> None:
        self._loaded = dict(loaded)

    def __iter__(self) -> Iterator[str]:
        found = {*_OWN, *plugins.installed(plugins.COMMANDS), *self._loaded}
        listed = [name for names in GROUPS.values() for name in names]
        yield from (name for name in listed if name in found)
        yield from sorted(found.difference(listed))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self:
                raise KeyError(name)
            self[name] = _command(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        command.rich_help_panel = group_of(name)
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]


def _command(name: str) -> Any:
    """Return a command that is Potluck's own or that another package provides."""
    if name in _OWN:
        return _in_app(importlib.import_module(f"{__package__}.{_OWN[name]}").app, name)
    try:
        return _in_app(plugins.find_callable(plugins.COMMANDS, name), name)
    except PluginError as error:
        return _broken(name, error)


def _in_app(found: Any, name: str) -> Any:
    """Return the command `name` of a typer app, or a new command that calls the function."""
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

    One broken package does not stop the other commands. If a library is missing, help and error
    name its extra.
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
