"""The computations of a round on models and updates. Blocking; runs in worker threads."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.common.errors import (
    ConfigurationError,
    LayoutError,
    PluginError,
    RunError,
    TrainerError,
)
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.measures import MeasureSums, checked_measures
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_checks import check_lengths
from potluck.common.learning.task_failures import blamed_on_task, blamed_on_trainer
from potluck.common.learning.task_loading import numpy_seeded
from potluck.common.tensors.auxiliary import Auxiliaries, auxiliaries_layout, joined
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import buffer_names
from potluck.common.tensors.model_parts import DividedModel, divided
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import NamedTensors, Tensors, open_tensors
from potluck.common.trainer import EvaluationSettings, Trainer
from potluck.server.plan.compatibility import check_noised_evaluation, check_noised_model
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.apply_round import OpenUpdates, RoundNumbers, apply_round, opened
from potluck.server.reduce.audit.audit_records import BiasRecords, bias_changes
from potluck.server.reduce.judging import UpdatesSeen, judged
from potluck.server.reduce.late_updates import LateUpdate, joined_by_late, staleness_weight
from potluck.server.reduce.move_by_sum import Total, move_by_sum
from potluck.server.reduce.network_memory import NetworksInFiles
from potluck.server.reduce.publishing import load_weights, publish
from potluck.server.reduce.reduction import reduce
from potluck.server.reduce.update_facts import read_facts
from potluck.server.reduce.update_files import (
    SpooledUpdate,
    UpdateFiles,
    renormalized,
    shares_sent,
)
from potluck.server.reduce.update_norms import distance
from potluck.server.selection import Judgement, UpdateFacts
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles, ModelVersion, whole
from potluck.server.strategy import Combine

SomeTotal = TypeVar("SomeTotal", bound=Total)

_TORCH = threading.Lock()  # torch's generator and thread count are global: one user at a time

_EVALUATION_DATA = "the coordinator's evaluation data"


@dataclass(frozen=True, kw_only=True)
class OpenedRound:
    """The opened updates of a round, in client order, and the model from which their training
    started.

    buffers: names of the floating-point tensors that are not parameters.
    """

    updates: Sequence[EncodedUpdate]
    model: Tensors
    buffers: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class MovedModel:
    """The next model, and facts about the round's updates for the selector.

    late_weights: the weight of each late update, relative to a fresh one.
    """

    model: ModelVersion
    strategy_state: State
    facts: UpdateFacts
    judgement: Judgement
    late_weights: Sequence[float] = ()


class ModelWork:
    """Creates, checks, combines and evaluates the models of one run."""

    def __init__(
        self,
        plan: RunPlan,
        files: ModelFiles,
        data_directory: Path | None,
        threads: int,
        bias_records: BiasRecords | None = None,
    ) -> None:
        self._plan = plan
        self._files = files
        self._data_directory = data_directory
        self._threads = threads
        self._bias_records = bias_records
        self._layout: Layout | None = None
        self._made: DividedModel | None = None
        # held while the task's trainer evaluates; if it stays held, the trainer hangs
        self._measuring = threading.Lock()
        self._buffer_names: frozenset[str] | None = None

    @property
    def layout(self) -> Layout:
        """The model's layout; known once there is a model."""
        if self._layout is None:
            raise RunError("the run has no model yet")
        return self._layout

    # Models -----------------------------------------------------------------------------------

    def initial_model(self) -> ModelVersion:
        """Create the model before round 1: from the run's seed, or from the run's file of weights.

        Raises ConfigurationError or LayoutError if the file can't be used.
        """
        made = self._made_model()
        self._start_from_file(made)
        self._layout, self._buffer_names = made.layout, buffer_names(made.network)
        return self._publish(made.arrays(), None, 0)

    def check_start(self) -> None:
        """Check that the initial weights exist and fit the model, and that the strategy can train
        it.

        Raises ConfigurationError or LayoutError.
        """
        run_file, strategy = self._plan.run_file, self._plan.strategy
        if self._plan.selector.measures:
            self._check_measuring(run_file.selector.name)
        noised = run_file.privacy is not None and run_file.privacy.at_coordinator
        divides = run_file.model is not None and run_file.model.divides
        if (
            run_file.initial_model is not None
            or divides
            or noised
            or strategy.one_way
            or strategy.parts
            or strategy.needs_profiles
        ):
            made = self._new_model()
            self._start_from_file(made)
            strategy.check_model(made.layout)
            if noised:
                check_noised_model(made.network, made.layout)
        if noised and run_file.followed is not None:
            check_noised_evaluation(run_file, on_clients=self._own_samples() is None)

    def _check_measuring(self, selector: str) -> None:
        """Raise ConfigurationError unless the coordinator can evaluate updates, as this selector
        requires."""
        trainer, task = self._plan.trainer, self._plan.run_file.task.name
        why = ""
        if self._own_samples() is None:
            table = self._plan.run_file.model
            why = f"task '{task}' has no such data"
            if table is not None and table.keep:
                why = "clients `keep` tensors of [model], so the coordinator has no whole model"
        elif trainer is not None and "loss" not in trainer.measures:
            why = f"the trainer of task '{task}' measures no 'loss'"
        if why:
            raise ConfigurationError(
                f"selector {selector} evaluates updates on the coordinator's evaluation data, "
                f"but {why}; choose another selector, or change the task or model",
                selector=selector,
            )

    def base_blake3(self) -> str:
        """Digest of the part of the model that hosts load themselves; empty if all of it is sent.

        Raises ConfigurationError, LayoutError.
        """
        table = self._plan.run_file.model
        if table is None or not table.trainable:
            return ""
        self._made = self._new_model()
        return self._made.base_blake3

    def _start_from_file(self, made: DividedModel) -> None:
        name = self._plan.run_file.initial_model
        if name is not None:
            load_weights(
                made.network,
                name,
                self._data_directory,
                only=made.layout.by_name,
                left_out=made.kept,
            )

    def load(self, blake3: str) -> ModelVersion:
        """Load a model from disk by its digest. Raises StorageError if its files are damaged."""
        self._files.verify(blake3)
        with self._files.opened(blake3) as file:
            self._layout = file.layout
        return self._files.published(blake3)

    def _made_model(self) -> DividedModel:
        """Return an object of the task's model, whose weights the caller overwrites.

        The object is reused in later evaluations, because allocating it takes longer than filling
        it.
        """
        made = self._made or self._new_model()
        keeps = self._plan.run_file.evaluation.every or self._plan.selector.measures
        self._made = made if keeps else None
        return made

    def _new_model(self) -> DividedModel:
        task, seed = self._plan.run_file.task.name, self._plan.run_file.seed
        with _TORCH, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with (
                numpy_seeded(seed),
                NetworksInFiles(self._files.folder),
                blamed_on_task(task, "its model"),
            ):
                network = self._plan.task.model()
        return divided(network, self._plan.run_file.model, self._data_directory)

    def _publish(
        self,
        arrays: Mapping[str, NDArray[Any]],
        base: ModelVersion | None,
        round_number: int,
        draft: TensorDraft | None = None,
    ) -> ModelVersion:
        files, run_file = self._files, self._plan.run_file
        return publish(files, run_file, self.layout, arrays, base, round_number, draft)

    # Updates ----------------------------------------------------------------------------------

    @property
    def _updates(self) -> UpdateFiles:
        run_file, strategy = self._plan.run_file, self._plan.strategy
        returned = self.layout.without(strategy.one_way)
        return UpdateFiles(returned, run_file.transport.up, strategy.auxiliary)

    def largest_upload(self) -> int:
        """Maximum size of an update in bytes. It is above the size of a valid update: a file that
        is slightly too large is received, so that an error can name its fault."""
        return self._updates.largest

    def check_update(
        self,
        path: Path,
        model: ModelVersion,
        *,
        compressed: bool,
        finite: bool = False,
        dropped: Sequence[str] = (),
    ) -> None:
        """Check that a received file has the layout of this model's updates, and finite numbers.

        finite: True if a `FiniteScreen` read the whole file and found only finite numbers. dropped:
        the tensors that the update must omit. Raises LayoutError, NotFiniteError, TooLargeError.
        """
        files = self._updates.leaving_out(dropped)
        with contextlib.ExitStack() as stack:
            base = None
            if files.delta:
                whole = stack.enter_context(self._files.opened(model.blake3))
                base = NamedTensors.some(whole, files.layout)
            files.check(path, base, compressed=compressed, finite=finite)

    def droppable(self) -> Sequence[str]:
        """Names of the tensors that updates may omit: the floating-point parameters."""
        buffers = self._buffers()
        return [
            tensor.name
            for tensor in self._updates.layout.tensors
            if tensor.floating and tensor.elements and tensor.name not in buffers
        ]

    def next_model(
        self,
        round_number: int,
        updates: Sequence[SpooledUpdate],
        model: ModelVersion,
        state: State,
        *,
        clients: int,
        seen: UpdatesSeen,
        late: Sequence[LateUpdate] = (),
    ) -> MovedModel:
        """Combine a round's updates, in the order given, and compute the next model.

        clients: number of clients that have joined the run. seen: the updates as the selector sees
        them. late: updates of earlier rounds that join this one; the selector sees none of them. If
        the strategy also trains on the coordinator, the result is the start of that training; hosts
        can't fetch it yet.
        """
        if not updates:
            raise RunError(f"round {round_number} has no updates to reduce")
        strategy, files = self._plan.strategy, self._updates
        numbers = RoundNumbers(
            round=round_number,
            clients=max(clients, len(updates)),
            buffers=self._buffers(),
            limits=self._plan.run_file.sample_limits,
            weights=seen.weights,
        )
        with (
            self._files.opened(model.blake3, self.layout) as current,
            self._files.draft(files.layout) as draft,
            self._files.large_arrays(),
        ):
            before = NamedTensors.some(current, files.layout)
            with opened(updates, files, before) as these:
                facts, judgement = self._judge(these, before, numbers, seen)
                kept = these.without(seen.clients(judgement.set_aside))
                terms = self._plan.run_file.round.late_updates
                weight = functools.partial(
                    staleness_weight, beta=terms.beta, divisor=terms.exponential_divisor
                )
                with joined_by_late(
                    kept, late, files, self._files, before, numbers.buffers, weight
                ) as all_of_them:
                    arrays, state = apply_round(
                        strategy, state, current, all_of_them, numbers, draft=draft
                    )
                    factors = all_of_them.factors
                self._note_bias(round_number, these.clients, these.encoded, before)
                if strategy.trains:
                    published = whole(self._files.write(arrays, self.layout))
                else:
                    own = draft if not strategy.one_way else None
                    published = self._publish(arrays, model, round_number, own)
        return MovedModel(
            model=published,
            strategy_state=state,
            facts=facts,
            judgement=judgement,
            late_weights=() if factors is None else factors[len(kept.clients) :].tolist(),
        )

    def _judge(
        self, updates: OpenUpdates, before: Tensors, numbers: RoundNumbers, seen: UpdatesSeen
    ) -> tuple[UpdateFacts, Judgement]:
        """Return the facts about the updates that the selector gets, and its judgement on them."""
        selector, run_file = self._plan.selector, self._plan.run_file
        read = read_facts(
            selector.needs_facts,
            updates.encoded,
            before,
            seed=run_file.seed,
            buffers=numbers.buffers,
            classes=self._plan.task.classes,
        )
        facts = UpdateFacts(
            round=numbers.round,
            seed=run_file.seed,
            rows=seen.rows,
            samples=numbers.counts(updates).astype(np.float64),
            steps=np.array([max(1, row.steps) for row in updates.rows], dtype=np.int64),
            **read,
        )
        if any(updates.dropped):
            facts = replace(facts, shares=shares_sent(before.layout, updates.dropped))

        def loss_of_mean(places: Sequence[int], weights: NDArray[np.float64]) -> float:
            if not places:
                return self._loss(before.arrays)
            those = [updates.encoded[place] for place in places]
            dropped = [updates.dropped[place] for place in places]
            return self._loss(
                reduce(those, renormalized(Combine(weights=weights), dropped), before)
            )

        return facts, judged(selector, run_file.selector.name, seen.state, facts, loss_of_mean)

    def publish_trained(self, path: Path, model: ModelVersion, round_number: int) -> ModelVersion:
        """Publish the model that the strategy trained on the coordinator. model: the model before
        that training.

        Raises LayoutError if the file's tensors are not those of the model.
        """
        with open_tensors(path, expected=self.layout) as file:
            return self._publish(file.arrays, model, round_number)

    @contextmanager
    def opened_round(
        self, updates: Sequence[SpooledUpdate], model: ModelVersion
    ) -> Iterator[OpenedRound]:
        """Open a round's updates while the block runs, so that a noisy sum of them can be
        computed."""
        with (
            self._files.opened(model.blake3, self.layout) as current,
            opened(updates, self._updates, current) as these,
        ):
            yield OpenedRound(updates=these.encoded, model=current, buffers=self._buffers())

    def next_model_by_sum(
        self,
        round_number: int,
        included: Sequence[str],
        opened: AbstractContextManager[SomeTotal],
        model: ModelVersion,
        state: State,
        *,
        clients: int,
    ) -> tuple[ModelVersion, State, SomeTotal]:
        """Compute the next model from a sum over exactly these clients, in client order.

        Returns the model, the strategy's next state, and the sum, whose files are closed by then.
        """
        strategy = self._plan.strategy
        numbers = RoundNumbers(
            round=round_number, clients=max(clients, len(included)), buffers=self._buffers()
        )
        with (
            self._files.opened(model.blake3, self.layout) as current,
            opened as total,
            self._files.draft(self.layout) as draft,
            self._files.large_arrays(),
        ):
            arrays, state = move_by_sum(
                strategy, state, current, total, included, numbers, draft=draft
            )
            published = self._publish(arrays, model, round_number, draft)
        return published, state, total

    def _buffers(self) -> frozenset[str]:
        """Return the names of the model's floating-point tensors that are not parameters."""
        if self._buffer_names is None:
            self._buffer_names = buffer_names(self._made_model().network)
        return self._buffer_names

    # Auxiliaries ------------------------------------------------------------------------------

    def write_auxiliaries(self, auxiliaries: Auxiliaries) -> ModelVersion:
        """Write the auxiliaries that the strategy sends. Raises PluginError if one does not fit the
        model."""
        arrays = joined(auxiliaries)
        wanted = auxiliaries_layout(self.layout, auxiliaries)
        try:
            Layout.of(arrays).check_matches(wanted, what="auxiliary file", whose="model")
        except LayoutError as error:
            raise PluginError(
                f"the strategy's auxiliary tensors do not match the model: {error.message}"
            ) from error
        return whole(self._files.write(arrays, wanted))

    def _note_bias(
        self,
        round_number: int,
        clients: Sequence[str],
        encoded: Sequence[EncodedUpdate],
        current: Tensors,
    ) -> None:
        if self._bias_records is None:
            return
        by_client = dict(zip(clients, encoded, strict=True))
        changes = bias_changes(by_client, current, self._plan.task.classes)
        if changes:
            self._bias_records.write(round_number, changes)

    def step_norm(self, before: ModelVersion, after: ModelVersion) -> float:
        """Return the L2 distance between two models, over their floating-point tensors."""
        with (
            self._files.opened(before.blake3, self.layout) as old,
            self._files.opened(after.blake3, self.layout) as new,
        ):
            return distance(old, new)

    # Evaluation -------------------------------------------------------------------------------

    def clients_evaluate(self) -> bool:
        """True if this run evaluates models on the clients' held-out samples."""
        if not self._plan.run_file.evaluation.every:
            return False
        return bool(self._plan.client_models) or self._own_samples() is None

    def _own_samples(self) -> Any:
        """Return the coordinator's own held-out data; None if it has none, or can't evaluate a
        model."""
        table = self._plan.run_file.model
        if table is not None and table.keep:
            return None  # the coordinator has only a part of the model, and can't evaluate it
        with blamed_on_task(self._plan.run_file.task.name, _EVALUATION_DATA):
            return self._plan.task.evaluation_data(self._data_directory)

    def evaluate(self, model: ModelVersion) -> EvaluationCounts | MeasureSums | None:
        """Return the model's counts on the coordinator's own held-out data; None if it has none.

        Raises TrainingError; a TrainerError if the task's own trainer failed.
        """
        examples = self._own_samples()
        if examples is None:
            self._made = None
            return None
        with self._files.opened(model.blake3, self.layout) as file:
            return self._evaluated(file.arrays, examples)

    def _loss(self, arrays: Mapping[str, NDArray[Any]]) -> float:
        """Return a model's loss on the coordinator's held-out data; infinite if it is undefined or
        not finite.

        Raises TrainingError.
        """
        loss = self._evaluated(arrays, self._own_samples()).means().get("loss", math.inf)
        return loss if math.isfinite(loss) else math.inf

    def _evaluated(
        self, arrays: Mapping[str, NDArray[Any]], examples: Any
    ) -> EvaluationCounts | MeasureSums:
        task, name = self._plan.task, self._plan.run_file.task.name
        if self._plan.trainer is not None:
            return self._measure(self._plan.trainer, arrays, examples)
        check_lengths(examples, name, _EVALUATION_DATA)
        made = self._made_model()
        with _TORCH:
            torch.set_num_threads(self._threads)
            made.load(arrays)
            with blamed_on_task(name, _EVALUATION_DATA):
                return evaluate(
                    made.network,
                    examples,
                    classes=task.classes,
                    groups=task.groups,
                    device=torch.device("cpu"),
                )

    def _measure(
        self, trainer: Trainer, arrays: Mapping[str, NDArray[Any]], data: Any
    ) -> MeasureSums:
        """Evaluate a model with the task's own trainer. A trainer that hangs does not block other
        runs."""
        name = self._plan.run_file.task.name
        if not self._measuring.acquire(blocking=False):
            raise TrainerError(
                f"the trainer of task '{name}' is still evaluating an earlier model; check why "
                "the evaluation takes so long"
            )
        try:
            made = self._made_model()
            with _TORCH:
                torch.set_num_threads(self._threads)
                made.load(arrays)
            with blamed_on_task(name, _EVALUATION_DATA), blamed_on_trainer(name, _EVALUATION_DATA):
                settings = EvaluationSettings(seed=self._plan.run_file.seed)
                found = trainer.evaluate(made.network, data, settings)
            whose = f"the trainer of task '{name}', at {_EVALUATION_DATA},"
            return MeasureSums(measures=checked_measures(found, trainer.measures, whose))
        finally:
            self._measuring.release()
