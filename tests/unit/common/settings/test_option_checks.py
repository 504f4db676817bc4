"""Options of any plug-in are checked against its constructor's annotations."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from potluck.common.errors import PluginError
from potluck.common.settings.option_checks import checked
from potluck.common.settings.plugins import create
from potluck.common.task import ClientData, Examples, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from potluck.common.names import ClientId


class Shape(Enum):
    ROUND = "round"
    FLAT = "flat"


class Plugin:
    def __init__(  # type: ignore[no-untyped-def]  # users may omit annotations
        self,
        *,
        size: PositiveInt,
        share: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        kind: Literal["mean", "median"] = "mean",
        shape: Shape = Shape.ROUND,
        widths: tuple[int, ...] = (),
        again: bool = False,
        inner: str | dict[str, Any] | None = None,
        table: NDArray[np.float64] | None = None,
        copy=None,
    ) -> None: ...


def test_options_are_converted_to_the_annotated_types() -> None:
    given = {"size": 1, "share": 0, "shape": "flat", "widths": [1, 2], "table": [1.5], "copy": "x"}
    found = checked(Plugin, given, of="selector mine")
    assert found == {**given, "shape": Shape.FLAT, "widths": (1, 2)}
    assert type(found["share"]) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "option 'size' is 0; it must be greater than 0"),
        ({"size": True}, "option 'size' is True; it must be a whole number"),
        ({"size": 2.0}, "option 'size' is 2.0; it must be a whole number"),
        ({"size": "2"}, "option 'size' is '2'; it must be a whole number"),
        ({"share": math.inf}, "option 'share' is inf; it must be a finite number"),
        ({"share": math.nan}, "option 'share' is nan; it must be a finite number"),
        ({"share": True}, "option 'share' is True; it must be a number"),
        ({"kind": "mode"}, "option 'kind' is 'mode'; it must be 'mean' or 'median'"),
        ({"shape": "oval"}, "option 'shape' is 'oval'; it must be 'round' or 'flat'"),
        ({"widths": [1, "x"]}, "option 'widths' is [1, 'x']; it must be a whole number"),
        ({"again": 1}, "option 'again' is 1; it must be true or false"),
        ({"inner": 3}, "option 'inner' is 3; it must be a text or a table"),
        (
            {"siez": 1},
            (
                "there is no option 'siez' (did you mean 'size'?); its options: size, share, kind, "
                "shape, widths, again, inner, table, copy"
            ),
        ),
    ],
)
def test_invalid_option_value_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError) as caught:
        checked(Plugin, {"size": 1} | options, of="selector mine")
    assert caught.value.message == f"selector mine: {message}"


def test_error_names_the_missing_option_and_every_invalid_one() -> None:
    with pytest.raises(PluginError) as caught:
        checked(Plugin, {"share": 1, "again": "no"}, of="selector mine")
    assert caught.value.message == (
        "selector mine: option 'size' is missing; its options: size, share, kind, shape, widths, "
        "again, inner, table, copy; option 'share' is 1; it must be less than 1; option 'again' is "
        "'no'; it must be true or false"
    )


def test_options_of_an_inherited_constructor_are_checked() -> None:
    class Heir(Plugin):
        pass

    with pytest.raises(PluginError, match="option 'size' is 0"):
        checked(Heir, {"size": 0}, of="x")


class Guarded:
    """A plug-in whose first option has a type that is imported for type checkers only; the
    annotation of the second is not a type."""

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (),
        wide: "how wide it is" = 1,  # type: ignore[valid-type]  # noqa: F722
        depth: PositiveInt = 1,
    ) -> None: ...


def test_option_with_an_unresolvable_annotation_accepts_any_value() -> None:
    assert checked(Guarded, {"hidden": "x", "wide": []}, of="x") == {"hidden": "x", "wide": []}
    with pytest.raises(PluginError, match="option 'depth' is 0"):
        checked(Guarded, {"depth": 0}, of="x")
    with pytest.raises(PluginError, match="there is no option 'high'"):
        checked(Guarded, {"high": 3}, of="x")


AS_WRITTEN = """
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveInt

if TYPE_CHECKING:
    from collections.abc import Sequence


class Constructed:
    def __init__(self, hidden: HIDDEN = (), depth: PositiveInt = 1) -> None: ...


@dataclass
class Fields:
    hidden: HIDDEN = ()
    depth: PositiveInt = 1
"""


@pytest.mark.parametrize("name", ["Constructed", "Fields"])
def test_options_with_annotations_that_are_not_postponed_are_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.14 on, annotations may name missing types without quotes."""
    hidden = "Sequence[int]" if sys.version_info >= (3, 14) else "'Sequence[int]'"
    (tmp_path / "as_written.py").write_text(AS_WRITTEN.replace("HIDDEN", hidden))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "as_written", raising=False)
    make = getattr(importlib.import_module("as_written"), name)
    assert checked(make, {"hidden": "x", "depth": 2}, of="x") == {"hidden": "x", "depth": 2}
    with pytest.raises(PluginError, match="option 'depth' is 0"):
        checked(make, {"depth": 0}, of="x")
    with pytest.raises(PluginError, match="there is no option 'high'; its options: hidden, depth"):
        checked(make, {"high": 3}, of="x")


def test_annotation_that_can_not_be_checked_is_named_in_the_error() -> None:
    def make(width: Annotated[dict[str, int], Field(gt=0)]) -> None: ...

    with pytest.raises(PluginError, match=r"x: the options can't be checked: .*'gt'"):
        checked(make, {"width": {}}, of="x")


def deep(levels: int) -> object:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize("copy", ["\ud800", deep(300)], ids=["half a character", "deep"])
def test_option_that_is_not_json_is_refused(copy: object) -> None:
    with pytest.raises(PluginError, match="x: its options can't be read: "):
        checked(Plugin, {"size": 1, "copy": copy}, of="x")


def test_partial_function_accepts_only_its_free_arguments_as_options() -> None:
    make = functools.partial(deep, levels=3)
    assert checked(make, {"levels": 2}, of="x") == {"levels": 2}
    with pytest.raises(PluginError, match="there is no option 'width'"):
        checked(make, {"width": 2}, of="x")


def test_constructor_with_keyword_arguments_accepts_any_option_name() -> None:
    def make(width: PositiveInt = 1, **others: object) -> None: ...

    assert checked(make, {"width": 2, "deep": [1]}, of="x") == {"width": 2, "deep": [1]}
    with pytest.raises(PluginError, match="option 'width' is 0"):
        checked(make, {"width": 0, "deep": [1]}, of="x")


# A class that does not derive from the base of its kind ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Task with all required members, and no optional ones."""

    alpha: Annotated[float, Field(gt=0)] = 1.0

    classes = 2

    def model(self) -> nn.Module:
        raise NotImplementedError

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        raise NotImplementedError

    def evaluation_data(self, data: Path | None) -> Examples | None:
        return None


class Unfinished:
    classes = 2


class Alone:
    def __init_subclass__(cls) -> None:
        raise TypeError("nothing derives from this")


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "plain_tasks-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-tasks\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        f"[potluck.tasks]\nplain = {__name__}:Plain\nunfinished = {__name__}:Unfinished\n"
        f"alone = {__name__}:Alone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Plain.__module__])


@pytest.mark.usefixtures("plain")
def test_plugin_class_without_the_base_class_gets_its_defaults() -> None:
    task = create(Task, "plain", {"alpha": 2})
    assert isinstance(task, Task)
    assert isinstance(task, Plain)
    assert (task.classes, task.groups, task.clients, task.alpha) == (2, 0, 0, 2.0)
    assert (dict(task.training), dict(task.triplet)) == ({}, {})
    assert task == create(Task, "plain", {"alpha": 2.0}), "a task is a key of caches"
    assert hash(task) == hash(create(Task, "plain", {"alpha": 2.0}))
    assert type(task).__name__ == "Plain"
    with pytest.raises(PluginError, match="task plain: option 'alpha' is 0; it must be greater"):
        create(Task, "plain", {"alpha": 0})


@pytest.mark.usefixtures("plain")
def test_error_names_the_methods_that_a_plugin_class_lacks() -> None:
    with pytest.raises(PluginError, match=r"task unfinished: .*client_data'?, '?evaluation_data"):
        create(Task, "unfinished", {})
    with pytest.raises(PluginError, match="task alone: nothing derives from this; derive it from"):
        create(Task, "alone", {})
