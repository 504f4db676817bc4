"""What clients remember, and refuse because of it: differences, retries, rewritten logs."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import NOW, Federation, Run

from potluck.common.errors import ConfigurationError
from potluck.common.secagg import (
    BrokenRuleError,
    ClientPolicy,
    Envelope,
    Ledger,
    LogPosition,
    MessageType,
    Noise,
    Purpose,
    Rule,
    coordinator,
    encode,
    entry_from_json,
    session_record,
)
from potluck.common.secagg.policy.differencing import check_set
from potluck.common.secagg.policy.ledger import SumRelease, Upload
from potluck.common.secagg.primitives.cells import CELL_HOSTS, draw_cells, public_coin
from potluck.common.secagg.wire.messages import Invitation, LogEntry, Stage

HUNDRED = [f"c{index:03}" for index in range(100)]


def own(clients: list[str]) -> dict[str, str]:
    """Each client on a host of its own."""
    return {client: f"h-{client}" for client in clients}


def refused(candidate: Any, earlier: Any, hosts: Any = None, least: int = 5) -> bool:
    everybody = sorted({c for each in (*earlier, candidate) for c in each})
    with suppress(BrokenRuleError):
        check_set(candidate, earlier, hosts or own(everybody), least)
        return False
    return True


def test_nested_greedy_sums_are_refused() -> None:
    # The selection's own pattern: one client more with each step.
    steps = [HUNDRED[: 10 + step] for step in range(5)]
    assert not refused(steps[0], [])
    assert all(refused(step, [steps[0]]) for step in steps[1:])


@pytest.mark.slow
def test_random_sets_stop_at_the_number_of_clients_less_the_least_group() -> None:
    generator = random.Random(3)
    allowed: list[frozenset[str]] = []
    for _ in range(130):
        candidate = frozenset(generator.sample(HUNDRED, 10))
        if not refused(candidate, allowed, own(HUNDRED)):
            allowed.append(candidate)
    assert len(allowed) == 95


@pytest.mark.parametrize(
    ("earlier", "candidate", "expected"),
    [
        ([], "abcd", True),
        ([], "abcde", False),
        (["abcdefghij"], "abcdefghij", False),
        (["abcdefghij"], "abcdefghi", True),
        (["abcdefghij"], "abcdefghijklmn", True),
        (["abcdefghij"], "abcdefghijklmno", False),
        (["abcdefghijklmno"], "abcdefghij", False),
        (["abcdefghijkl", "abcdef"], "ghijkl", False),  # nothing new
        # Any two of these are far apart, but one from the others leaves q and r.
        (["abcdefghijklmnopqr", "abcdefgh"], "ijklmnop", True),
    ],
)
def test_sets(earlier: list[str], candidate: str, expected: bool) -> None:
    assert refused(candidate, earlier) is expected


def test_groups_are_counted_in_hosts() -> None:
    hosts = own(list("abcdefghijklmno")) | dict.fromkeys("klmno", "h-big")
    assert refused("abcdefghijklmno", ["abcdefghij"], hosts)
    assert refused("abcdeklmno", [], own(list("abcde")) | dict.fromkeys("abcdeklmno", "one"))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_is_allowed_isolates_no_two_clients(data: st.DataObject) -> None:
    names = list("abcdefghi")
    sets = data.draw(st.lists(st.sets(st.sampled_from(names), min_size=2), max_size=6))
    allowed: list[set[str]] = []
    for candidate in sets:
        if not refused(candidate, allowed, own(names), least=2):
            allowed.append(candidate)
    rows = np.array([[name in each for name in names] for each in allowed], float)
    rank = np.linalg.matrix_rank(rows) if allowed else 0
    for one, other in combinations(range(len(names)), 2):
        outside = [column for column in range(len(names)) if column not in (one, other)]
        # A combination is about these two alone just if the rest has a smaller rank.
        assert not allowed or np.linalg.matrix_rank(rows[:, outside]) == rank


# Through the state machines.


def finished(run: Run) -> Run:
    assert run.finish().is_exact()
    return run


def again(run: Run, **changes: Any) -> Run:
    """The next session with the same clients, inputs and ledgers."""
    header = run.federation.header(session_id=bytes([len(run.ledgers["a"].entries)] * 16))
    log = tuple(run.log) + tuple(run.released)
    position = LogPosition().extend(log)
    header = replace(header, log_length=position.length, log_head=position.head, **changes)
    return run.federation.run(header, ledgers=dict(run.ledgers), log=log)


def test_a_faked_abort_and_a_retry_without_bob_are_refused() -> None:
    first = finished(Federation(clients=6).run())
    retry = again(first, attempt=2).until(Stage.UPLOAD)
    retry.answer(list("abcde"))
    retry.answer()
    assert {refusal.rule for refusal in retry.refusals.values()} == {Rule.DIFFERENCING}
    assert set(retry.refusals) == set("abcde")
    assert retry.session.aborted is not None


def test_an_update_is_released_once_or_for_the_same_clients() -> None:
    first = finished(Federation(clients=6, purpose=Purpose.UPDATE).run())
    same = Run(first.federation, replace(first.header, session_id=bytes(16)), ledgers=first.ledgers)
    assert finished(same).refusals == {}
    other = Run(
        first.federation, replace(first.header, session_id=bytes(16)), ledgers=first.ledgers
    )
    other.until(Stage.UPLOAD).answer(list("abcde"))
    other.answer()
    assert {refusal.rule for refusal in other.refusals.values()} == {Rule.RELEASED}


def test_what_another_session_released_meanwhile_counts_at_the_reveal() -> None:
    run = Federation(clients=6, purpose=Purpose.UPDATE).run().until(Stage.REVEAL)
    other = Run(run.federation, replace(run.header, session_id=bytes(16)))
    other.until(Stage.UPLOAD).answer(list("abcde"))
    other.finish()
    run.ledgers["a"] = other.ledgers["a"]
    step = run.tell("a", run.next("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.RELEASED


def test_an_unprotected_disclosure_is_released_as_often_as_asked() -> None:
    policy = ClientPolicy(
        least_hosts=4,
        disclosures=frozenset({"protocol"}),
        unprotected=frozenset({"protocol"}),
    )
    federation = Federation(clients=6, policy=policy)
    first = finished(federation.run(federation.header(disclosure="protocol")))
    retry = again(first, disclosure="protocol").until(Stage.UPLOAD)
    retry.answer(list("abcde"))
    assert finished(retry).refusals == {}


def test_the_log_must_show_what_was_released() -> None:
    first = finished(Federation(clients=6).run())
    assert len(first.released) == 1
    honest = again(first)
    assert finished(honest).refusals == {}
    silent = Run(
        first.federation, first.federation.header(session_id=bytes(16)), ledgers=first.ledgers
    )
    silent.answer()
    assert {refusal.rule for refusal in silent.refusals.values()} == {Rule.QUERY_LOG}


def test_a_rewritten_log_is_refused() -> None:
    first = finished(Federation(clients=6).run())
    second = finished(again(first))
    log = [*first.released, *second.released]
    for wrong in ([log[1], log[0]], log[:1], [*log, log[0][:-2]]):
        position = LogPosition().extend(wrong)
        header = first.federation.header(
            session_id=bytes(16), log_length=position.length, log_head=position.head
        )
        message = Envelope(MessageType.INVITATION, encode(Invitation(encode(header), tuple(wrong))))
        run = Run(first.federation, header, ledgers=dict(second.ledgers))
        step = run.tell("a", message)
        assert step.refusal is not None
        assert step.refusal.rule in (Rule.QUERY_LOG, Rule.MALFORMED)


def test_the_log_need_be_shown_from_where_it_is_known_only() -> None:
    first = finished(Federation(clients=6).run())
    second = finished(again(first))
    log = [*first.released, *second.released]
    position = LogPosition().extend(log)
    header = first.federation.header(
        session_id=bytes(16), log_length=position.length, log_head=position.head
    )
    # They saw the first entry when the second session began.
    short = Envelope(
        MessageType.INVITATION, encode(Invitation(encode(header), (log[1],), log_begin=1))
    )
    run = Run(first.federation, header, ledgers=dict(second.ledgers))
    assert run.tell("a", short).refusal is None
    gap = replace(short, payload=encode(Invitation(encode(header), (), log_begin=2)))
    step = run.tell("a", gap)
    assert step.refusal is not None
    assert step.refusal.rule is Rule.QUERY_LOG


def test_a_client_that_was_cut_off_learns_from_the_log_what_it_is_in() -> None:
    run = Federation(clients=6).run().until(Stage.CONSENT)
    run.next("f")
    run.pending["f"] = []
    run.answer(list("abcde"))
    finished(run)
    assert run.ledgers["f"].releases == []
    assert [type(each) for each in run.ledgers["f"].entries] == [Upload]
    later = again(run).until(Stage.UPLOAD)
    assert [type(each) for each in later.ledgers["f"].entries] == [Upload]  # nothing given yet
    later.answer()
    assert later.ledgers["f"].sets_of("input") == [frozenset("abcdef")]


def test_two_logs_shown_at_once_are_found_out() -> None:
    first = finished(Federation(clients=6).run())
    made_up = encode(LogEntry(bytes([9] * 16), "labels", ("x", "y"), noisy=False))
    forked = (*first.released, made_up)
    position = LogPosition().extend(forked)
    header = first.federation.header(
        session_id=bytes([7] * 16), log_length=position.length, log_head=position.head
    )
    one = again(first).until(Stage.UPLOAD)
    other = Run(first.federation, header, ledgers=dict(first.ledgers), log=forked)
    other.until(Stage.UPLOAD)  # neither has shown up in the ledgers so far
    one.take("a", one.tell("a", one.next("a")))
    assert one.ledgers["a"].log_position == LogPosition().extend(first.released)
    other.ledgers["a"] = one.ledgers["a"]
    step = other.tell("a", other.next("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.QUERY_LOG


def test_noise_is_paid_for_before_anything_is_sent() -> None:
    federation = Federation(clients=6)
    noise = Noise(epsilon=0.4, sensitivity=2, contributors=3)
    ledgers = {name: Ledger(epsilon_budget=1.0) for name in federation.names}
    run = federation.run(federation.header(noise=noise), ledgers=ledgers).until(Stage.UPLOAD)
    run.answer(closing=False)  # vectors are sent, and everybody is cut off
    assert {float(ledger.spent) for ledger in run.ledgers.values()} == {0.4}
    second = again(run, noise=noise)
    assert finished(second).refusals == {}
    third = again(second, noise=noise)
    third.answer()
    assert {refusal.rule for refusal in third.refusals.values()} == {Rule.BUDGET}


def test_entries_survive_their_json() -> None:
    run = finished(again(finished(Federation(clients=6).run())))
    ledger = run.ledgers["a"]
    assert {type(each).__name__ for each in ledger.entries} == {"Upload", "SumRelease", "LogSeen"}
    assert tuple(entry_from_json(each.model_dump_json()) for each in ledger.entries) == (
        ledger.entries
    )
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger


def test_what_a_client_disclosed_and_the_coordinator_learned_agree() -> None:
    run = finished(Federation(clients=6).run())
    [release] = run.ledgers["a"].releases
    record = session_record(run.session, NOW)
    assert isinstance(release, SumRelease)
    assert (record.outcome, record.clients, record.hosts) == ("released", release.clients, 6)
    assert (record.session_id, record.disclosure) == (release.session_id, "cells")
    failed = Federation(clients=6).run().until(Stage.CONSENT)
    with pytest.raises(ValueError, match="not over"):
        session_record(failed.session, NOW)
    failed.answer(["a"])
    record = session_record(failed.session, NOW)
    assert (record.outcome, record.stage, record.have, record.need) == ("aborted", "consent", 1, 4)


def test_a_sum_is_retried_twice_with_another_session() -> None:
    header = Federation(clients=6).header()
    generator = random.Random(1)
    for attempt in (2, 3):
        header = coordinator.retry_header(header, random=generator.randbytes, issued_at=7)
        assert (header.attempt, header.issued_at, header.expires_at) == (attempt, 7, 607)
        assert header.session_id != bytes(range(16))
    with pytest.raises(ConfigurationError, match="3 times"):
        coordinator.retry_header(header, random=generator.randbytes, issued_at=7)


def test_a_cohort_that_is_too_small_is_not_invited() -> None:
    federation = Federation(clients=3)
    with pytest.raises(ConfigurationError, match="3 clients on 3 hosts"):
        federation.run(federation.header(least_hosts=5))
    with pytest.raises(ConfigurationError, match="nothing secret"):
        ClientPolicy(least_hosts=2)


# Cells.


@settings(deadline=None)
@given(
    clients=st.integers(0, 60),
    hosts=st.integers(1, 40),
    size=st.integers(1, 9),
    coin=st.binary(min_size=32, max_size=32),
)
def test_cells_part_all_clients_and_keep_hosts_together(
    clients: int, hosts: int, size: int, coin: bytes
) -> None:
    host_of = {f"c{index}": f"h{index % hosts}" for index in range(clients)}
    cells = draw_cells(host_of, coin, size=size)
    distinct = len(set(host_of.values()))
    assert len(cells) == distinct // size
    assert not cells or sorted(c for cell in cells for c in cell) == sorted(host_of)
    for cell in cells:
        assert size <= len({host_of[client] for client in cell}) < 2 * size
    owners = [{host_of[client] for client in cell} for cell in cells]
    assert all(one.isdisjoint(other) for one, other in combinations(owners, 2))


def test_cells_follow_from_the_coin_alone() -> None:
    hosts = own(HUNDRED)
    coin = public_coin("f", HUNDRED, "2026-05-04")
    assert coin == public_coin("f", reversed(HUNDRED), "2026-05-04")
    shuffled = dict(reversed(list(hosts.items())))
    assert draw_cells(hosts, coin) == draw_cells(shuffled, coin)
    assert len(draw_cells(hosts, coin)) == 100 // CELL_HOSTS
    others = {
        public_coin("g", HUNDRED, "2026-05-04"),
        public_coin("f", HUNDRED[1:], "2026-05-04"),
        public_coin("f", HUNDRED, "2026-05-05"),
    }
    assert len({coin, *others}) == 4
    assert all(draw_cells(hosts, other) != draw_cells(hosts, coin) for other in others)
