"""Tasks with their own trainers: results and failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.trainer_plugins.potluck_trainers import (
    SAMPLES,
    CountedDescent,
    CountedLine,
    Descent,
    Line,
    Stream,
)

from potluck.client.private_training import GrantedTraining
from potluck.client.training.local_update import train_update
from potluck.client.training.own_training import FAILED, OwnTraining
from potluck.client.training.questions.gradient_norm import GradientNorm
from potluck.client.training.task_training import LoadedTask, Outcome, TrainingFiles
from potluck.common.disclosure import Weighting
from potluck.common.errors import (
    ConfigurationError,
    ProtocolError,
    RoundClosedError,
    TrainerError,
    TrainingError,
)
from potluck.common.learning.measures import MeasureSums, own_trainer
from potluck.common.names import ClientId
from potluck.common.settings.model_table import ModelTable
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.trainer import (
    Capability,
    Contribution,
    Measured,
    TrainerSettings,
    TrainingProgress,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


def training(fault: str = "", table: ModelTable | None = None) -> OwnTraining:
    task = Line(fault=fault)
    trainer = own_trainer(task, "line")
    assert trainer is not None
    return OwnTraining(LoadedTask("line", task, "cpu", None, table), trainer)


def files(folder: Path) -> TrainingFiles:
    model = folder / "model"
    write_tensors(model, {"slope": np.zeros(1, np.float32), "offset": np.zeros((), np.float32)})
    return TrainingFiles(
        model=model, update=folder / "update", keep_at=folder.joinpath, own=folder / "own"
    )


def instruction(client: str = "client-1", round_number: int = 1) -> rpc.Instruction:
    work = rpc.Train(seed=7, training_json="{}")
    return rpc.Instruction(client_id=client, round=round_number, train=work)


def test_custom_trainer_trains_and_reports_its_metrics(tmp_path: Path) -> None:
    found = training()
    outcome = found.train(instruction(), files(tmp_path), TrainingProgress())
    assert outcome.samples == SAMPLES
    assert abs(found.loaded.model["slope"][0] - 2.0) < 0.5
    report = outcome.report(Weighting.EXACT)
    assert (report.samples, report.steps) == (SAMPLES, SAMPLES)
    assert report.measures["squared_error"].count == SAMPLES
    less = outcome.report(Weighting.EQUAL)
    assert (less.samples, less.steps, dict(less.measures)) == (1, 0, {}), "a count tells samples"


def test_custom_training_is_reproducible_and_keeps_its_folder(tmp_path: Path) -> None:
    models = []
    for round_number in (1, 2):
        found = training()  # a new object, as after a kill
        found.train(instruction(round_number=round_number), files(tmp_path), TrainingProgress())
        models.append({n: a.copy() for n, a in state_arrays(found.loaded.model).items()})
    assert models[0] == models[1]
    assert (tmp_path / "own" / "trainings").read_text() == "1\n2\n"


class TwiceCounted(CountedDescent):
    """Counts each point in both classes, as a task with several labels per sample would."""

    def label_counts(self, data: Any) -> list[int]:
        return [SAMPLES, SAMPLES]


def counted(trainer: CountedDescent) -> OwnTraining:
    return OwnTraining(LoadedTask("line", CountedLine(), "cpu", None, None), trainer)


def test_sample_counted_in_two_classes_is_refused() -> None:
    found = counted(CountedDescent("")).label_counts(ClientId("client-1"))
    assert sum(found) == SAMPLES
    twice = f"counted {2 * SAMPLES} labels of {SAMPLES} samples; count each sample in one class"
    with pytest.raises(TrainerError, match=twice):
        counted(TwiceCounted("")).label_counts(ClientId("client-1"))


FAULTS = {
    "raises": "failed for client 'client-1': ValueError: the scanner's file is empty (potluck_trai",
    "exits": "failed for client 'client-1': SystemExit: 3 (potluck_trainers.py:",
    "not-a-number": "left NaN, infinity or huge numbers in tensor 'slope'; lower",
    "shapes": "returned a model that is not compatible with the task's model: trained model ten",
    "names": "returned a model that is not compatible with the task's model: ",
    "undeclared": "has the measure 'accuracy', which the task's trainer does not declare",
    "infinite": "has the sum inf and the count 40 for measure 'squared_error', but the sum must be "
    "finite, and 0 if the count is 0; check the data for missing or huge values, and the trainer's",
    "nothing": "returned a NoneType from `train`; return a Contribution",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trainer_failure_is_one_line_and_the_next_client_is_trained(
    fault: str, tmp_path: Path
) -> None:
    found = training(fault)
    with pytest.raises(TrainerError) as caught:
        found.train(instruction(), files(tmp_path), TrainingProgress())
    assert caught.value.message.startswith(f"the trainer of task 'line' {FAULTS[fault]}")
    assert "\n" not in caught.value.message
    outcome = found.train(instruction("client-2"), files(tmp_path), TrainingProgress())
    assert outcome.samples == SAMPLES


class Noisy(Descent):
    """A private trainer on arrays, which draws its own noise. faults: wrong values that it
    records."""

    capabilities = Descent.capabilities | {Capability.PRIVACY}

    def samples(self, data: Stream) -> int:
        return SAMPLES

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        privacy = settings.privacy
        assert privacy is not None
        model["slope"] += np.float32(settings.seed % 1000 + 1) / 1000
        if self._fault != "forgotten":
            privacy.record(steps=privacy.steps + (self._fault == "exceeded"))
        if self._fault == "refused":
            raise TrainingError("client-1 has the record of a patient")
        self._fail(self._fault, model)
        return Contribution(samples=3, steps=9, measures={"loss": Measured(5.0, 3)})


GRANTED = GrantedTraining(
    sampling_rate=0.1, noise_multiplier=1.0, steps=10, clip=1.0, expected_batch=4.0
)


def private(trainer: Descent, folder: Path) -> Outcome:
    """Return the outcome of a training with noise."""
    asked = instruction()
    asked.train.privacy.CopyFrom(
        rpc.Privacy(unit="record", noise_multiplier=1.0, delta=1e-5, clip=1.0)
    )
    found = OwnTraining(LoadedTask("line", Line(), "cpu", None), trainer)
    return found.train(asked, replace(files(folder), granted=GRANTED), TrainingProgress())


def test_private_trainer_reports_only_public_values(tmp_path: Path) -> None:
    outcome = private(Noisy(""), tmp_path)
    report = outcome.report(Weighting.EXACT)
    assert (report.samples, report.steps, report.loss) == (SAMPLES, 10, None)
    assert not report.measures
    assert not report.reports
    assert outcome.report(Weighting.EQUAL).steps == 0
    assert outcome.loss != outcome.loss  # NaN


def test_private_trainings_do_not_use_the_seed_of_the_coordinator(tmp_path: Path) -> None:
    class Seeds(Noisy):
        found: ClassVar[list[tuple[int, int]]] = []

        def train(
            self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
        ) -> Contribution:
            self.found.append((settings.seed, int(np.random.randint(2**31))))
            return super().train(model, data, settings, report)

    private(Seeds(""), tmp_path)
    private(Seeds(""), tmp_path)
    (one, drawn), (two, again) = Seeds.found
    assert one != two
    assert drawn != again


@pytest.mark.parametrize("fault", ["forgotten", "exceeded", "refused", "raises", "exits"])
def test_failed_private_trainer_reports_one_fixed_message(fault: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerError) as caught:
        private(Noisy(fault), tmp_path)
    assert caught.value.message == FAILED
    assert not caught.value.metadata


def test_trainer_without_the_privacy_capability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not support noise for single records \(capability"
    ):
        private(Descent(""), tmp_path)
    with pytest.raises(TrainingError, match="does not have the capability 'privacy'"):
        training().samples(ClientId("client-1"))


def test_keyboard_interrupt_raised_in_a_host_thread_is_a_trainer_error(tmp_path: Path) -> None:
    found = training("interrupts")
    whose = r"client 'client-1': KeyboardInterrupt: no message \(potluck_trainers.py:"
    with ThreadPoolExecutor(1) as thread:
        trained = thread.submit(found.train, instruction(), files(tmp_path), TrainingProgress())
        with pytest.raises(TrainerError, match=whose):
            trained.result()


def test_keyboard_interrupt_in_the_main_thread_is_not_a_trainer_error(
    tmp_path: Path,
) -> None:
    """Python raises KeyboardInterrupt in the main thread only, so it comes from Ctrl-C."""
    found = training("interrupts")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        found.train(instruction(), files(tmp_path), TrainingProgress())


KEEP = ModelTable(keep=("slope",), keep_seed=3)


def trained_keeping(folder: Path, fault: str = "", **changes: Any) -> dict[str, float]:
    """Train with only the offset in the update; return the kept values."""
    write_tensors(folder / "model", {"offset": np.zeros((), np.float32)})
    these = TrainingFiles(
        model=folder / "model",
        update=folder / "update",
        keep_at=lambda purpose: folder / f"{purpose}.kept",
        own=folder / "own",
    )
    work = instruction()
    work.train.encoding = transfer_pb2.ENCODING_FLOAT32
    train_update(
        training(fault, KEEP),
        work,
        replace(these, **changes),
        progress=lambda _: None,
        cancelled=lambda: False,
    )
    with open_tensors(folder / "update") as update, open_tensors(folder / "model.kept") as kept:
        assert list(update.layout.by_name) == ["offset"]
        return {name: float(array.reshape(-1)[0]) for name, array in kept.arrays.items()}


def test_kept_tensors_start_from_the_seed_and_continue_in_the_next_round(tmp_path: Path) -> None:
    first = trained_keeping(tmp_path)
    assert first == trained_keeping(tmp_path), "the same first values, after any kill"
    np.random.seed(3)
    expected = float(Line().model()["slope"][0])
    assert float(training(table=KEEP).loaded.kept_weights()["slope"][0]) == expected
    before = tmp_path / "before"
    (tmp_path / "model.kept").rename(before)
    assert trained_keeping(tmp_path, kept={"model": before}) != first
    with open_tensors(before) as file:
        assert float(file.arrays["slope"][0]) == first["slope"], "it is not written over"


@pytest.mark.parametrize("fault", ["not-a-number", "shapes", "names"])
def test_invalid_kept_tensors_fail_in_one_line_and_are_not_stored(
    fault: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainerError) as caught:
        trained_keeping(tmp_path, fault)
    assert caught.value.message.startswith(f"the trainer of task 'line' {FAULTS[fault]}")
    assert not (tmp_path / "model.kept").exists()


def test_cancelled_custom_training_ends(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    progress = TrainingProgress(cancelled=lambda: next(asked))
    with pytest.raises(RoundClosedError):
        training().train(instruction(), files(tmp_path), progress)


def test_evaluation_metric_outside_its_declared_range_is_refused(tmp_path: Path) -> None:
    work = rpc.Instruction(client_id="client-1", evaluate=rpc.Evaluate(seed=9))
    sums = training().evaluate(work, files(tmp_path), TrainingProgress())
    assert isinstance(sums, MeasureSums)
    assert sums.measures["near"].count == SAMPLES
    assert (tmp_path / "own" / "evaluation").read_text() == "client-1 9 cpu"
    with pytest.raises(TrainerError, match="this measure is from 0 to 1e\\+06"):
        training("evaluation").evaluate(work, files(tmp_path), TrainingProgress())
    assert (sums + sums).means() == pytest.approx(sums.means())
    assert (sums + sums).measures["near"] == Measured(2 * sums.measures["near"].sum, 2 * SAMPLES)


def test_gradient_norm_question_uses_the_gradient_of_the_trainer(tmp_path: Path) -> None:
    """The gradient is that of half the mean squared error at slope and offset 0."""
    asked = rpc.Instruction(client_id="client-1", round=1)
    context = training().question_context(asked, lambda: False, files(tmp_path))
    told = GradientNorm().answer(context)
    x, y = np.array(list(Stream("client-1", 1))).T
    expected = float(np.hypot((y * x).mean(), y.mean()))
    assert told == {"gradient-norm": pytest.approx(expected), "seconds": 0.0}


@pytest.mark.parametrize("nonsense", [float("nan"), -1.0, "long"])
def test_invalid_gradient_norm_of_a_trainer_is_refused(
    nonsense: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Descent, "gradient_norm", lambda *_: nonsense)
    asked = rpc.Instruction(client_id="client-1", round=1)
    context = training().question_context(asked, lambda: False, files(tmp_path))
    with pytest.raises(TrainingError):
        GradientNorm().answer(context)


def test_trainer_that_changes_a_one_way_tensor_is_refused(tmp_path: Path) -> None:
    work = instruction()
    work.train.encoding = transfer_pb2.ENCODING_FLOAT32
    work.train.one_way.append("off*")
    with pytest.raises(TrainingError, match="trained tensor 'offset', which only the coordinator"):
        train_update(
            training(), work, files(tmp_path), progress=lambda _: None, cancelled=lambda: False
        )
    work.train.one_way[:] = ["nothing.*"]
    train_update(
        training(), work, files(tmp_path), progress=lambda _: None, cancelled=lambda: False
    )
    with open_tensors(tmp_path / "update") as update:
        assert list(update.arrays) == ["slope", "offset"]


def test_dropped_tensors_are_missing_from_the_update(tmp_path: Path) -> None:
    work = instruction()
    work.train.encoding = transfer_pb2.ENCODING_FLOAT32
    for dropped, why in (
        (["nothing"], "without 'nothing', which is not possible"),
        (["slope", "offset"], "without any tensor, which is not possible"),
    ):
        work.train.dropped[:] = dropped
        with pytest.raises(ProtocolError, match=why):
            train_update(
                training(), work, files(tmp_path), progress=lambda _: None, cancelled=lambda: False
            )
    work.train.dropped[:] = ["offset"]
    train_update(
        training(), work, files(tmp_path), progress=lambda _: None, cancelled=lambda: False
    )
    with open_tensors(tmp_path / "update") as update:
        assert list(update.arrays) == ["slope"]


def test_fine_tuning_of_a_custom_trainer_leaves_no_trace(tmp_path: Path) -> None:
    found, given = training(), files(tmp_path)
    found.train(instruction("client-2"), given, TrainingProgress())
    work = rpc.Evaluate(tuning=rpc.Train(seed=7, training_json="{}"))
    evaluation = rpc.Instruction(client_id="client-2", round=2, evaluate=work)
    tuned = found.evaluate(evaluation, given, TrainingProgress())
    work.ClearField("tuning")
    plain = found.evaluate(
        rpc.Instruction(client_id="client-2", round=2, evaluate=work), given, TrainingProgress()
    )
    assert isinstance(tuned, MeasureSums)
    assert isinstance(plain, MeasureSums)
    assert tuned.means()["squared_error"] < plain.means()["squared_error"]
    assert (tmp_path / "own" / "trainings").read_text() == "1\n", "the folder is as it was"


def test_loading_a_torch_task_imports_the_modules_of_its_first_step() -> None:
    """Run in a separate process, which has not imported these modules yet."""
    program = """
import sys
from torch import nn
from support.trainer_plugins.potluck_trainers import Descent, Line
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.task_training import LoadedTask

class Network(Line):
    def model(self):
        return nn.Linear(1, 1)

OwnTraining(LoadedTask("line", Line(), "cpu", None), Descent(""))
assert "torch._dynamo" not in sys.modules, "named arrays need no torch"
OwnTraining(LoadedTask("network", Network(), "cpu", None), Descent(""))
assert "torch._dynamo" in sys.modules
"""
    tests = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(tests)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
