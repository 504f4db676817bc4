"""`potluck audit selection` and `potluck-client selections` on runs of a real coordinator with real
hosts."""

from __future__ import annotations

import io
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.sum_federation import EXACT, Members, SumFederation, host_of, sum_federation
from typer.testing import CliRunner

from potluck.client.cli import app as client_app
from potluck.common.errors import ConfigurationError
from potluck.common.net.membership import Members as MembershipOf
from potluck.common.net.membership import MembershipDocument, public_text
from potluck.server.config import CoordinatorConfig
from potluck.server.eligibility.eligibility import ScarceError
from potluck.server.run import commit
from potluck.server.selection import RoundOutcome, SelectionContext
from potluck.server.selectors.round_robin import RoundRobin
from potluck.server.state import State
from potluck.server.store import RunState
from potluck.server.store.records import AttemptKey
from potluck.verifiable.audit_command import app
from potluck.verifiable.coordinator.committed_run import CommittedRun
from potluck.verifiable.coordinator.selection_audit import AuditedSelection, SelectionAudit
from potluck.verifiable.coordinator.selection_inputs import inputs_sha256, part_sha256
from potluck.verifiable.coordinator.selection_log import SelectionLog
from potluck.verifiable.documents import Attendees, Document, Opening, Outcome
from potluck.verifiable.host.selection_report import SelectionReport

CLIENTS = 6
RUN = f"""
rounds = 3
clients_per_round = 3
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 2}}
evaluation = {{every = 0}}
"""
VERIFIABLE = RUN + "selection = {verifiable = true}\n"
VERIFIED = RUN + "selection = {verifiable = true, hosts_verify = true}\n"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SumFederation]:
    members = Members.make(tmp_path_factory.mktemp("members"), CLIENTS)
    folder = tmp_path_factory.mktemp("federation")
    async with sum_federation(members, folder) as found:
        await found.start(disclosure=EXACT.model_copy(update={"questions": ("loss",)}))
        yield found
        await found.stack.aclose()


def with_selector(selector: str) -> str:
    """Return a verifiable run with a selector, which gets noisy profiles if it needs any."""
    asks = 'profiles = {disclosure = "noisy", epsilon = 1.0}\n'
    return (
        f'{VERIFIABLE}selector = {{name = "{selector}"}}\n'
        f"{asks * (selector in ('fedentopt', 'flips'))}"
    )


async def finished(federation: SumFederation, run_file: str) -> str:
    row = await federation.finished(run_file)
    assert row.state is RunState.FINISHED, row.reason
    return row.run_id


def audited(federation: SumFederation, run_id: str) -> list[AuditedSelection]:
    return list(SelectionAudit(federation.coordinator.config, run_id).results())


def database(federation: SumFederation) -> Path:
    return federation.coordinator.config.state_directory / "potluck.sqlite3"


@pytest.mark.parametrize(
    "selector",
    [
        *("uniform", "fedentopt", "pow-d", "oort", "divfl", "everyone"),
        *("round-robin", "flips", "k-vib"),
    ],
)
async def test_audit_of_an_honest_run_finds_no_difference(
    federation: SumFederation, selector: str
) -> None:
    """The selectors have no state, or need profiles, questions, reports or facts about updates."""
    run_id = await finished(federation, with_selector(selector))
    found = audited(federation, run_id)
    assert [each.round for each in found] == [1, 2, 3]
    assert [each.differences for each in found] == [()] * 3
    assert all(each.committed and each.signatures == each.due == 3 * CLIENTS for each in found)


async def cohorts(federation: SumFederation, run_id: str) -> list[list[str]]:
    rows = await federation.coordinator.store.call(lambda store: store.rounds(run_id))
    return [[member.client_id for member in row.members] for row in rows]


async def test_masked_run_with_tag_limit_agrees(federation: SumFederation) -> None:
    """The selector may be called again because of tags, and hosts may be added to the cohort."""
    masked = VERIFIABLE.replace("clients_per_round = 3", "clients_per_round = 5")
    limits = "selector_limits = {at_most_per = {site = 5}}\nsecure_aggregation = true\n"
    found = audited(federation, await finished(federation, masked + limits))
    assert [each.differences for each in found] == [()] * 3


async def test_verifiable_run_selects_the_same_cohorts(federation: SumFederation) -> None:
    plain, verifiable = await finished(federation, RUN), await finished(federation, VERIFIABLE)
    assert await cohorts(federation, plain) == await cohorts(federation, verifiable)


async def test_audit_finds_a_changed_cohort(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIED)
    assert all(each.agrees for each in audited(federation, run_id))
    with sqlite3.connect(database(federation)) as connection:
        connection.execute(
            "UPDATE members SET reason = 'a favour' WHERE run_id = ? AND round = 2", [run_id]
        )
    [_, second, _] = audited(federation, run_id)
    assert second.differences == (
        "the reasons stored with the round are not the reasons of the selection",
    )


async def test_audit_finds_changed_inputs(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIABLE)
    log = federation.coordinator.config.state_directory / "selections" / f"{run_id}.jsonl"
    log.write_text(log.read_text().replace('\\"rounds\\":3', '\\"rounds\\":4', 1))
    [first, second, _] = audited(federation, run_id)
    assert first.differences == ("the inputs of the selection are not the committed inputs",)
    assert second.agrees


async def test_audit_finds_a_round_without_commitment(federation: SumFederation) -> None:
    run_id = await finished(federation, VERIFIABLE)
    log = federation.coordinator.config.state_directory / "selections" / f"{run_id}.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    [third] = [n for n, line in enumerate(lines) if '\\"round\\":3' in line and '"opening"' in line]
    log.write_text("".join(lines[:third]))
    assert [each.differences for each in audited(federation, run_id)] == [
        (),
        (),
        ("the log has no committed selection for this round",),
    ]


async def test_audit_command_exits_with_1_if_a_selection_differs(
    federation: SumFederation, tmp_path: Path
) -> None:
    run_id = await finished(federation, VERIFIED)
    arguments = [run_id, "--config", str(coordinator_file(federation, tmp_path))]
    honest = CliRunner().invoke(app, arguments)
    assert honest.exit_code == 0, honest.output
    assert f"run {run_id} has 3 selections, of which 0 differ from the record" in honest.output
    with sqlite3.connect(database(federation)) as connection:
        connection.execute(
            "UPDATE members SET client_id = 'client-x' WHERE run_id = ? AND round = 1 "
            "AND position = 0",
            [run_id],
        )
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 1
    [first, *others] = map(json.loads, found.output.splitlines())
    assert not first["agrees"]
    assert "client-x" in first["differences"][0]
    assert all(each["agrees"] for each in others)


def coordinator_file(federation: SumFederation, folder: Path) -> Path:
    """Write the coordinator's configuration file."""
    settings, config = federation.coordinator.config, folder / "coordinator.toml"
    tls = settings.tls
    config.write_text(
        f"state_directory = {json.dumps(str(settings.state_directory))}\n"
        f"federation_root = {json.dumps(str(settings.federation_root))}\n"
        f"members = {json.dumps(str(settings.members))}\n"
        f"[tls]\ncertificate = {json.dumps(str(tls.certificate))}\n"
        f"key = {json.dumps(str(tls.key))}\nauthority = {json.dumps(str(tls.authority))}\n"
    )
    return config


async def test_audit_of_a_run_without_commitments_is_refused(federation: SumFederation) -> None:
    run_id = await finished(federation, RUN.replace("rounds = 3", "rounds = 1"))
    with pytest.raises(ConfigurationError, match="did not commit to its selections"):
        audited(federation, run_id)


async def test_verifiable_run_with_hidden_selector_inputs_is_refused(
    federation: SumFederation,
) -> None:
    with pytest.raises(ConfigurationError, match="hosts can't recompute selector 'fedentopt'"):
        await federation.coordinator.start_run(f'{VERIFIED}selector = {{name = "fedentopt"}}\n')


# Coordinators that lie ---------------------------------------------------------------------------


def bumped(state: State) -> State:
    """Return a state with 1 added to the first element of each array."""
    arrays = {name: array.copy() for name, array in state.arrays.items()}
    for array in arrays.values():
        array.flat[:1] += 1
    return State(scalars=state.scalars, arrays=arrays)


def lie(
    monkeypatch: pytest.MonkeyPatch,
    rounds: tuple[int, ...],
    change: Callable[[CommittedRun, SelectionContext], SelectionContext],
) -> None:
    """Make the coordinator change the inputs of these rounds before it commits to them."""
    honest = CommittedRun.begin

    async def begin(
        self: CommittedRun, context: SelectionContext, key: AttemptKey
    ) -> SelectionContext:
        changed = change(self, context) if key.round in rounds else context
        return await honest(self, changed, key)

    monkeypatch.setattr(CommittedRun, "begin", begin)


def another_state(record: CommittedRun, context: SelectionContext) -> SelectionContext:
    models = record._run.models
    models.states = replace(models.states, selector=bumped(models.states.selector))
    return context


def other_profiles(_: CommittedRun, context: SelectionContext) -> SelectionContext:
    population = context.population
    assert population.label_counts is not None
    return replace(
        context, population=replace(population, label_counts=population.label_counts[::-1])
    )


@pytest.mark.parametrize("selector", ["round-robin", "flips", "k-vib", "oort"])
async def test_audit_finds_a_state_whose_arrays_changed_between_rounds(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch, selector: str
) -> None:
    """The coordinator commits to the changed state, and selects with it."""
    with monkeypatch.context() as patched:
        lie(patched, (2,), another_state)
        run_id = await finished(federation, with_selector(selector))
    why = "the selector's state is not its state after the previous round"
    assert [each.differences for each in audited(federation, run_id)] == [(), (why,), ()]


async def test_audit_finds_a_first_state_that_is_not_the_initial_one(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        lie(patched, (1,), another_state)
        run_id = await finished(federation, with_selector("round-robin"))
    why = "the selector's state is not its initial state"
    assert [each.differences for each in audited(federation, run_id)] == [(why,), (), ()]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param({"seed": 77}, "the seed is 77, but 0 by the run file", id="seed"),
        pytest.param(
            {"round": 9}, "the round of the inputs is 9, but 2 by the run file", id="round"
        ),
        pytest.param(
            {"count": 2}, "the number of clients is 2, but 3 by the run file", id="clients"
        ),
        pytest.param(
            {"epochs": 7}, "the number of epochs is 7, but 3 by the run file", id="epochs"
        ),
    ],
)
async def test_audit_finds_inputs_that_are_not_the_run_file_s(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str
) -> None:
    """The coordinator could otherwise try seeds until it likes the cohort, and commit to the last
    one."""
    with monkeypatch.context() as patched:
        lie(patched, (1, 2, 3), lambda _, context: replace(context, **changed))
        run_id = await finished(federation, with_selector("uniform"))
    found = audited(federation, run_id)
    assert why in found[1].differences
    assert not any(each.agrees for each in found)


async def test_audit_names_clients_that_left_or_have_another_key(
    federation: SumFederation,
) -> None:
    """A record may have ended or begun since: only the key counts."""
    run_id = await finished(federation, VERIFIED)
    audit = SelectionAudit(federation.coordinator.config, run_id)
    known, now = audit._members, datetime.now(UTC)
    assert known is not None
    records = {**known.records}
    del records["client-0"]
    records["client-1"] = records["client-1"].model_copy(
        update={"public_key": public_text(Ed25519PrivateKey.generate())}
    )
    later = {"not_before": now + timedelta(days=1), "not_after": now + timedelta(days=9)}
    records["client-2"] = records["client-2"].model_copy(update=later)
    members = tuple(records[client] for client in sorted(records))
    audit._members = MembershipOf(
        MembershipDocument(federation=known.federation, epoch=9, members=members)
    )
    for each in audit.results():
        assert each.signatures == 3 * (CLIENTS - 2)
        assert len(each.differences) == 2 * 3
        assert sum("'client-0' can't be checked" in why for why in each.differences) == 3
        assert sum("'client-1' is not valid" in why for why in each.differences) == 3


@pytest.mark.parametrize("forgets", [False, True], ids=["running", "restarted"])
async def test_a_host_that_was_left_out_of_a_round_counts_its_turns(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch, *, forgets: bool
) -> None:
    """Client-0 is not available in round 2. Its host gets the round's documents before round 3.
    forgets: the coordinator restarts, and no longer knows what hosts have."""

    def leave_out(record: CommittedRun, context: SelectionContext) -> SelectionContext:
        if forgets:
            record._held.clear()
        fewer = context.available[1:] if context.round == 2 else context.available
        return replace(context, available=fewer)

    with monkeypatch.context() as patched:
        lie(patched, (2, 3), leave_out)
        run_id = await finished(federation, f'{VERIFIED}selector = {{name = "round-robin"}}\n')
    log = SelectionLog(federation.coordinator.config.state_directory, run_id)
    attendees = [each.chain.attendees for each in log.attempts]
    assert [len(each.available) for each in attendees if each] == [CLIENTS, CLIENTS - 1, CLIENTS]
    found = audited(federation, run_id)
    assert [each.differences for each in found] == [()] * 3
    for client in federation.members.names:
        report = host_report(federation, run_id, client)
        assert [each["documents"] for each in report] == [each.documents for each in found]
        assert not any(each["gap"] for each in report)


async def test_hosts_and_coordinator_count_the_same_turns_with_over_selection(
    federation: SumFederation,
) -> None:
    """A client that over-selection made unnecessary has had its turn. Otherwise, hosts would
    compute other cohorts than the coordinator."""
    spare = "round = {over_selection = 1}\n"
    run_id = await finished(federation, f'{VERIFIED}selector = {{name = "round-robin"}}\n{spare}')
    found = audited(federation, run_id)
    assert [(each.cohort, each.differences) for each in found] == [(4, ())] * 3
    first, second, third = await cohorts(federation, run_id)
    assert set(first) | set(second) == set(federation.members.names)
    assert len(set(second) & set(third)) == 2


async def test_late_updates_are_refused(federation: SumFederation) -> None:
    late = "round = {late_updates = {rounds = 1}}\n"
    with pytest.raises(ConfigurationError, match="hosts train by the last selection only"):
        await federation.coordinator.start_run(VERIFIABLE + late)


async def test_audit_accepts_the_initial_state_of_fewer_clients(federation: SumFederation) -> None:
    """Clients may join between the start of the run and round 1."""
    start = CommittedRun.begin

    async def begin(
        self: CommittedRun, context: SelectionContext, key: AttemptKey
    ) -> SelectionContext:
        if key.round == 1:
            first = replace(context.population, ids=context.population.ids[:4])
            self._run.models.start_selector(first)
        return await start(self, context, key)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CommittedRun, "begin", begin)
        run_id = await finished(federation, with_selector("round-robin"))
    assert [each.differences for each in audited(federation, run_id)] == [()] * 3


async def test_audit_finds_a_removed_state(federation: SumFederation) -> None:
    run_id = await finished(federation, with_selector("round-robin"))
    log = selections_of(federation) / f"{run_id}.jsonl"
    lines = [
        line
        for line in log.read_text().splitlines(keepends=True)
        if "state" not in json.loads(line)
    ]
    log.write_text("".join(lines))
    state = "the records lack the selector's state after the previous round"
    facts = "the records lack the facts from which the selector learned"
    found = [each.differences for each in audited(federation, run_id)]
    assert found == [(facts,), (state, facts), (state, facts)]


async def test_audit_finds_a_state_that_does_not_follow_from_its_round(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RoundRobin.observe
    with monkeypatch.context() as patched:
        patched.setattr(
            RoundRobin, "observe", lambda self, state, found: bumped(honest(self, state, found))
        )
        run_id = await finished(federation, with_selector("round-robin"))
    why = "the selector's state after the round does not follow from the round"
    assert [each.differences for each in audited(federation, run_id)] == [(why,)] * 3


def lie_of_outcomes(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[RoundOutcome], RoundOutcome]
) -> None:
    """Make the coordinator's selector learn from changed facts, which the coordinator records."""
    honest = commit._outcome
    monkeypatch.setattr(commit, "_outcome", lambda run, action: change(honest(run, action)))


async def test_audit_finds_a_round_that_the_selector_learned_without_an_update(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        lie_of_outcomes(patched, lambda found: replace(found, included=found.included[1:]))
        run_id = await finished(federation, with_selector("flips"))
    why = "the selector learned from other updates than those of the round's model"
    assert [each.differences for each in audited(federation, run_id)] == [(why,)] * 3


async def test_audit_takes_durations_and_reports_as_recorded(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit: the selector has learned from durations that were not measured."""
    with monkeypatch.context() as patched:
        lie_of_outcomes(patched, lambda found: replace(found, seconds=found.seconds + 99))
        run_id = await finished(federation, with_selector("oort"))
    assert [each.differences for each in audited(federation, run_id)] == [()] * 3


async def test_audit_finds_removed_facts_about_a_round(federation: SumFederation) -> None:
    run_id = await finished(federation, with_selector("round-robin"))
    log = selections_of(federation) / f"{run_id}.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text(
        "".join(json.dumps({k: v for k, v in e.items() if k != "learned"}) + "\n" for e in lines)
    )
    why = "the records lack the facts from which the selector learned"
    assert [each.differences for each in audited(federation, run_id)] == [(why,)] * 3


async def test_audit_finds_profiles_that_no_client_has_sent(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator uses them and commits to them, and the hosts see no difference."""
    with monkeypatch.context() as patched:
        lie(patched, (2,), other_profiles)
        run_id = await finished(federation, with_selector("fedentopt"))
    first, second, third = audited(federation, run_id)
    assert [first.differences, third.differences] == [(), ()]
    [why] = second.differences
    assert why.startswith("the label_counts of client-0, client-1, ")
    assert why.endswith(" are not what these clients disclosed and signed")
    assert [each.documents for each in (first, second, third)] == hosts_documents(
        federation, run_id, "client-0"
    )


async def test_audit_finds_stored_profiles_without_their_clients_signatures(
    federation: SumFederation,
) -> None:
    """The coordinator changes the stored profile to fit its inputs, but can't sign it."""
    run_id = await finished(federation, with_selector("fedentopt"))
    assert all(each.agrees for each in audited(federation, run_id))
    with sqlite3.connect(database(federation)) as connection:
        connection.execute("UPDATE profiles SET signature = NULL WHERE client_id = ?", ["client-1"])
    why = "the label_counts of client-1 are not what these clients disclosed and signed"
    assert [each.differences for each in audited(federation, run_id)] == [(why,)] * 3
    config: CoordinatorConfig = federation.coordinator.config
    rootless = config.model_copy(update={"federation_root": None, "members": None})
    assert all(each.agrees for each in SelectionAudit(rootless, run_id).results())


async def test_audit_accepts_a_client_without_a_profile(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit: the coordinator hides the profile that a client has sent."""

    def hidden(_: CommittedRun, context: SelectionContext) -> SelectionContext:
        counts = context.population.label_counts
        assert counts is not None
        counts = counts.copy()
        counts[1] = np.nan
        return replace(context, population=replace(context.population, label_counts=counts))

    with monkeypatch.context() as patched:
        lie(patched, (1, 2, 3), hidden)
        run_id = await finished(federation, with_selector("fedentopt"))
    assert [each.differences for each in audited(federation, run_id)] == [()] * 3


# Records changed later ---------------------------------------------------------------------------


def selections_of(federation: SumFederation) -> Path:
    return federation.coordinator.config.state_directory / "selections"


def packed(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def rewrite(federation: SumFederation, run_id: str, column: str, values: Any) -> None:
    """Replace a column of the clients' profiles in the inputs of round 2, and all digests that
    follow from it."""
    log = SelectionLog(federation.coordinator.config.state_directory, run_id)
    content = packed(values)
    log.keep_parts({part_sha256(content): content})
    new: dict[str, str] = {}
    kinds: dict[str, type[Document]] = {
        "opening": Opening,
        "attendees": Attendees,
        "outcome": Outcome,
    }
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.path.read_text().splitlines()]
    for line in lines:
        if "signed" in line:
            line["signed"] = new[line["signed"]]
        for kind in kinds.keys() & line.keys():
            before = line[kind].encode()
            document = kinds[kind].parse(before)
            changes = {"previous": new.get(document.previous, document.previous)}
            if kind == "opening" and document.model_dump()["round"] == 2:
                description = json.loads(line["inputs"])
                description["columns"][column] = part_sha256(content)
                line["inputs"] = json.dumps(description, sort_keys=True, separators=(",", ":"))
                changes["inputs_sha256"] = inputs_sha256(line["inputs"])
            after = document.model_copy(update=changes).encode()
            line[kind] = after.decode()
            new[document.digest_of(before)] = document.digest_of(after)
    log.path.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def test_audit_of_records_rewritten_as_a_whole_needs_the_hosts_documents(
    federation: SumFederation,
) -> None:
    """The changed inputs give the same cohorts, and all digests match. Members' signatures on the
    old documents don't. Without a federation root, only hosts' documents show the change."""
    run_id = await finished(federation, with_selector("uniform"))
    honest = audited(federation, run_id)
    rewrite(federation, run_id, "samples", np.arange(CLIENTS))
    [first, *others] = audited(federation, run_id)
    assert first.agrees
    assert all(
        any("signature of client 'client-0' is not valid" in why for why in each.differences)
        for each in others
    )
    config: CoordinatorConfig = federation.coordinator.config
    rootless = config.model_copy(update={"federation_root": None, "members": None})
    found = list(SelectionAudit(rootless, run_id).results())
    assert [(each.differences, each.signatures) for each in found] == [((), 0)] * 3
    at_host = hosts_documents(federation, run_id, "client-0")
    assert at_host == [each.documents for each in honest]
    assert [each.documents == held for each, held in zip(found, at_host, strict=True)] == [
        *(True, False, False)
    ]


# What hosts keep ---------------------------------------------------------------------------------


def host_report(federation: SumFederation, run_id: str, client: str) -> list[dict[str, Any]]:
    """Return the selections of a run whose documents a client's host has stored."""
    folder = federation.folder / host_of(client)
    [run] = json.loads(SelectionReport(folder, [client], run_id).values())["runs"]
    assert run["run"] == run_id
    found: list[dict[str, Any]] = run["selections"]
    return found


def hosts_documents(federation: SumFederation, run_id: str, client: str) -> list[dict[str, str]]:
    return [each["documents"] for each in host_report(federation, run_id, client)]


@pytest.mark.parametrize(("run_file", "joint"), [(VERIFIED, True), (VERIFIABLE, False)])
async def test_hosts_hold_the_documents_that_the_audit_reports(
    federation: SumFederation, run_file: str, joint: bool
) -> None:
    run_id = await finished(federation, run_file)
    found, chosen = audited(federation, run_id), await cohorts(federation, run_id)
    for client in federation.members.names:
        report = host_report(federation, run_id, client)
        assert [each["documents"] for each in report] == [each.documents for each in found]
        assert [each["cohort"] for each in report] == chosen
        assert [each["own"] for each in report] == [[client] * (client in c) for c in chosen]
        assert [each["trained"] for each in report] == [each["own"] for each in report]
        assert all(each["recomputed"] == joint and not each["gap"] for each in report)


async def test_attempt_without_a_cohort_is_listed_by_audit_and_hosts(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator gives up an attempt after hosts have revealed their shares."""
    honest = CommittedRun.begin

    async def begin(
        self: CommittedRun, context: SelectionContext, key: AttemptKey
    ) -> SelectionContext:
        found = await honest(self, context, key)
        if (key.round, key.attempt) == (2, 1):
            raise ScarceError("the coordinator does not like the seed")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(CommittedRun, "begin", begin)
        run_id = await finished(federation, VERIFIED)
    found = audited(federation, run_id)
    assert [(each.round, each.attempt, each.committed, each.cohort) for each in found] == [
        (1, 1, True, 3),
        (2, 1, False, 0),
        (2, 2, True, 3),
        (3, 1, True, 3),
    ]
    assert all(each.agrees for each in found)
    assert list(found[1].documents) == ["opening", "attendees"]
    assert [each.documents for each in found] == hosts_documents(federation, run_id, "client-3")


def host_file(federation: SumFederation, client: str, folder: Path) -> Path:
    """Write a host's configuration file."""
    config, tls = folder / "host.toml", federation.members.tls.hosts[host_of(client)]
    state = federation.folder / host_of(client)
    config.write_text(
        f'coordinator = "127.0.0.1:{federation.port}"\nclients = ["{client}"]\n'
        f"state_directory = {json.dumps(str(state))}\n"
        f"[tls]\ncertificate = {json.dumps(str(tls.certificate))}\n"
        f"key = {json.dumps(str(tls.key))}\nauthority = {json.dumps(str(tls.authority))}\n"
    )
    return config


async def test_commands_of_host_and_coordinator_print_the_same_digests(
    federation: SumFederation, tmp_path: Path
) -> None:
    run_id = await finished(federation, VERIFIED)
    audit = CliRunner().invoke(
        app, [run_id, "--config", str(coordinator_file(federation, tmp_path))]
    )
    of_host = ["selections", "--config", str(host_file(federation, "client-1", tmp_path))]
    kept = CliRunner().invoke(client_app, [*of_host, "--run", run_id[:12]])
    assert (audit.exit_code, kept.exit_code) == (0, 0), kept.output
    lines = kept.output.splitlines()
    assert [line.split()[-2:] for line in lines] == [
        line.split()[-2:] for line in audit.output.splitlines()[:3]
    ]
    for number, (line, cohort) in enumerate(
        zip(lines, await cohorts(federation, run_id), strict=True), 1
    ):
        own = "client-1, instructed to train: client-1" if "client-1" in cohort else "none"
        assert line.startswith(
            f"run {run_id}, round {number} of 3, attempt 1: 3 of 6 clients, on this host: {own}; "
            "recomputed by this host; outcome "
        )
    none = CliRunner().invoke(client_app, [*of_host, "--run", "no-such-run"])
    assert (none.exit_code, none.output.startswith("no selections: ")) == (0, True)


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `potluck-client` in a process of its own."""
    command = [sys.executable, "-m", "potluck.client.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def test_host_command_fails_if_a_chain_is_broken(
    federation: SumFederation, tmp_path: Path
) -> None:
    run_id = await finished(federation, VERIFIED)
    folder = federation.folder / host_of("client-2") / "selections"
    [path] = [each for each in folder.glob("*.jsonl") if run_id in each.read_text()]
    honest = path.read_text()
    config = host_file(federation, "client-2", tmp_path)
    try:
        path.write_text(honest.replace('\\"count\\":3', '\\"count\\":4', 1))
        done = called("selections", "--config", str(config))
    finally:
        path.write_text(honest)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert f"{path}: line 2 breaks the chain of selections: the list of available clients" in line
