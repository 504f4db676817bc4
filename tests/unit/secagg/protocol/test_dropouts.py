"""Any loss of clients at any stage results in the exact sum, or in none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import pytest
from support.secure_sums import Federation, Run

from potluck.secagg.protocol import MessageType, Purpose
from potluck.secagg.protocol.rules import Rule
from potluck.secagg.protocol.wire.messages import Stage

STAGES = len(Stage)


def subsets(names: list[str]) -> Iterator[list[str]]:
    for size in range(len(names) + 1):
        yield from map(list, combinations(names, size))


def explore(run: Run, alive: list[str], stage: int, outcomes: Counter[str]) -> None:
    """Try every way to lose clients from this stage on; count the outcomes. A lost client stays
    lost.

    Where the session has ended already, the losses that would follow all have that outcome.
    """
    if run.session.over:
        assert run.session.aborted is not None
        outcomes["aborted"] += (STAGES + 1 - stage) ** len(alive)
        return
    for answering in subsets(alive):
        branch = run.fork()
        branch.answer(answering)
        if stage < STAGES - 1:
            explore(branch, answering, stage + 1, outcomes)
        elif branch.session.aborted is not None:
            outcomes["aborted"] += 1
        else:
            assert branch.refusals == {}
            assert branch.rejected == []
            outcomes["exact" if branch.is_exact() else "wrong"] += 1


def all_outcomes(clients: int) -> Counter[str]:
    federation = Federation(clients=clients, purpose=Purpose.UPDATE)
    header = federation.header()
    assert (header.threshold, header.quorum) == (4, 4)
    outcomes: Counter[str] = Counter()
    explore(federation.run(header), federation.names, 0, outcomes)
    assert outcomes.total() == (STAGES + 1) ** clients
    return outcomes


def test_all_7776_loss_patterns_of_five_clients_give_the_exact_sum_or_none() -> None:
    assert all_outcomes(5) == {"exact": 1 + 5 * 5, "aborted": 7_750}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_46656_loss_patterns_of_six_clients_give_the_exact_sum_or_none() -> None:
    assert all_outcomes(6) == {"exact": 406, "aborted": 46_250}


@pytest.mark.parametrize(
    ("stage", "rule", "need"),
    [
        (Stage.ADVERTISE, Rule.TOO_FEW, 4),
        (Stage.SHARE, Rule.TOO_FEW, 4),
        (Stage.UPLOAD, Rule.TOO_FEW, 4),
        (Stage.CONSENT, Rule.CERTIFICATE, 4),
        (Stage.REVEAL, Rule.TOO_FEW, 4),
    ],
)
def test_abort_names_the_stage_the_count_and_the_missing_clients(
    stage: Stage, rule: Rule, need: int
) -> None:
    run = Federation(clients=6).run().until(stage)
    run.answer(["a", "b", "c"])
    aborted = run.session.aborted
    assert aborted is not None
    assert (aborted.abort.stage, aborted.abort.rule) == (stage, rule)
    assert (aborted.abort.have, aborted.abort.need) == (3, need)
    assert aborted.abort.missing == ("d", "e", "f")
    run.answer(["a", "b", "c"])  # they receive the abort, and forget the session
    assert all(run.sessions[name].over for name in "abc" if name in run.sessions)


def test_client_that_missed_a_stage_receives_an_abort() -> None:
    run = Federation(clients=6).run().until(Stage.UPLOAD)
    run.answer(["a", "b", "c", "d", "e"])
    [message] = run.pending["f"]
    assert message.type is MessageType.ABORT
    run.take("f", run.tell("f", run.next("f")))
    assert run.sessions["f"].over
    assert run.finish().is_exact()


def test_dropped_client_is_not_in_the_sum_even_if_its_vector_arrives_late() -> None:
    run = Federation(clients=6).run().until(Stage.UPLOAD)
    late = run.next("f")
    run.answer(["a", "b", "c", "d", "e"])
    run.next("f")  # the abort does not reach it
    run.take("f", run.tell("f", late))
    assert "f" in run.uploads
    run.finish()
    unmasking = run.session.unmasking
    assert unmasking is not None
    assert unmasking.survivors == ("a", "b", "c", "d", "e")
    assert run.is_exact()


def test_threshold_counts_hosts_and_not_clients() -> None:
    # An attacker that controls one host controls five of the eight clients.
    shared = dict.fromkeys("abcde", "big")
    federation = Federation(clients=8, hosts_of=shared)
    assert federation.header().threshold == (8 + 5) // 2 + 1
    run = federation.run().until(Stage.SHARE)
    run.answer()
    run.answer(list("abcdefg"))  # clients of three of the four hosts
    aborted = run.session.aborted
    assert aborted is not None
    assert (aborted.abort.rule, aborted.abort.have, aborted.abort.need) == (Rule.TOO_FEW, 3, 4)
