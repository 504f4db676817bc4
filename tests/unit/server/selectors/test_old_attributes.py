"""Selectors that declare attributes by their names before 0.1 work, with a warning."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from potluck.server.selection import Selection, SelectionContext, Selector
from potluck.server.state import State


def test_selector_class_attribute_under_its_old_name_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Old: the attribute `asks` of selectors is now"):

        class Old(Selector):
            asks = frozenset({"loss"})

            def select(self, state: State, context: SelectionContext) -> Selection:
                raise NotImplementedError

    assert Old.asks_questions == {"loss"}
    assert Selector.asks_questions == frozenset()


def test_selector_instance_attribute_under_its_old_name_works_with_a_warning() -> None:
    @dataclass(frozen=True)
    class Old(Selector):
        weighted: bool = True

        def __post_init__(self) -> None:
            object.__setattr__(self, "weighs", self.weighted)

        def select(self, state: State, context: SelectionContext) -> Selection:
            raise NotImplementedError

    with pytest.warns(FutureWarning, match="`weighs` of selectors is now `sets_weights`"):
        selector = Old()
    assert selector.sets_weights
    with pytest.warns(FutureWarning, match="rename it before 0.2"):
        assert vars(Selector)["weighs"].__get__(selector, Old)
