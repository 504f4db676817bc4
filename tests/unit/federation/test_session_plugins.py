"""Classes of a notebook become plug-ins that another process finds."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from potluck.common.errors import PluginError
from potluck.common.settings.plugins import SELECTORS, TASKS
from potluck.common.task import Task
from potluck.common.tasks.digits import Digits
from potluck.federation.session_plugins import SessionPlugins
from potluck.server.selection import Selector
from potluck.server.selectors.uniform import Uniform


class FirstOnes(Uniform):
    def __init__(self, step: int = 2, *, wide: bool = False) -> None:
        self._step = step
        self.wide = wide


@dataclass(frozen=True, kw_only=True)
class FewDigits(Digits):
    clients: int = 4


class Forgetful(Uniform):
    def __init__(self, step: int) -> None:
        del step


class Oort(Uniform):
    """A selector with the name of one that comes with Potluck."""


def test_plugin_name_or_table_is_unchanged() -> None:
    session = SessionPlugins()
    assert session.table(SELECTORS, "oort") == {"name": "oort"}
    assert session.table(SELECTORS, {"name": "oort", "alpha": 1.0}) == {
        "name": "oort",
        "alpha": 1.0,
    }
    assert session.write(Path("not-made")) == ""


def test_installed_plugin_class_or_object_keeps_its_installed_name() -> None:
    session = SessionPlugins()
    assert session.table(TASKS, Digits) == {"name": "digits"}
    assert session.table(TASKS, Digits(clients=6, alpha=0.5)) == {"name": "digits", "clients": 6}
    assert not session.has(TASKS, "digits")


def test_custom_plugin_class_is_named_after_itself() -> None:
    session = SessionPlugins()
    assert session.table(SELECTORS, FirstOnes) == {"name": "first-ones"}
    assert session.table(SELECTORS, FirstOnes(3)) == {"name": "first-ones", "step": 3}
    assert session.table(SELECTORS, {"name": FirstOnes, "wide": True}) == {
        "name": "first-ones",
        "wide": True,
    }
    assert session.has(SELECTORS, "first-ones")
    made = session.make(Selector, "first-ones", {"step": 5})
    assert isinstance(made, FirstOnes)
    assert made._step == 5
    assert isinstance(session.make(Task, "digits", {}), Digits)


def test_unknown_option_of_a_custom_plugin_is_refused() -> None:
    session = SessionPlugins()
    session.table(SELECTORS, FirstOnes)
    with pytest.raises(PluginError, match="there is no option 'stop'"):
        session.make(Selector, "first-ones", {"stop": 5})


def test_plugin_object_without_its_options_as_attributes_is_refused() -> None:
    with pytest.raises(PluginError, match="has no attribute 'step' with the option's value"):
        SessionPlugins().table(SELECTORS, Forgetful(3))


@pytest.mark.parametrize("value", [len, 3, lambda state, context: None])
def test_value_that_is_not_a_plugin_is_refused(value: object) -> None:
    with pytest.raises(PluginError, match="can't be used as selector; give a name, a table"):
        SessionPlugins().table(SELECTORS, value)


def test_custom_plugin_with_the_name_of_an_installed_one_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"the name 'oort' of class .* is taken by a selectors plug-in"
    ):
        SessionPlugins().table(SELECTORS, Oort)


def test_custom_plugins_are_found_by_another_process(tmp_path: Path) -> None:
    program = f"""
import sys
from dataclasses import dataclass
from pathlib import Path
from potluck.common.settings.plugins import SELECTORS, TASKS
from potluck.common.tasks.digits import Digits
from potluck.federation.session_plugins import SessionPlugins
from potluck.server.selectors.uniform import Uniform

OFFSET = 4

class Mine(Uniform):
    def __init__(self, step: int = 1):
        self.step = step
    def total(self):
        return self.step + OFFSET

@dataclass(frozen=True, kw_only=True)
class Few(Digits):
    clients: int = 3

session = SessionPlugins()
session.table(SELECTORS, Mine)
session.table(TASKS, Few)
folder = Path({str(tmp_path)!r})
print(session.search_path(folder, session.write(folder)))
"""
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    check = """
from potluck.common.settings.plugins import TASKS, create, origin, SELECTORS
from potluck.common.task import Task
from potluck.server.selection import Selector
print(create(Selector, "mine", {"step": 3}).total(), create(Task, "few", {}).clients)
print(origin(SELECTORS, "mine"))
"""
    found = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": made.stdout.strip()},
    )
    assert found.stdout.split() == ["7", "3", "potluck_session:selectors_mine"]
    [package] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert not (package.stat().st_mode & 0o022)


def test_session_plugin_digest_changes_with_the_classes(tmp_path: Path) -> None:
    first, second = SessionPlugins(), SessionPlugins()
    for session in (first, second):
        session.table(SELECTORS, FirstOnes)
    assert first.write(tmp_path) == first.write(tmp_path)
    second.table(TASKS, FewDigits)
    assert second.write(tmp_path) != first.write(tmp_path)
