"""The host guard grants within the owner's limit, charges before granting, and keeps records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import pytest
from dp_accounting import LaplaceDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.release_ledger import Release
from potluck.client.private_training import GrantedTraining, SumGrid, made_once
from potluck.client.question import BoundedSums
from potluck.common.disclosure import LABEL_COUNTS, Mode, Parameters, TaskReference, Weighting
from potluck.common.errors import (
    DisclosureRefusedError,
    PotluckError,
    ProtocolError,
    ProtocolVersionError,
    StorageError,
    TrainingError,
)
from potluck.common.records.privacy_loss import BUDGET_SPENT, NO_ANSWER
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.accounting import ORDERS, GaussianSteps
from potluck.privacy.host.host_guard import HostGuard, counted_samples, spent_in_epoch
from potluck.privacy.host.ledger_report import PrivacyReport
from potluck.privacy.host.privacy_ledger import ChargedTraining, PrivacyLedger
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.protocol.policy.ledger import Upload

AT = datetime(2026, 1, 1, tzinfo=UTC)


def guard(state: Path, **policy: Any) -> HostGuard:
    return HostGuard(
        state, DisclosurePolicy(**policy), federation="demo", coordinator="127.0.0.1:7443"
    )


def instruction(number: int = 1, run: str = "run", **privacy: Any) -> rpc.Instruction:
    asked: dict[str, Any] = {
        "unit": "record",
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "clip": 1.0,
        "trainings": 30,
    }
    work = rpc.Train(
        training_json=LocalTraining(batch_size=16, epochs=1).as_json(),
        privacy=rpc.Privacy(**asked | privacy),
    )
    return rpc.Instruction(
        id=f"{run}-{number}", client_id="client-0", run_id=run, round=number, train=work
    )


def granted_until_refused(grant: Callable[[int], object]) -> int:
    """Return the number of trainings granted before the first refusal."""
    for number in range(100):
        try:
            grant(number)
        except DisclosureRefusedError:
            return number
    raise AssertionError("nothing was refused")


def lines(state: Path) -> list[dict[str, Any]]:
    text = (state / "privacy" / "client-0.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[1:]]


def test_granted_training_is_recorded_in_the_ledger_with_its_parameters(tmp_path: Path) -> None:
    granted = guard(tmp_path).grant(instruction(clip=2.0), 200)
    assert granted == GrantedTraining(
        sampling_rate=0.08, noise_multiplier=1.0, steps=13, clip=2.0, expected_batch=16.0
    )
    [line] = lines(tmp_path)
    assert (line["sampling_rate"], line["noise_multiplier"], line["steps"]) == (0.08, 1.0, 13)
    assert (line["kind"], line["unit"], line["run"], line["round"]) == (
        "training",
        "record",
        "run",
        1,
    )


def test_privacy_limit_holds_over_runs_and_restarts(tmp_path: Path) -> None:
    def grant(number: int) -> None:
        # Each training has another process, run and coordinator.
        host = HostGuard(
            tmp_path,
            DisclosurePolicy(training_epsilon=6.0),
            federation="demo",
            coordinator=f"127.0.0.1:{number}",
        )
        host.grant(instruction(run=f"run-{number}"), 250)

    granted = granted_until_refused(grant)
    assert len(lines(tmp_path)) == granted > 1
    trainings = PrivacyLedger(tmp_path / "privacy").of("client-0")
    assert spent_in_epoch(trainings, DisclosurePolicy(training_epsilon=6.0)).epsilon_spent <= 6.0


def test_refused_training_reveals_no_numbers_and_charges_nothing(tmp_path: Path) -> None:
    with pytest.raises(DisclosureRefusedError) as error:
        guard(tmp_path, training_epsilon=0.5).grant(instruction(), 250)
    assert error.value.message == f"client 'client-0': {BUDGET_SPENT}"
    assert not (tmp_path / "privacy" / "client-0.jsonl").exists()


def test_new_data_epoch_starts_with_an_unspent_limit(tmp_path: Path) -> None:
    host = guard(tmp_path, training_epsilon=4.0)
    granted_until_refused(lambda number: host.grant(instruction(number), 250))
    guard(tmp_path, training_epsilon=4.0, data_epoch=2).grant(instruction(40), 250)
    with pytest.raises(DisclosureRefusedError):
        guard(tmp_path, training_epsilon=4.0).grant(instruction(41), 250)


def test_epsilon_admits_exactly_the_trainings_it_was_computed_for(tmp_path: Path) -> None:
    host = guard(tmp_path, training_epsilon=3.0)
    asked: dict[str, Any] = {"noise_multiplier": 0.0, "epsilon": 3.0, "trainings": 5}
    for number in range(5):
        host.grant(instruction(number, **asked), 250)
    with pytest.raises(DisclosureRefusedError, match=BUDGET_SPENT):
        host.grant(instruction(6, **asked), 250)
    trainings = PrivacyLedger(tmp_path / "privacy").of("client-0")
    spent = spent_in_epoch(trainings, DisclosurePolicy(training_epsilon=3.0)).epsilon_spent
    assert 2.9 < spent <= 3.0


def test_training_repeated_without_a_saved_update_is_charged_again(
    tmp_path: Path,
) -> None:
    host = guard(tmp_path)
    host.grant(instruction(), 250)
    host.grant(instruction(), 250)  # a host asks again only if it has lost the update
    one, two = lines(tmp_path)
    assert one["work"] == two["work"]


@pytest.mark.parametrize(
    ("samples", "weighting", "counted"),
    [
        (200, Weighting.EXACT, 200),
        (200, Weighting.BUCKETED, 256),
        (256, Weighting.EQUAL, 256),
        (257, Weighting.EQUAL, 512),
        (1, Weighting.EQUAL, 1),
    ],
)
def test_undisclosed_sample_count_is_charged_as_a_power_of_two(
    samples: int, weighting: Weighting, counted: int
) -> None:
    assert counted_samples(samples, weighting) == counted


@pytest.mark.parametrize(
    ("privacy", "error"),
    [
        ({"unit": "client"}, ProtocolVersionError),
        ({"clip": 0.0}, ProtocolError),
        ({"clip": 9e-7}, ProtocolError),
        ({"clip": 1.1e6}, ProtocolError),
        ({"clip": float("nan")}, ProtocolError),
        ({"delta": 1.0}, ProtocolError),
        ({"noise_multiplier": -1.0}, ProtocolError),
        ({"noise_multiplier": 0.0}, ProtocolError),
        ({"noise_multiplier": 0.0, "epsilon": 1.0, "trainings": 0}, ProtocolError),
    ],
)
def test_invalid_training_noise_is_refused(
    tmp_path: Path, privacy: dict[str, Any], error: type[PotluckError]
) -> None:
    with pytest.raises(error):
        guard(tmp_path).grant(instruction(**privacy), 250)
    assert not (tmp_path / "privacy" / "client-0.jsonl").exists()


def test_report_without_noise_is_refused_in_a_private_training(tmp_path: Path) -> None:
    asked = instruction()
    asked.train.reports.append("root_mean_square")
    with pytest.raises(ProtocolError, match="numbers reported"):
        guard(tmp_path).grant(asked, 250)


def training(number: int) -> ChargedTraining:
    return ChargedTraining(
        data_epoch=1,
        sampling_rate=0.1,
        noise_multiplier=2.0,
        steps=number,
        work="digest",
        federation="demo",
        coordinator="127.0.0.1:7443",
        run="run",
        round=number,
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_truncated_ledger_line_is_overwritten(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path)
    ledger.charge("client-0", training(1))
    ledger.charge("client-0", training(2))
    path = tmp_path / "client-0.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(whole) - 30, -7):
        path.write_bytes(whole[:cut])
        again = PrivacyLedger(tmp_path)
        assert [each.event.steps for each in again.of("client-0")] == [1]
        again.charge("client-0", training(3))
        assert [each.event.steps for each in PrivacyLedger(tmp_path).of("client-0")] == [1, 3]


@pytest.mark.parametrize("content", [b'{"client": "client-1"}\n', b"nothing\n", b"\xff\n"])
def test_damaged_privacy_ledger_stops_trainings(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "client-0.jsonl").write_bytes(content)
    with pytest.raises(StorageError, match="restore it from a backup"):
        guard(tmp_path).grant(instruction(), 250)


def test_training_is_not_granted_if_the_ledger_can_not_be_written(tmp_path: Path) -> None:
    host = guard(tmp_path)
    host.grant(instruction(), 250)
    path = tmp_path / "privacy" / "client-0.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError):
        host.grant(instruction(2), 250)


def test_privacy_report_shows_the_spent_and_the_remaining_epsilon(tmp_path: Path) -> None:
    policy = DisclosurePolicy(training_epsilon=6.0)
    host = HostGuard(tmp_path, policy, federation="demo", coordinator="127.0.0.1:7443")
    host.grant(instruction(), 250)
    spent = spent_in_epoch(PrivacyLedger(tmp_path / "privacy").of("client-0"), policy)
    first, second, together, third = PrivacyReport(tmp_path, policy).lines()
    left = 6.0 - spent.epsilon_spent
    assert f"spent ε = {spent.epsilon_spent:.4g} of 6, {left:.4g} left" in first
    assert "profiles and sums of counts spent ε = 0" in second
    assert "never spends more than 10 (δ = 1e-05, per record)" in together
    assert "1 trainings requested, 1 charged, 0 updates sent, 0 trainings refused" in third
    [found] = json.loads(PrivacyReport(tmp_path, policy).values())["clients"]
    assert found["training"]["epsilon_spent"] == spent.epsilon_spent


def test_privacy_report_of_an_empty_folder_states_that_nothing_was_spent(tmp_path: Path) -> None:
    [line] = PrivacyReport(tmp_path, DisclosurePolicy()).lines()
    assert line.startswith("no privacy loss")


def test_event_of_a_ledger_line_equals_the_charged_steps() -> None:
    assert training(4).event == GaussianSteps(sampling_rate=0.1, noise_multiplier=2.0, steps=4)


# Answers -----------------------------------------------------------------------------------------

SUMS = BoundedSums(values={"loss": 300.0}, sensitivity=4.0)


def question(number: int = 1, run: str = "run", **privacy: Any) -> rpc.Instruction:
    asked: dict[str, Any] = {
        "unit": "record",
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "clip": 1.0,
        "trainings": 30,
        "answers": 10,
        "answer_noise_multiplier": 10.0,
        "answer_clip": 4.0,
    }
    work = rpc.Question(kind="loss", names=["loss"], privacy=rpc.Privacy(**asked | privacy))
    work.model.blake3 = f"model-{number}"
    return rpc.Instruction(
        id=f"{run}-{number}", client_id="client-0", run_id=run, round=number, question=work
    )


def test_noisy_answer_is_recorded_in_the_ledger_and_repeated(tmp_path: Path) -> None:
    host = guard(tmp_path)
    assert host.kept_answer(question()) is None
    answer = host.answer(question(), SUMS, 200)
    [line] = lines(tmp_path)
    assert (line["kind"], line["question"], line["noise_multiplier"]) == ("answer", "loss", 10.0)
    assert line["numbers"] == answer
    again = guard(tmp_path)  # a new process, and another run
    assert again.kept_answer(question(run="other")) == answer
    assert again.answer(question(run="other"), SUMS, 200) == answer
    assert len(lines(tmp_path)) == 1
    assert again.answer(question(2), SUMS, 200) != answer
    assert guard(tmp_path, data_epoch=2).kept_answer(question()) is None


def test_answers_and_trainings_share_the_privacy_limit(tmp_path: Path) -> None:
    host = guard(tmp_path, training_epsilon=5.0)
    host.grant(instruction(), 250)
    answered = granted_until_refused(lambda number: host.answer(question(number), SUMS, 250))
    assert answered > 1
    with pytest.raises(DisclosureRefusedError) as error:
        host.kept_answer(question(99))
    assert error.value.message == f"client 'client-0': {NO_ANSWER}"
    assert host.spent("client-0") <= 5.0
    alone = guard(tmp_path / "other", training_epsilon=5.0)
    assert granted_until_refused(lambda n: alone.answer(question(n), SUMS, 250)) > answered


def test_epsilon_admits_exactly_the_planned_trainings_and_answers(tmp_path: Path) -> None:
    host = guard(tmp_path, training_epsilon=3.0)
    asked: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "epsilon": 3.0,
        "trainings": 5,
        "answers": 4,
        "answer_noise_multiplier": 0.0,
        "answer_clip": 4.0,
    }
    for number in range(4):
        host.answer(question(number, **asked), SUMS, 250)
        host.grant(instruction(number, **asked), 250)
    host.grant(instruction(5, **asked), 250)
    assert 2.9 < host.spent("client-0") <= 3.0
    with pytest.raises(DisclosureRefusedError, match=NO_ANSWER):
        host.answer(question(5, **asked), SUMS, 250)
    with pytest.raises(DisclosureRefusedError, match=BUDGET_SPENT):
        host.grant(instruction(6, **asked), 250)


@pytest.mark.parametrize(
    "privacy",
    [
        {"answer_clip": 0.0},
        {"answer_clip": 9e-7},
        {"answer_clip": 1.1e6},
        {"answers": 0},
        {"answer_noise_multiplier": -1.0},
        {"delta": 2.0},
    ],
)
def test_invalid_answer_noise_is_refused(tmp_path: Path, privacy: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        guard(tmp_path).answer(question(**privacy), SUMS, 250)
    assert not (tmp_path / "privacy" / "client-0.jsonl").exists()


def test_sums_that_are_not_finite_are_not_answered(tmp_path: Path) -> None:
    broken = BoundedSums(values={"loss": float("nan")}, sensitivity=1.0)
    with pytest.raises(TrainingError, match="NaN or infinite"):
        guard(tmp_path).answer(question(), broken, 250)


def test_privacy_report_shows_answers_and_trainings(tmp_path: Path) -> None:
    host = guard(tmp_path)
    host.answer(question(), SUMS, 250)
    text = "\n".join(PrivacyReport(tmp_path, DisclosurePolicy()).lines())
    assert "0 trainings requested, 0 charged" in text
    assert "questions about data: 1 answers charged, 0 refused, noise multiplier 10 or more" in text


# Everything together ------------------------------------------------------------------------------


@dataclass
class Spender:
    """A client of a process with one limit for everything, which may be restarted.

    spent: events of all disclosures that were allowed.
    """

    state: Path
    policy: DisclosurePolicy
    spent: list[GaussianSteps | Fraction] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in ("disclosures", "sums"):
            (self.state / folder).mkdir(parents=True)
        self.restart()

    def restart(self) -> None:
        self.budget = PrivacyBudget(self.state, self.policy)
        self.host = HostGuard(
            self.state, self.policy, federation="f", coordinator="c:1", budget=self.budget
        )
        self.budget.share_with(lambda: self.host)

    def profile(self, number: int, epsilon: float) -> None:
        mode = Mode.NOISY
        task = TaskReference(name="digits", options={"clients": number})
        parameters = Parameters(mode=mode, task=task, epsilon=epsilon, adjacency="replace")
        self.budget.check_release("client-0", LABEL_COUNTS, parameters)
        self.budget.keep_release(
            "client-0",
            Release(
                data_epoch=1,
                signal=LABEL_COUNTS,
                parameters_json=parameters.canonical(),
                payload_json="{}",
                epsilon=epsilon,
                at=AT,
            ),
        )
        self.spent.append(Fraction(repr(epsilon)))

    def sum(self, number: int, epsilon: float) -> None:
        sums, exact = self.budget.sums, Fraction(repr(epsilon))
        assert isinstance(sums, SumLedger)
        left = Fraction(repr(self.budget.for_sums("client-0"))) - sums.spent("client-0")
        if exact > left:
            raise DisclosureRefusedError("as the protocol does")
        session = f"{number:032x}"
        upload = Upload(session_id=session, input_id="labels", epsilon=epsilon, at=AT)
        sums.keep("client-0", [upload])
        self.spent.append(exact)

    def train(self, number: int, noise: float) -> None:
        self.host.grant(instruction(number, noise_multiplier=noise), 250)
        self.spent.append(GaussianSteps(sampling_rate=0.064, noise_multiplier=noise, steps=16))

    def answer(self, number: int, noise: float) -> None:
        self.host.answer(question(number, answer_noise_multiplier=noise), SUMS, 250)
        self.spent.append(GaussianSteps(noise_multiplier=noise))

    def update(self, number: int, noise: float) -> None:
        asked = instruction(number, unit="client", noise="clients", noise_multiplier=noise)
        asked.train.weighting = rpc.WEIGHTING_EQUAL
        asked.train.encoding = transfer_pb2.ENCODING_MASKED_UINT32
        noised = self.host.hide_update(asked)
        noised.charge(SumGrid(scale=2.0**24, values=10, clients=20, contributors=5, largest=2**62))
        self.spent.append(GaussianSteps(noise_multiplier=noise / 2))

    @property
    def epsilon(self) -> float:
        """Return ε of all allowed disclosures: by dp-accounting, or their sum if all are pure and
        that is less.

        dp-accounting has the orders of the filter: with fewer, its ε could be larger than the
        filter's."""
        independent = RdpAccountant(ORDERS)
        for each in self.spent:
            independent.compose(
                LaplaceDpEvent(1 / float(each)) if isinstance(each, Fraction) else each.dp_event()
            )
        pure = [each for each in self.spent if isinstance(each, Fraction)]
        alone = float(sum(pure, Fraction(0))) if len(pure) == len(self.spent) else math.inf
        return min(float(independent.get_epsilon(1e-5)), alone)


KINDS = ("profile", "sum", "train", "answer", "update")


@settings(deadline=None, max_examples=20)
@given(total=st.sampled_from([0.3, 1.0, 2.5, 6.0]), choices=st.data())
def test_no_schedule_of_everything_exceeds_the_total_limit(
    total: float, choices: st.DataObject
) -> None:
    """The schedule is adaptive: each request depends on whether the last one was refused."""
    policy = DisclosurePolicy(
        total_epsilon=total, training_epsilon=20.0, epsilon=2.0, epsilon_budget=20.0
    )
    with TemporaryDirectory() as folder:
        client, size, refused = Spender(Path(folder), policy), 1.0, 0
        for number in range(24):
            kind = choices.draw(st.sampled_from(KINDS))
            pure = kind in ("profile", "sum")
            loss, noise = max(0.001, round(0.5 * size, 3)), max(1.0, 4.0 / size)
            amount = min(2.0, loss) if pure else min(16.0, noise)
            try:
                getattr(client, kind)(number, amount)
                size *= choices.draw(st.sampled_from([1, 2]))
            except DisclosureRefusedError:
                size, refused = size / 2, refused + 1
            if choices.draw(st.integers(0, 5)) == 0:
                client.restart()
        assert client.epsilon <= total + 1e-9
        [shown] = json.loads(PrivacyReport(Path(folder), policy).values())["clients"] or [None]
        if shown is not None:
            assert client.epsilon - 1e-9 <= shown["together"]["epsilon_spent"] <= total + 1e-9
            assert shown["together"]["epsilon_limit"] == total


@pytest.mark.parametrize("trains_first", [True, False])
def test_a_total_limit_is_shared_by_what_comes_first(tmp_path: Path, trains_first: bool) -> None:
    policy = DisclosurePolicy(total_epsilon=3.0, epsilon=1.0, epsilon_budget=3.0)
    client = Spender(tmp_path, policy)

    def trained() -> int:
        return granted_until_refused(lambda number: client.train(number, 2.0))

    def disclosed() -> int:
        return granted_until_refused(lambda number: client.profile(number, 1.0))

    steps = (trained, disclosed) if trains_first else (disclosed, trained)
    first, second = (step() for step in steps)
    assert first > second
    assert second == 0
    if not trains_first:
        assert first == 3, "without trainings, pure losses add up exactly"


def test_a_total_limit_allows_what_its_parts_allow(tmp_path: Path) -> None:
    """Trainings up to 2 and profiles up to 4 stay within 6 in any order."""
    policy = DisclosurePolicy(
        total_epsilon=6.0, training_epsilon=2.0, epsilon_budget=4.0, epsilon=1.0
    )
    client = Spender(tmp_path, policy)
    trained = granted_until_refused(lambda number: client.train(number, 3.0))
    assert granted_until_refused(lambda number: client.profile(number, 1.0)) == 4
    alone = guard(tmp_path / "alone", training_epsilon=2.0)
    asked = [instruction(number, noise_multiplier=3.0) for number in range(100)]
    assert granted_until_refused(lambda number: alone.grant(asked[number], 250)) == trained > 0


def test_a_refusal_by_the_total_limit_says_no_numbers(tmp_path: Path) -> None:
    policy = DisclosurePolicy(total_epsilon=3.0, epsilon_budget=3.0)
    client = Spender(tmp_path, policy)
    client.train(0, 2.0)
    client.profile(1, 1.0)
    granted_until_refused(lambda number: client.profile(2 + number, 1.0))
    with pytest.raises(DisclosureRefusedError) as refused:
        client.profile(9, 1.0)
    assert (
        "its ε would exceed the remaining `total_epsilon` in the [disclosure] table"
        in refused.value.message
    )
    with pytest.raises(DisclosureRefusedError) as refused:
        client.train(9, 0.5)
    assert refused.value.message == f"client 'client-0': {BUDGET_SPENT}"


def test_profiles_are_refused_if_the_ledger_of_trainings_is_unknown(tmp_path: Path) -> None:
    policy = DisclosurePolicy(total_epsilon=6.0)
    client = Spender(tmp_path, policy)
    client.train(0, 2.0)
    client.budget = PrivacyBudget(tmp_path, policy)  # the ledger of trainings is not connected
    with pytest.raises(StorageError, match="were not opened"):
        client.profile(1, 1.0)


def test_a_guard_is_made_once_whichever_threads_ask() -> None:
    """Two guards would write over each other's charges."""
    made, asking = [], Barrier(4)

    def make() -> Any:
        made.append(object())
        return made[-1]

    found = made_once(make)

    def ask(_: int) -> object:
        asking.wait()
        return found()

    with ThreadPoolExecutor(4) as threads:
        assert len(set(map(id, threads.map(ask, range(4))))) == 1
    assert len(made) == 1


def test_privacy_report_sums_profiles_trainings_and_answers(tmp_path: Path) -> None:
    policy = DisclosurePolicy()
    host = guard(tmp_path)
    host.grant(instruction(), 250)
    host.answer(question(), SUMS, 250)
    alone = host.spent("client-0")
    release = Release(
        data_epoch=1,
        signal="label_counts",
        parameters_json="{}",
        payload_json="{}",
        epsilon=0.5,
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    (tmp_path / "disclosures").mkdir()
    PrivacyBudget(tmp_path, policy).keep_release("client-0", release)
    [found] = json.loads(PrivacyReport(tmp_path, policy).values())["clients"]
    assert found["training"]["epsilon_spent"] == alone
    assert alone < found["together"]["epsilon_spent"] <= alone + 0.5
    assert found["together"]["epsilon_limit"] == 12.0


def test_ledger_written_before_answers_existed_is_read_and_continued(tmp_path: Path) -> None:
    line = training(3).model_dump(mode="json")
    assert set(line) >= {"kind", "unit", "data_epoch", "steps"}
    path = tmp_path / "privacy" / "client-0.jsonl"
    path.parent.mkdir()
    path.write_text('{"client": "client-0"}\n' + json.dumps(line) + "\n")
    host = guard(tmp_path)
    before = host.spent("client-0")
    host.answer(question(), SUMS, 250)
    assert guard(tmp_path).spent("client-0") > before > 0
