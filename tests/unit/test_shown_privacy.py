"""The privacy loss of one run, as the model card, the report and the web UI show it."""

from __future__ import annotations

from datetime import UTC, datetime

from support.operator_service import committed, member, status

from potluck.common.disclosure import CLAIM
from potluck.common.records.round import Round
from potluck.common.records.round_message import round_of
from potluck.common.run_file.claims import privacy_claim
from potluck.deploy.cards.card_source import make_card
from potluck.deploy.commands.report_command import privacy_lines
from potluck.deploy.operator.run_view import RunView, observe
from potluck.deploy.view.run_report import report_values, run_report
from potluck.page.disclosed_shown import shown_disclosures
from potluck.page.run_shown import ClientList, shown_run
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

RUN_FILE = '[task]\nname = "digits"\n[privacy]\nepsilon = 3.0\n'
PROFILES = [operator_pb2.ClientProfile(client_id=f"client-{number}") for number in range(3)]


def events() -> list[operator_pb2.WatchRunResponse]:
    """Return the events of two rounds: client-0 trains in both, client-1 in the first."""
    first, second = committed(1, 0.5, member(0), member(1)), committed(2, 0.6, member(0))
    for event, largest, clients in (
        (first, 0.9, {"client-0": 0.9, "client-1": 0.7}),
        (second, 1.4, {"client-0": 1.4}),
    ):
        event.committed.privacy.CopyFrom(
            operator_pb2.RoundPrivacy(
                delta=1e-5, largest=largest, median=0.8, near_limit=1, refused=2, clients=clients
            )
        )
    return [status(RunState.RUN_STATE_RUNNING, committed=2), first, second]


def rounds() -> list[Round]:
    return [round_of(event.committed) for event in events()[1:]]


def test_model_card_states_the_privacy_claim_and_the_loss_of_each_client() -> None:
    card = make_card(events()[0].status, rounds(), RUN_FILE, [])
    assert [(each.client, each.update_epsilon) for each in card.clients] == [
        ("client-0", 1.4),
        ("client-1", 0.7),
    ]
    assert card.privacy.noise is not None
    assert (card.privacy.noise.largest, card.privacy.noise.refused) == (1.4, 2)
    text = card.markdown()
    assert "hide whether any single record was among a client's samples" in text
    assert "No client has spent more than ε = 1.4 on its updates" in text
    assert "at δ = 1e-05 per record" in text
    assert "Excluded: 2 clients." in text
    assert "| ε of updates |" in text


def test_model_card_of_a_run_without_noise_has_no_epsilon_column() -> None:
    plain = [round_of(committed(1, 0.5, member(0)).committed)]
    card = make_card(events()[0].status, plain, '[task]\nname = "digits"\n', [])
    assert card.privacy.noise is None
    assert card.privacy.claim == ""
    assert "ε of updates" not in card.markdown()


def test_run_report_has_the_privacy_loss_of_each_round() -> None:
    [line] = privacy_lines(rounds())
    assert line == (
        "  privacy loss of updates: ε ≤ 1.4 (δ = 1e-05), 1 client near the limit, 2 refused"
    )
    values = report_values(run_report(rounds(), 2, PROFILES))
    assert [each["privacy"]["largest"] for each in values] == [0.9, 1.4]


def test_web_ui_shows_the_privacy_loss_by_round_and_by_client() -> None:
    view = RunView()
    for event in events():
        view = observe(view, event)
    shown = shown_run(view, ClientList(), datetime(2026, 5, 4, tzinfo=UTC))
    assert shown is not None
    assert [each.noise and each.noise.largest for each in shown.rounds] == [0.9, 1.4]
    privacy = shown_disclosures(rounds(), 2, PROFILES, [], RUN_FILE).privacy
    assert [(each.client, each.updates) for each in privacy.clients] == [
        ("client-0", 1.4),
        ("client-1", 0.7),
    ]
    assert privacy.claim.startswith("[privacy]: updates hide whether any single record")


def test_privacy_claim_of_each_kind_of_run_states_what_is_protected() -> None:
    assert privacy_claim({}) == ""
    assert privacy_claim({"secure_aggregation": True}) == f"secure_aggregation: {CLAIM}"
    fixed = privacy_claim({"privacy": {"noise_multiplier": 1.0, "delta": 1e-6}})
    assert "an ε that grows with each training and δ = 1e-06" in fixed
    assert "ε ≤ 3 in this run" in privacy_claim({"privacy": {"epsilon": 3}})
    whole = {"secure_aggregation": True, "privacy": {"unit": "client", "epsilon": 3}}
    assert privacy_claim(whole).startswith("[privacy]: sums hide each client's whole update")
