"""The clients' ledger of sums, the budget that noise costs, and the coordinator's records."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import NOW, Federation, Run

from potluck.common.errors import ConfigurationError
from potluck.secagg.protocol import (
    ClientPolicy,
    Ledger,
    Noise,
    Purpose,
    Rule,
    coordinator,
    entry_from_json,
    session_record,
)
from potluck.secagg.protocol.policy.ledger import SumRelease, vector_sha256
from potluck.secagg.protocol.primitives.cells import CELL_HOSTS, draw_cells, public_coin
from potluck.secagg.protocol.wire.messages import Stage

HUNDRED = [f"c{index:03}" for index in range(100)]


def own(clients: list[str]) -> dict[str, str]:
    """Return a host for each client."""
    return {client: f"h-{client}" for client in clients}


def finished(run: Run) -> Run:
    assert run.finish().is_exact()
    return run


def again(run: Run, **changes: Any) -> Run:
    """Return the next session with the same clients, inputs and ledgers."""
    header = run.federation.header(session_id=bytes([len(run.ledgers["a"].entries)] * 16))
    return run.federation.run(replace(header, **changes), ledgers=dict(run.ledgers))


def test_privacy_budget_is_charged_before_a_noisy_sum_is_sent() -> None:
    federation = Federation(clients=6)
    noise = Noise(epsilon=0.4, sensitivity=2, contributors=3)
    ledgers = {name: Ledger(epsilon_budget=1.0) for name in federation.names}
    run = federation.run(federation.header(noise=noise), ledgers=ledgers).until(Stage.UPLOAD)
    run.answer(closing=False)  # vectors are sent, then all clients are disconnected
    assert {float(ledger.spent) for ledger in run.ledgers.values()} == {0.4}
    second = again(run, noise=noise)
    assert finished(second).refusals == {}
    third = again(second, noise=noise)
    third.answer()
    assert {refusal.rule for refusal in third.refusals.values()} == {Rule.BUDGET}


def test_ledger_entries_are_restored_from_json() -> None:
    run = finished(again(finished(Federation(clients=6).run())))
    ledger = run.ledgers["a"]
    assert {type(each).__name__ for each in ledger.entries} == {"Upload", "SumRelease", "Settled"}
    assert tuple(entry_from_json(each.model_dump_json()) for each in ledger.entries) == (
        ledger.entries
    )
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger


def test_vector_of_an_update_is_another_one_with_another_clip_or_scale() -> None:
    """With sums of one update at many scales, the points where they round would tell values."""
    header = Federation(clients=6, purpose=Purpose.UPDATE).header()
    body, *others = header.vectors
    changed = [replace(body, clip=0.5), replace(body, scale=2.0), replace(body, scale=3.0)]
    headers = [header, *(replace(header, vectors=(each, *others)) for each in changed)]
    assert len({vector_sha256(each) for each in headers}) == len(headers)


def test_client_release_agrees_with_the_coordinator_record() -> None:
    run = finished(Federation(clients=6).run())
    [release] = run.ledgers["a"].releases
    record = session_record(run.session, NOW)
    assert isinstance(release, SumRelease)
    assert (record.outcome, record.clients, record.hosts) == ("released", release.clients, 6)
    assert (record.session_id, record.disclosure) == (release.session_id, "cells")
    assert record.certificate is not None
    assert record.certificate.clients == tuple(release.clients)
    assert len(record.certificate.signatures) == record.quorum
    failed = Federation(clients=6).run().until(Stage.CONSENT)
    with pytest.raises(ValueError, match="has ended"):
        session_record(failed.session, NOW)
    failed.answer(["a"])
    record = session_record(failed.session, NOW)
    assert (record.outcome, record.stage, record.have, record.need) == ("aborted", "consent", 1, 4)


def test_sum_is_retried_at_most_twice_in_new_sessions() -> None:
    header = Federation(clients=6).header()
    generator = random.Random(1)
    for attempt in (2, 3):
        header = coordinator.retry_header(header, random=generator.randbytes, issued_at=7)
        assert (header.attempt, header.issued_at, header.expires_at) == (attempt, 7, 607)
        assert header.session_id != bytes(range(16))
    with pytest.raises(ConfigurationError, match="in 3 attempts"):
        coordinator.retry_header(header, random=generator.randbytes, issued_at=7)


def test_cohort_on_too_few_hosts_is_not_invited() -> None:
    federation = Federation(clients=3)
    with pytest.raises(ConfigurationError, match="3 clients on 3 hosts"):
        federation.run(federation.header(least_hosts=5))
    with pytest.raises(ConfigurationError, match="protects no client"):
        ClientPolicy(least_hosts=2)


# Rules of cells (groups of clients).


@settings(deadline=None)
@given(
    clients=st.integers(0, 60),
    hosts=st.integers(1, 40),
    size=st.integers(1, 9),
    coin=st.binary(min_size=32, max_size=32),
)
def test_cells_partition_all_clients_without_splitting_hosts(
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


def test_cells_depend_only_on_the_public_coin() -> None:
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
