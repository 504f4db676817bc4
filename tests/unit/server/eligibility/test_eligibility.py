"""Eligible clients: the rules of a run, applied to the results of profile requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from support.eligibility import rules

from potluck.common.errors import RunError
from potluck.server.eligibility.eligibility import Eligibility, ScarceError
from potluck.server.hosts.attendance import Attendance
from potluck.server.machine.events import Select
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import draw_up
from potluck.server.profiles.collect import Collected, Profiling
from potluck.server.store import Store


@dataclass
class Asked:
    """Stand-in for the profile phase: gives a set answer and records the clients asked."""

    collected: Collected = field(default_factory=Collected)
    asked: list[list[str]] = field(default_factory=list)

    async def collect(
        self, clients: Sequence[str], *, tag: str, present: Callable[[str], bool]
    ) -> Collected:
        assert tag
        assert present("a")
        self.asked.append(list(clients))
        return self.collected


@dataclass
class Scene:
    asked: Asked
    roster: RunRoster
    eligibility: Eligibility
    said: list[str]

    async def eligible(self, *available: str, round_number: int = 1) -> list[int]:
        action = Select(round_number, 1, available or ("a", "b", "c", "d"), 2)
        found: list[int] = (await self.eligibility.eligible(action, lambda _: True)).tolist()
        return found


async def scene(run_file: str = "", **collected: Any) -> Scene:
    plan = draw_up(f'clients_per_round = 2\n[task]\nname = "digits"\n{run_file}', source="test")
    asked, said, roster = Asked(Collected(**collected)), list[str](), RunRoster("abcd")

    async def in_store(_call: Callable[[Store], Any]) -> Any:
        return None

    profiling, attendance = cast(Profiling, asked), Attendance(time.monotonic)
    eligibility = rules(plan, roster, profiling, attendance, in_store, warn=said.append)
    return Scene(asked, roster, eligibility, said)


async def test_all_available_clients_are_eligible() -> None:
    there = await scene()
    assert await there.eligible() == [0, 1, 2, 3]
    assert await there.eligible("d", "b") == [1, 3]
    assert there.said == []


async def test_quarantined_client_is_neither_asked_for_a_profile_nor_selected() -> None:
    there = await scene()
    there.eligibility.quarantine({"b", "x"})
    assert there.eligibility.excluded == ("b", "x")
    assert await there.eligible() == [0, 2, 3]
    assert there.asked.asked == [["a", "c", "d"]]


async def test_profile_refusal_before_the_first_round_ends_the_run() -> None:
    there = await scene(refused={"c": "no (DISCLOSURE_REFUSED)"})
    with pytest.raises(RunError, match="DISCLOSURE_REFUSED"):
        await there.eligible()


async def test_profile_refusal_in_a_later_round_excludes_only_that_client() -> None:
    there = await scene(refused={"c": "no (DISCLOSURE_REFUSED)"})
    assert await there.eligible(round_number=2) == [0, 1, 3]
    assert there.eligibility.excluded == ("c",)
    assert "DISCLOSURE_REFUSED" in there.said[0]
    there.asked.collected = Collected()
    assert await there.eligible(round_number=3) == [0, 1, 3]
    assert "c" not in there.asked.asked[-1]


async def test_client_that_refuses_a_profile_is_eligible_if_the_run_includes_missing_ones() -> None:
    there = await scene('[profiles]\nmissing = "include"', refused={"c": "no"}, silent={"d"})
    assert await there.eligible() == [0, 1, 2, 3]
    assert there.eligibility.excluded == ()
    assert await there.eligible() == [0, 1, 2, 3]
    assert there.asked.asked[-1] == ["a", "b", "d"]  # c has refused and isn't asked again


async def test_client_without_an_answer_skips_the_round_and_is_asked_again() -> None:
    there = await scene(silent={"a"})
    assert await there.eligible() == [1, 2, 3]
    assert there.eligibility.excluded == ()
    there.asked.collected = Collected()
    assert await there.eligible() == [0, 1, 2, 3]
    assert there.asked.asked[-1] == ["a", "b", "c", "d"]


async def test_too_few_clients_for_a_quorum_raise_scarce_error() -> None:
    there = await scene("[round]\nquorum = 1.0", silent={"a", "b", "c"})
    with pytest.raises(ScarceError, match="at least 2 are needed"):
        await there.eligible()


async def test_client_at_its_maximum_share_is_not_eligible() -> None:
    there = await scene("[selector_limits]\nmaximum_share = 0.5")
    there.eligibility.picks.add(["a", "b"])
    assert await there.eligible(round_number=2) == [2, 3]
    there.eligibility.picks.add(["c", "d"])
    assert await there.eligible(round_number=3) == [0, 1, 2, 3]


async def test_client_that_can_not_load_the_task_is_excluded_from_the_run() -> None:
    unable = {"b": "task 'digits' can't be loaded (PLUGIN_INVALID)"}
    found = await scene(unable=unable)
    assert await found.eligible() == [0, 2, 3]
    assert found.eligibility.left_out.troubles == unable
