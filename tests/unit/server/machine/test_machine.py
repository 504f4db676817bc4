"""The round state machine, as transcripts of events and answers.

Each file of `tests/testdata/rounds` is one run. A line `plan key=value …` or
`resume key=value …` sets it up; a line `SECONDS event arguments` is an event, the indented lines
under it are the actions it must answer with, then the phase and the next wake-up. Under
`SECONDS waits` is the reported reason for waiting. After an intended change,
`pytest tests/unit/server/machine/test_machine.py --rewrite` writes the current answers;
read the difference before you commit it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.repository import TESTDATA

from potluck.common.run_file.run_settings import RoundPolicy
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase, Resumption, RoundMachine
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.round_rules import RoundRules
from potluck.server.store.records import MemberState

TRANSCRIPTS = TESTDATA / "rounds"

EVENTS: dict[str, Any] = {
    "started": lambda: rounds.Started(),
    "joined": lambda *clients: joined(clients),
    "left": lambda *clients: rounds.Left(clients),
    "training": lambda *clients: rounds.StillTraining(clients),
    "excluded": lambda *clients: rounds.Excluded(clients),
    "leftout": lambda clients, *words: rounds.LeftOut(
        tuple((client, " ".join(words)) for client in clients.split(","))
    ),
    "readmitted": lambda *clients: rounds.Readmitted(clients),
    "scarce": lambda *words: rounds.TooFewEligible(" ".join(words)),
    "outdated": lambda *words: rounds.StoredAnswersInvalid(" ".join(words)),
    "selected": lambda *clients: rounds.Selected(clients),
    "update": lambda client, seconds="0": rounds.UpdateArrived(client, float(seconds)),
    "sum": lambda *clients: rounds.SumArrived(tuple((client, 0.0) for client in clients)),
    "offered": lambda client: rounds.UpdateReady(client),
    "decided": lambda attempt, *spared: rounds.UploadsDecided(
        1, int(attempt), tuple((client, "not needed") for client in spared)
    ),
    "failed": lambda client, *words: rounds.ClientFailed(client, " ".join(words)),
    "sumless": lambda attempt, client, *words: rounds.SumFailed(
        1, int(attempt), " ".join(words), () if client == "-" else ((client, "it refuses"),)
    ),
    "reduced": lambda: rounds.Reduced(),
    "evaluated": lambda: rounds.Evaluated(),
    "committed": lambda *words: rounds.Committed(" ".join(words)),
    "broke": lambda *words: rounds.ActionFailed(" ".join(words)),
    "stop": lambda: rounds.StopRequested(),
    "tick": lambda: rounds.TimerFired(),
}


def joined(words: tuple[str, ...]) -> rounds.Joined:
    """Return the event that clients joined. words: CLIENT or CLIENT@HOST each."""
    pairs = [word.partition("@") for word in words]
    clients = tuple(client for client, _, _ in pairs)
    return rounds.Joined(clients, {client: host for client, _, host in pairs if host})


def make_machine(line: str) -> RoundMachine:
    kind, *pairs = line.split()
    values = dict(pair.split("=", 1) for pair in pairs)
    late = {"rounds": values.pop("late_rounds", "0")}
    policy: dict[str, Any] = {
        name: values.pop(name) for name in list(values) if name in RoundPolicy.model_fields
    }
    policy["late_updates"] = late
    resumption = None
    if kind == "resume":
        cohort = [member.split(":") for member in values.pop("cohort", "").split(",") if member]
        resumption = Resumption(
            roster=RunRoster(values.pop("clients").split(",")),
            committed=int(values.pop("committed", "0")),
            attempt=int(values.pop("attempt", "1")),
            spent=int(values.pop("spent", "0")),
            failed=int(values.pop("failed", "0")),
            spared=tuple(filter(None, values.pop("spared", "").split(","))),
            available=tuple(filter(None, values.pop("available", "").split(","))),
            cohort=tuple((client, MemberState(state)) for client, state, *_ in cohort),
            seconds={client: float(seconds[0]) for client, _, *seconds in cohort if seconds},
            uploads_decided=values.pop("uploads_decided", "") == "true",
            why_over=values.pop("why_over", ""),
            left_out=dict.fromkeys(filter(None, values.pop("left_out", "").split(",")), "no task"),
        )
    rules = RoundRules(
        rounds=int(values.pop("rounds", "2")),
        clients_per_round=int(values.pop("count", "2")),
        expected_clients=int(values.pop("roster", "3")),
        start_timeout_seconds=float(values.pop("timeout", "300")),
        policy=RoundPolicy.model_validate(policy),
        hosts=int(values.pop("hosts", "0")),
        evaluate_every=int(values.pop("evaluate_every", "1")),
        offers=values.pop("offers", "") == "true",
        simulated="simulated_deadline" in values,
        simulated_deadline=float(values.pop("simulated_deadline", "inf")),
    )
    assert not values, f"unknown in the first line: {values}"
    return RoundMachine(rules, resumption)


WORDS: dict[type[rounds.Action], str] = {rounds.PublishNotice: "Say"}
"""The name of an action in transcripts, if it isn't the name of its class."""


def show(action: rounds.Action) -> str:
    words = [WORDS.get(type(action), type(action).__name__)]
    for field in dataclasses.fields(action):
        value = getattr(action, field.name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        words.append(f"{field.name}={text!r}" if " " in text else f"{field.name}={text}")
    return "    " + " ".join(words)


def replay(text: str) -> str:
    machine: RoundMachine | None = None
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            continue
        out.append(line)
        if not line or line.startswith("#"):
            continue
        if machine is None:
            machine = make_machine(line)
            continue
        at, name, *arguments = line.split()
        if name == "waits":
            assert machine.waiting is not None
            out.append(f"    {machine.waiting.what}")
            continue
        actions = machine.handle(EVENTS[name](*arguments), float(at))
        out += [show(action) for action in actions]
        wakeup = machine.next_wakeup()
        awake = "" if wakeup is None else f", wakes at {wakeup:g}"
        out.append(f"    ({machine.phase.value}{awake})")
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_round_machine_answers_events_as_in_the_transcript(
    path: Path, request: pytest.FixtureRequest
) -> None:
    text = path.read_text()
    answered = replay(text)
    if request.config.getoption("--rewrite"):
        path.write_text(answered)
    assert answered == text or request.config.getoption("--rewrite")


CLIENTS = tuple("abcdef")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_round_machine_ends_or_waits_after_any_order_of_events(data: st.DataObject) -> None:
    """No order of joins, leaves, failures and delays blocks the machine or breaks a rule."""
    policy = RoundPolicy(
        deadline_seconds=10,
        quorum=data.draw(st.sampled_from([0.25, 0.5, 1.0])),
        attempts=2,
        over_selection=data.draw(st.integers(0, 2)),
        grace_seconds=data.draw(st.sampled_from([0.0, 3.0])),
    )
    rules = RoundRules(
        rounds=2,
        clients_per_round=3,
        expected_clients=4,
        start_timeout_seconds=20,
        policy=policy,
        simulated=data.draw(st.booleans()),
        simulated_deadline=5.0,
        offers=data.draw(st.booleans()),
    )
    machine = RoundMachine(rules)
    now, committed, outstanding = 0.0, 0, list[rounds.Event]([rounds.Started()])
    received: set[str] = set()
    attending: set[str] = set()
    for _ in range(60):
        if machine.phase is Phase.ENDED:
            break
        wakeup = machine.next_wakeup()
        happens = outstanding or wakeup is not None or machine.waiting is not None
        assert happens, "nothing would ever happen again"
        choice = data.draw(st.integers(0, 6))
        clients = data.draw(st.sets(st.sampled_from(CLIENTS), max_size=3).map(sorted).map(tuple))
        if choice == 0:
            event: rounds.Event = rounds.Joined(clients)
            attending.update(clients)
        elif choice == 1:
            event = rounds.Left(clients)
            attending.difference_update(clients)
        elif choice == 2 and machine.cohort.pending:
            event = rounds.ClientFailed(data.draw(st.sampled_from(machine.cohort.pending)), "no")
        elif choice == 3 and machine.cohort.undecided and machine.cohort.training:
            event = rounds.UpdateReady(data.draw(st.sampled_from(machine.cohort.training)))
        elif choice == 3 and machine.cohort.pending and not machine.cohort.undecided:
            client = data.draw(st.sampled_from(machine.cohort.pending))
            received.add(client)
            event = rounds.UpdateArrived(client, data.draw(st.sampled_from([1.0, 2.0, 6.0])))
        elif choice == 6 and machine.phase in (Phase.TRAINING, Phase.REDUCING):
            troubles = tuple((client, "it refuses") for client in clients)
            event = rounds.SumFailed(machine.round, machine.attempt, "no sum", troubles)
            outstanding = []
        elif choice == 5 and machine.phase is Phase.SELECTING:
            event, outstanding = rounds.TooFewEligible("no client has a profile"), []
        elif outstanding:
            event = outstanding.pop()
        elif wakeup is not None:
            assert wakeup > now or machine.phase is Phase.TRAINING
            now, event = max(now, wakeup), rounds.TimerFired()
        else:
            assert machine.waiting is not None
            continue
        for action in machine.handle(event, now):
            match action:
                case rounds.Select(available=available, count=count):
                    received.clear()
                    assert len(set(available)) == len(available)
                    assert set(available) <= attending
                    outstanding = [rounds.Selected(available[:count])]
                case rounds.DecideUploads(round=number, attempt=attempt, clients=offered):
                    assert offered
                    least = data.draw(st.integers(1, len(offered)))
                    spared = tuple((client, "not needed") for client in offered[least:])
                    outstanding = [rounds.UploadsDecided(number, attempt, spared)]
                case rounds.Reduce(clients=reduced):
                    assert set(reduced) <= received
                    assert list(reduced) == sorted(reduced)
                    seconds = [machine.cohort.members[client].seconds for client in reduced]
                    assert not rules.simulated or max(seconds) <= 5.0
                    outstanding = [rounds.Reduced()]
                case rounds.Evaluate():
                    outstanding = [rounds.Evaluated()]
                case rounds.Commit(round=number, included=included):
                    committed += 1
                    assert number == committed
                    assert len(included) >= policy.needed(min(3, len(included)))
                    outstanding = [rounds.Committed()]
                case rounds.End(ending=ending):
                    assert (ending is rounds.RunEnding.FINISHED) == (committed == 2)
                    outstanding = []
                case _:
                    pass
