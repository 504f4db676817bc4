"""Sessions use the membership in force, and end if a member is revoked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.secure_sums import Federation, Run, member_key

from potluck.common.net.membership import public_text
from potluck.secagg.protocol import Rule, Situation, client
from potluck.secagg.protocol.wire.messages import Stage

REVOKED = frozenset({("f", public_text(member_key("f")))})


def begun(**changes: Any) -> Run:
    federation = Federation()
    return federation.run(federation.header(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"membership_epoch": 0}, "membership epoch 0, but this client has seen the newer epoch 1"),
        (
            {"membership_epoch": 2},
            "membership epoch 2, but this client has epoch 1; give the client's host",
        ),
        ({"membership_sha256": bytes(32)}, "different members in membership epoch 1"),
    ],
    ids=["older", "newer", "another"],
)
def test_session_of_another_membership_is_refused(changes: Any, words: str) -> None:
    run = begun(**changes)
    step = run.tell("a", run.next("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.MEMBERSHIP
    assert words in step.refusal.detail


def test_client_whose_key_differs_from_its_member_record_refuses_the_session() -> None:
    run = begun()
    party = replace(run.federation.parties["a"], key=member_key("another"))
    expected = run.federation.expected(run.header)
    step = client.begin(party, run.next("a"), expected, run.situation("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.MEMBER


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.CONSENT, Stage.REVEAL])
def test_client_refuses_to_continue_with_a_member_revoked_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun().until(stage)
    asked = run.next("a")
    known = run.situation("a")
    after = Situation(now=known.now, random=known.random, ledger=known.ledger, revoked=REVOKED)
    step = client.handle(run.sessions["a"], asked, after)
    assert step.refusal is not None
    assert step.refusal.rule is Rule.MEMBER
    assert "'f' was revoked" in step.refusal.detail
    assert step.entries == ()


def test_session_continues_if_the_revoked_member_left_before() -> None:
    run = begun().until(Stage.UPLOAD)
    run.answer(list("abcde"))
    asked = run.next("a")
    known = run.situation("a")
    after = Situation(now=known.now, random=known.random, ledger=known.ledger, revoked=REVOKED)
    step = client.handle(run.sessions["a"], asked, after)
    assert step.refusal is None
    assert run.finish().is_exact()
