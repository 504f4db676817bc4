"""The rules of a chain of selections, against coordinators and hosts that break them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.server.selection import Population, RoundOutcome, SelectionContext
from potluck.server.selectors.round_robin import RoundRobin
from potluck.server.selectors.uniform import Uniform
from potluck.verifiable.chain import MOST_DRAWS, Chain
from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Document,
    Opening,
    Outcome,
    Speaker,
    commitment_to,
    digest,
    share_of,
)
from potluck.verifiable.draws import drawn

RUN = "run-1"
OWN_SHARE = "11" * 32
INPUTS = "22" * 32


@dataclass(frozen=True)
class Party:
    """A client that speaks for a host of its own."""

    client: str
    secret: bytes

    def speaker(self, opening: str) -> Speaker:
        share = share_of(self.secret, opening, self.client)
        return Speaker(client=self.client, commitment=commitment_to(share, opening, self.client))


def parties(count: int) -> list[Party]:
    return [Party(f"client-{n}", bytes([n]) * 32) for n in range(count)]


def opening(chain: Chain, round_number: int = 1, attempt: int = 1, **changes: object) -> bytes:
    found = Opening(
        previous=chain.tip,
        run=RUN,
        rounds=4,
        round=round_number,
        attempt=attempt,
        selector="uniform",
        count=2,
        inputs_sha256=INPUTS,
        commitment=commitment_to(OWN_SHARE, chain.tip, COORDINATOR),
    )
    return found.model_copy(update=changes).encode()


def attendees(chain: Chain, hosts: Sequence[Party], times: tuple[int, ...] | None = None) -> bytes:
    return Attendees(
        previous=chain.opening_sha256,
        available=tuple(each.client for each in hosts),
        times=times,
        speakers=tuple(each.speaker(chain.opening_sha256) for each in hosts),
    ).encode()


def shares(chain: Chain, hosts: Sequence[Party]) -> dict[str, str]:
    return {e.client: share_of(e.secret, chain.opening_sha256, e.client) for e in hosts}


def outcome(chain: Chain, revealed: Mapping[str, str], share: str = OWN_SHARE) -> Outcome:
    cohort = chain.recomputed(chain.seed(share, revealed))
    return Outcome(
        previous=chain.attendees_sha256, cohort=cohort, share=share, shares=dict(revealed)
    )


def until_attended(hosts: Sequence[Party]) -> Chain:
    chain = Chain.begin(RUN)
    chain = chain.opened(opening(chain))
    return chain.attended(attendees(chain, hosts))


def round_of(chain: Chain, hosts: Sequence[Party], number: int) -> Chain:
    chain = chain.opened(opening(chain, number))
    chain = chain.attended(attendees(chain, hosts))
    return chain.ended(outcome(chain, shares(chain, hosts)).encode())


# Honest runs ------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 4))
def test_all_who_follow_a_run_know_the_same_chain(count: int, rounds: int) -> None:
    hosts, coordinator = parties(count), Chain.begin(RUN)
    documents = list[tuple[str, bytes]]()
    for number in range(1, rounds + 1):
        text = opening(coordinator, number)
        coordinator = coordinator.opened(text)
        documents.append(("opened", text))
        text = attendees(coordinator, hosts)
        coordinator = coordinator.attended(text)
        documents.append(("attended", text))
        text = outcome(coordinator, shares(coordinator, hosts)).encode()
        coordinator = coordinator.ended(text)
        documents.append(("ended", text))
    follower = Chain.begin(RUN)
    for step, text in documents:
        follower = getattr(follower, step)(text)
        # Repeated after a restart, it changes nothing.
        assert getattr(follower, step)(text) is follower
    assert follower == coordinator
    assert follower.whole
    assert sum(follower.times.values()) == (rounds - 1) * min(2, count)


@given(st.integers(2, 8), st.data())
def test_every_share_changes_the_seed(count: int, data: st.DataObject) -> None:
    """A party that can't foresee one share can't foresee the seed."""
    hosts = parties(count)
    chain = until_attended(hosts)
    revealed = shares(chain, hosts)
    before = chain.seed(OWN_SHARE, revealed)
    other = data.draw(st.integers(0, count - 1))
    hosts[other] = Party(hosts[other].client, b"\xff" * 32)
    changed = until_attended(hosts)
    assert changed.seed(OWN_SHARE, shares(changed, hosts)) != before


def test_a_host_gives_the_same_share_again_and_another_for_another_opening() -> None:
    secret = b"s" * 32
    first = share_of(secret, "aa" * 32, "client-0")
    assert first == share_of(secret, "aa" * 32, "client-0")
    assert first != share_of(secret, "bb" * 32, "client-0")
    assert first != share_of(secret, "aa" * 32, "client-1")


def test_no_two_purposes_or_lists_have_the_same_digest() -> None:
    found = [
        digest("a", b"bc"),
        digest("ab", b"c"),
        digest("a", b"b", b"c"),
        digest("a", b"bc", b""),
    ]
    assert len(set(found)) == len(found)


# Broken rules -----------------------------------------------------------------------------------


def refused(call: object, *arguments: object) -> str:
    with pytest.raises(BrokenSelectionError) as caught:
        call(*arguments)  # type: ignore[operator]
    return str(caught.value)


def changed(document: Document, **fields: object) -> bytes:
    return document.model_copy(update=fields).encode()


def test_another_cohort_is_refused() -> None:
    chain = until_attended(parties(4))
    honest = outcome(chain, shares(chain, parties(4)))
    others = [c for c in ("client-0", "client-1", "client-2") if c not in honest.cohort]
    swapped = (honest.cohort[0], others[0])
    assert "another cohort" in refused(chain.ended, changed(honest, cohort=swapped))
    backwards = honest.cohort[::-1]
    assert "another order" in refused(chain.ended, changed(honest, cohort=backwards))


@given(st.sampled_from(["share", "shares"]), st.integers(0, 255))
def test_a_share_chosen_after_the_others_is_refused(which: str, byte: int) -> None:
    """A party that reveals last could otherwise choose the cohort."""
    hosts = parties(4)
    chain = until_attended(hosts)
    revealed, own = shares(chain, hosts), OWN_SHARE
    late = bytes([byte]).hex() * 32
    if which == "share":
        own = late
    else:
        revealed["client-3"] = late
    if (own, revealed) == (OWN_SHARE, shares(chain, hosts)):
        return
    assert "does not match its commitment" in refused(chain.seed, own, revealed)


@given(st.integers(1, 6), st.data())
def test_a_seed_without_the_shares_of_some_hosts_is_refused(
    count: int, data: st.DataObject
) -> None:
    """A coordinator that knows all shares could otherwise choose which hosts were silent."""
    hosts = parties(count)
    chain = until_attended(hosts)
    chain.seed(OWN_SHARE, shares(chain, hosts))
    some = data.draw(st.lists(st.sampled_from(hosts), unique=True, max_size=count - 1))
    why = f"{len(some)} of {count} hosts revealed their shares of the seed, but all are required"
    assert why in refused(chain.seed, OWN_SHARE, shares(chain, some))


def test_a_second_list_of_commitments_is_refused() -> None:
    chain = until_attended(parties(4))
    again = attendees(chain, parties(3))
    assert "one list only" in refused(chain.attended, again)


def test_a_selection_is_not_repeated() -> None:
    chain = round_of(Chain.begin(RUN), parties(3), 1)
    again = opening(chain, 1, attempt=1, inputs_sha256="33" * 32)
    assert "must be in order" in refused(chain.opened, again)


def test_a_round_is_not_drawn_until_the_cohort_pleases() -> None:
    hosts, chain = parties(3), Chain.begin(RUN)
    for attempt in range(1, MOST_DRAWS + 1):
        chain = chain.opened(opening(chain, 1, attempt))
        chain = chain.attended(attendees(chain, hosts))
    chain = chain.opened(opening(chain, 1, MOST_DRAWS + 1))
    assert "which is the maximum" in refused(chain.attended, attendees(chain, hosts))


@pytest.mark.parametrize("kept", [False, True], ids=["attempts", "rounds"])
def test_a_gap_before_each_draw_gives_no_more_draws(kept: bool) -> None:
    """kept: the coordinator skips attempts of one round; otherwise, it skips rounds."""
    hosts, chain, rounds = parties(3), Chain.begin(RUN), MOST_DRAWS + 1
    for number in range(1, MOST_DRAWS + 1):
        place = (1, number) if kept else (number, 1)
        chain = chain.opened(opening(chain, *place, rounds=rounds, previous=INPUTS))
        chain = chain.attended(attendees(chain, hosts))
    place = (1, rounds) if kept else (rounds, 1)
    chain = chain.opened(opening(chain, *place, rounds=rounds, previous=INPUTS))
    assert "which is the maximum" in refused(chain.attended, attendees(chain, hosts))


def test_a_cohort_allows_the_next_round_all_draws() -> None:
    hosts, chain = parties(3), Chain.begin(RUN)
    for attempt in range(1, MOST_DRAWS + 1):
        chain = chain.opened(opening(chain, 1, attempt))
        chain = chain.attended(attendees(chain, hosts))
    chain = chain.ended(outcome(chain, shares(chain, hosts)).encode())
    chain = chain.opened(opening(chain, 2))
    assert chain.attended(attendees(chain, hosts)).draws == 1


def test_no_round_is_opened_after_the_last() -> None:
    chain = round_of(Chain.begin(RUN), parties(3), 1)
    assert "but the run has 4 rounds" in refused(chain.opened, opening(chain, 5, previous=INPUTS))
    assert "changed during the run" in refused(chain.opened, opening(chain, 2, rounds=9))


def test_a_round_without_a_cohort_is_not_skipped() -> None:
    """Otherwise, each number of a round would allow more draws."""
    hosts = parties(3)
    chain = until_attended(hosts)
    assert "round 1 has no cohort" in refused(chain.opened, opening(chain, 2))
    chain = chain.ended(outcome(chain, shares(chain, hosts)).encode())
    assert "is missing" in refused(chain.opened, opening(chain, 3))
    assert chain.opened(opening(chain, 2)).whole
    lost = chain.opened(opening(chain, 3, previous=INPUTS))  # the host did not get all documents
    assert not lost.whole


def test_settings_stay_the_same_in_a_run() -> None:
    chain = round_of(Chain.begin(RUN), parties(3), 1)
    assert "changed during the run" in refused(chain.opened, opening(chain, 2, count=1))
    assert "changed during the run" in refused(
        chain.opened, opening(chain, 2, selector="round-robin")
    )
    assert "changed during the run" in refused(
        chain.opened, opening(chain, 2, seed=3, commitment="")
    )


def test_documents_of_another_attempt_are_refused() -> None:
    hosts = parties(3)
    chain = until_attended(hosts)
    honest = outcome(chain, shares(chain, hosts))
    assert "another list of available clients" in refused(
        chain.ended, changed(honest, previous=INPUTS)
    )
    fresh = Chain.begin(RUN)
    fresh = fresh.opened(opening(fresh))
    later = Attendees.parse(attendees(fresh, hosts))
    assert "another opening" in refused(fresh.attended, changed(later, previous=INPUTS))
    assert "no attendees yet" in refused(fresh.ended, honest.encode())


def test_a_chain_with_a_gap_is_noticed() -> None:
    hosts = parties(3)
    first = round_of(Chain.begin(RUN), hosts, 1)
    second = opening(first, 2)
    assert first.opened(second).whole
    assert not Chain.begin(RUN).opened(second).whole


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"previous": "no"}'])
def test_a_malformed_document_is_refused(text: bytes) -> None:
    assert "malformed" in refused(Chain.begin(RUN).opened, text)


def test_wrong_numbers_of_earlier_selections_are_refused() -> None:
    hosts, chain = parties(3), Chain.begin(RUN)
    chain = chain.opened(opening(chain, selector="round-robin"))
    chain = chain.attended(attendees(chain, hosts, (0, 0, 0)))
    chain = chain.ended(outcome(chain, shares(chain, hosts)).encode())
    chain = chain.opened(opening(chain, 2, selector="round-robin"))
    times = tuple(chain.times.get(each.client, 0) for each in hosts)
    assert sorted(times) == [0, 1, 1]
    chain.attended(attendees(chain, hosts, times))
    assert "differ" in refused(chain.attended, attendees(chain, hosts, (0, 0, 0)))
    assert "differ" in refused(chain.attended, attendees(chain, hosts))
    assert "differ" in refused(chain.attended, attendees(chain, hosts, times[:2]))


def test_numbers_of_earlier_selections_are_refused_for_uniform() -> None:
    hosts, chain = parties(3), Chain.begin(RUN)
    chain = chain.opened(opening(chain))
    why = "must have numbers of earlier selections for selector round-robin only"
    assert why in refused(chain.attended, attendees(chain, hosts, (0, 0, 0)))


@pytest.mark.parametrize("known", [0, 1])
def test_a_host_that_was_not_sent_all_documents_checks_no_turns(known: int) -> None:
    """The coordinator could otherwise claim any turns, and so choose the cohort. known: number of
    rounds whose documents the host has."""
    hosts, chain = parties(3), Chain.begin(RUN)
    if known:
        chain = chain.opened(opening(chain, selector="round-robin"))
        chain = chain.attended(attendees(chain, hosts, (0, 0, 0)))
        chain = chain.ended(outcome(chain, shares(chain, hosts)).encode())
    later = opening(chain, known + 1, selector="round-robin", previous=INPUTS)
    assert "can't check the turns of round-robin" in refused(chain.opened, later)


def test_hosts_need_the_size_of_the_cohort() -> None:
    chain = Chain.begin(RUN)
    assert "no size of the cohort" in refused(chain.opened, opening(chain, count=0))


# Draws ------------------------------------------------------------------------------------------


@given(
    st.integers(0, 2**63 - 1),
    st.integers(1, 1000),
    st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    st.integers(1, 12),
)
def test_hosts_draw_as_the_selectors_do(
    seed: int, round_number: int, there: list[bool], count: int
) -> None:
    ids = [f"client-{n:02}" for n in range(len(there))]
    available = np.flatnonzero(there)
    population = Population(ids=ids, classes=2, samples=np.zeros(len(ids), np.int64))
    context = SelectionContext(
        round=round_number, seed=seed, count=count, population=population, available=available
    )
    names = [ids[row] for row in available]
    uniform, turns = Uniform(), RoundRobin()
    state = turns.init(population)
    for earlier in range(1, 4):
        rows = np.array([(7 * earlier + seed) % len(ids)])
        state = turns.observe(
            state, RoundOutcome(round=earlier, selected=rows, included=rows, seconds=np.zeros(1))
        )
    by_uniform = uniform.select(uniform.init(population), context)
    by_turns = turns.select(state, context)
    for selector, found, times in (
        ("uniform", by_uniform, None),
        ("round-robin", by_turns, [int(state.arrays["selections"][row]) for row in available]),
    ):
        again = drawn(
            selector,
            seed=seed,
            round_number=round_number,
            count=count,
            available=names,
            times=times,
        )
        assert list(again) == [ids[row] for row in found.rows.tolist()]
