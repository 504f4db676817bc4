"""An input without noise is released in only one set, over sessions of a lying coordinator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Federation, Run

from potluck.secagg.protocol import (
    ClientPolicy,
    Ledger,
    Noise,
    Purpose,
    Refusal,
    Rule,
    SetCertificate,
    complete_thresholds,
    decode,
)
from potluck.secagg.protocol.client.client_session import Revealed
from potluck.secagg.protocol.policy.ledger import Settled, Upload
from potluck.secagg.protocol.wire.messages import Advert, RosterMessage, Stage

ALL = "abcdef"
POLICY = ClientPolicy(
    least_hosts=4,
    colluding_hosts=1,
    disclosures=frozenset({"total", "cells", "protocol", "update"}),
    unprotected=frozenset({"protocol"}),
)


def sessions(
    names: Collection[str],
    before: Run | None = None,
    *,
    purpose: Purpose = Purpose.HISTOGRAM,
    policy: ClientPolicy = POLICY,
    certified: tuple[SetCertificate, ...] = (),
    **changes: Any,
) -> Run:
    """Return a session of some of the clients, after an earlier one or while it is unfinished."""
    federation = Federation(purpose=purpose, policy=policy).part(names)
    thresholds = complete_thresholds(federation.hosts.values(), 1)
    beside = [] if before is None else before.beside
    header = federation.header(
        session_id=bytes([len(beside) + 1] * 16),
        colluding_hosts=1,
        threshold=thresholds.threshold,
        quorum=thresholds.quorum,
        **changes,
    )
    ledgers = {} if before is None else before.ledgers
    return federation.run(header, ledgers=ledgers, beside=beside, certified=certified)


def rules(run: Run) -> set[Rule]:
    return {refusal.rule for refusal in run.refusals.values()}


def cut_off(run: Run, name: str) -> Run:
    """Finish a session whose sum includes a client that was not asked for its shares."""
    run.until(Stage.CONSENT)
    run.next(name)
    rest = [other for other in run.federation.names if other != name]
    run.answer(rest)
    while not run.session.over:
        run.answer(rest)
    assert run.is_exact()
    assert name in run.total_clients()
    return run


# Sets that are known.


@pytest.mark.parametrize("purpose", [Purpose.HISTOGRAM, Purpose.UPDATE])
def test_input_is_summed_again_only_over_the_identical_set(purpose: Purpose) -> None:
    first = sessions(ALL, purpose=purpose).finish()
    assert sessions(ALL, first, purpose=purpose).finish().is_exact()
    for names in ("abcde", "abcdefg"):
        other = sessions(names, first, purpose=purpose).finish()
        assert other.session.aborted is not None
        assert rules(other) == {Rule.RELEASED}
        assert set(other.refusals) == set(names) & set(ALL)


def test_retry_after_a_faked_abort_without_one_client_is_refused() -> None:
    first = sessions(ALL).finish()
    retry = sessions(ALL, first, attempt=2).until(Stage.UPLOAD)
    retry.answer(list("abcde"))
    retry.answer()
    assert set(retry.refusals) == set("abcde")
    assert rules(retry) == {Rule.RELEASED}
    assert retry.session.aborted is not None


def test_input_of_a_total_is_refused_in_a_cell_and_vice_versa() -> None:
    for first, second in (("total", "cells"), ("cells", "total")):
        before = sessions(ALL, disclosure=first).finish()
        assert rules(sessions("abcde", before, disclosure=second).finish()) == {Rule.RELEASED}


def test_clients_released_in_another_set_do_not_prevent_a_sum() -> None:
    """These clients do not upload, and the others reach the quorum without them."""
    first = sessions("abcde").finish()
    many = sessions("abcdeghijklmnopq", first).finish()
    assert set(many.refusals) == set("abcde")
    assert many.is_exact()
    assert not set("abcde") & set(many.total_clients())


def test_different_set_is_summed_for_another_model_or_with_noise() -> None:
    first = sessions(ALL, purpose=Purpose.UPDATE).finish()
    other = sessions("abcde", first, purpose=Purpose.UPDATE, model_digest=bytes([1] * 32))
    assert other.finish().refusals == {}
    noise = Noise(epsilon=0.1, sensitivity=2, contributors=3)
    for name in ALL:
        first.ledgers[name] = first.ledgers[name].model_copy(update={"epsilon_budget": 1.0})
    assert sessions("abcde", first, noise=noise).finish().refusals == {}


def test_different_set_is_summed_if_the_owner_disables_the_rule() -> None:
    policy = replace(POLICY, one_set=False)
    first = sessions(ALL, purpose=Purpose.UPDATE, policy=policy).finish()
    assert sessions("abcde", first, purpose=Purpose.UPDATE, policy=policy).finish().is_exact()


def test_unprotected_sums_are_repeatable_and_exclude_protected_ones() -> None:
    first = sessions(ALL, disclosure="protocol").finish()
    again = sessions("abcde", first, disclosure="protocol").finish()
    assert again.is_exact()
    total = sessions(ALL, again, disclosure="total").finish()
    assert rules(total) == {Rule.RELEASED}


# Uploads whose set is not known.


def test_client_cut_off_after_its_upload_refuses_other_sets() -> None:
    first = cut_off(sessions(ALL), "f")
    for names in ("fghij", "bcdef"):
        other = sessions(names, first).finish()
        assert other.refusals["f"].rule is Rule.RELEASED
        assert "may be complete" in other.refusals["f"].detail


def test_certificate_tells_a_cut_off_client_the_released_set() -> None:
    first = cut_off(sessions(ALL), "f")
    certificate = first.session.certificate
    assert certificate is not None
    same = sessions(ALL, first, certified=(certificate,)).finish()
    assert same.is_exact()
    [settled] = [each for each in same.ledgers["f"].entries if isinstance(each, Settled)][:1]
    assert settled.clients == tuple(ALL)
    other = sessions("bcdef", same).finish()
    assert "f" in other.refusals


def test_certificate_that_omits_a_client_proves_that_the_client_was_in_no_sum() -> None:
    first = sessions(ALL).until(Stage.UPLOAD)
    first.take("f", first.tell("f", first.pending["f"][0]))  # its vector arrives too late
    first.pending["f"] = []
    late = first.ledgers["f"]
    first = sessions(ALL)
    first.until(Stage.UPLOAD).answer(list("abcde"))
    first.ledgers["f"] = late
    first.finish()
    certificate = first.session.certificate
    assert certificate is not None
    assert certificate.clients == tuple("abcde")
    retry = sessions(ALL, first, certified=(certificate,)).until(Stage.SHARE)
    step = retry.tell("f", retry.next("f"))
    assert step.refusal is None
    assert [each.clients for each in step.entries if isinstance(each, Settled)] == [()]


@pytest.mark.parametrize(
    ("forge", "rule"),
    [
        ({"clients": tuple("abcde")}, Rule.RELEASED),
        ({"clients": tuple("bcdef")}, Rule.CERTIFICATE),
        ({"signatures": dict.fromkeys("abcde", "00" * 64)}, Rule.RELEASED),
        ({"clients": tuple("fedcba")}, Rule.MALFORMED),
        ({"signatures": {}}, Rule.RELEASED),
    ],
)
def test_forged_certificate_is_refused(forge: dict[str, Any], rule: Rule) -> None:
    first = cut_off(sessions(ALL), "f")
    certificate = first.session.certificate
    assert certificate is not None
    wrong = certificate.model_copy(update=forge)
    refused = sessions(ALL, first, certified=(wrong,)).until(Stage.SHARE)
    step = refused.tell("f", refused.next("f"))
    assert step.refusal is not None
    assert step.refusal.rule is rule


def test_retry_after_client_losses_completes_without_certificates() -> None:
    first = sessions(ALL).until(Stage.CONSENT)
    first.answer(list("ab"))
    assert first.session.aborted is not None
    assert [type(each) for each in first.ledgers["a"].entries] == [Upload]
    retry = sessions("abcde", first, attempt=2).finish()
    assert retry.is_exact()
    assert retry.refusals == {}


def test_retry_is_refused_if_fewer_than_a_quorum_renounced_the_first_sum() -> None:
    first = sessions(ALL).until(Stage.CONSENT)  # four consents would complete it
    retry = sessions("abcghi", first).finish()
    assert set(retry.refusals) == set("abc")
    assert retry.session.over


def test_client_that_renounced_a_session_reveals_no_shares_in_it() -> None:
    first = sessions(ALL).until(Stage.REVEAL)
    second = sessions("abcde", first)
    second.answer()
    assert set(first.sessions) == {"f"}
    first.finish()
    assert first.session.aborted is not None
    assert second.finish().is_exact()


def test_unfinished_sum_of_another_run_is_not_ended() -> None:
    first = sessions(ALL, purpose=Purpose.UPDATE).until(Stage.CONSENT)
    other = sessions(ALL, first, purpose=Purpose.UPDATE, run="run-2").finish()
    assert rules(other) == {Rule.RELEASED}
    assert all("in progress for run" in each.detail for each in other.refusals.values())
    assert first.finish().is_exact()


def test_advert_lists_the_sessions_in_which_shares_were_revealed() -> None:
    first = sessions(ALL).finish()
    second = sessions(ALL, first).until(Stage.SHARE)
    roster = decode(RosterMessage, second.pending["a"][0].payload)
    listed = {decode(Advert, each.payload).revealed for each in roster.adverts}
    assert listed == {(first.header.session_id,)}


def test_reveal_is_refused_after_a_release_in_another_session() -> None:
    run = sessions(ALL).until(Stage.REVEAL)
    other = sessions(ALL)
    other.until(Stage.UPLOAD).answer(list("abcde"))
    other.finish()
    renamed = [
        each.model_copy(update={"session_id": "77" * 16}) for each in other.ledgers["a"].entries
    ]
    run.ledgers["a"] = Ledger(entries=tuple(renamed))
    step = run.tell("a", run.next("a"))
    assert step.refusal == Refusal(Rule.RELEASED, step.refusal.detail if step.refusal else "")


# All together.


@dataclass(frozen=True)
class Plan:
    """One session of a history. group: its clients. late: clients that are silent from the stage
    `late_from` on. rests_at: stage at which it pauses until the next session has been played.
    restarting: clients that restart during the pause."""

    group: str
    shown: bool
    late: frozenset[str]
    late_from: Stage
    rests_at: Stage | None
    restarting: frozenset[str]


few = st.frozensets(st.sampled_from("abcdefhij"), max_size=2)
plans = st.builds(
    Plan,
    group=st.builds(
        lambda most, few: "".join(sorted({*most, *few})),
        st.sampled_from(["abcd", "abcde", "fghij", "efghij", "abcdefghij"]),
        few,
    ),
    shown=st.booleans(),
    late=few,
    late_from=st.sampled_from([Stage.UPLOAD, Stage.CONSENT, Stage.REVEAL]),
    rests_at=st.sampled_from([None, None, Stage.SHARE, Stage.CONSENT, Stage.REVEAL]),
    restarting=few,
)


def hand_out(run: Run, plan: Plan) -> None:
    """Play a stage. The colluder remembers nothing, and answers every request."""
    beside = run.beside
    for _ in run.pending.get("g", ()):
        run.ledgers["g"], run.beside = Ledger(), []
        run.take("g", run.tell("g", run.next("g")))
    run.beside = beside
    now = run.session.collecting
    late = now is not None and list(Stage).index(now.stage) >= list(Stage).index(plan.late_from)
    run.answer(set(run.federation.names) - {"g"} - (plan.late if late else frozenset()))


def go_on(run: Run, plan: Plan, until: Stage | None) -> None:
    while (now := run.session.collecting) is not None and now.stage is not until:
        hand_out(run, plan)


def played(history: list[Plan]) -> list[Run]:
    """Play the sessions of a history, each as far as it gets; return them."""
    resting: list[tuple[Run, Plan]] = []
    first: Run | None = None
    for plan in history:
        beside = [] if first is None else first.beside
        found = [each.session.certificate for each in beside if plan.shown]
        shown = tuple(each for each in found if each is not None)
        run = sessions(plan.group, first, certified=shown)
        first = first or run
        go_on(run, plan, plan.rests_at)
        for earlier, its in resting:
            go_on(earlier, its, None)
        resting = [(run, plan)]
        for each in run.beside:
            for name in plan.restarting:
                each.sessions.pop(name, None)
    for earlier, its in resting:
        go_on(earlier, its, None)
    return [] if first is None else first.beside


def unmaskable(run: Run) -> frozenset[str]:
    """Return the set whose sum the coordinator can unmask with the colluder's help; empty if there
    is none."""
    certificate = run.session.certificate
    if certificate is None:
        return frozenset()
    given = {name for name, each in run.sessions.items() if isinstance(each.state, Revealed)}
    given |= {"g"} & set(run.federation.names)
    return frozenset(certificate.clients if len(given) >= run.header.threshold else ())


@given(st.lists(plans, min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_no_honest_input_is_released_in_two_sets(history: list[Plan]) -> None:
    """This holds for any clients that a lying coordinator invites or disconnects, with one
    colluder."""
    sets: dict[str, set[frozenset[str]]] = defaultdict(set)
    for run in played(history):
        found = unmaskable(run)
        for name in found - {"g"}:
            sets[name].add(found)
    assert all(len(found) == 1 for found in sets.values())
