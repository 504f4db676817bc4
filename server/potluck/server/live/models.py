"""The models of a run: the model that clients train from, the current round's model, the states of
selector and strategy, and the files of auxiliaries (further tensors that a strategy sends)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.interruptible import in_thread
from potluck.common.learning.spread import Coverage, Spread
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.large_arrays import empty
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.instructions import model_reference
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.model_work import ModelWork
from potluck.server.selection import Judgement, Population, UpdateFacts
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles, ModelVersion, Rendition
from potluck.server.store.records import Metrics
from potluck.server.strategy import Strategy

# States -------------------------------------------------------------------------------------------
# These functions block: call them in a thread.


@dataclass(frozen=True, kw_only=True)
class States:
    """The states that the selector and the strategy keep between rounds."""

    selector: State
    strategy: State


def write_states(files: ModelFiles, states: States) -> str | None:
    """Write the arrays of the selector's and the strategy's state. Return the file's digest; None
    if there are no arrays."""
    arrays = {
        f"{owner}/{name}": np.ascontiguousarray(array)
        for owner, state in (("selector", states.selector), ("strategy", states.strategy))
        for name, array in state.arrays.items()
    }
    return files.write(arrays).blake3 if arrays else None


def read_states(
    files: ModelFiles,
    blake3: str | None,
    selector_scalars: Mapping[str, Any],
    strategy_scalars: Mapping[str, Any],
) -> States:
    """Return the states: the arrays that `write_states` wrote, and these scalars from the
    database."""
    arrays: dict[str, dict[str, NDArray[Any]]] = {"selector": {}, "strategy": {}}
    if blake3 is not None:
        files.verify(blake3)
        with files.large_arrays(), files.opened(blake3) as file:
            for name, stored in file.arrays.stored.items():
                owner, _, own_name = name.partition("/")
                arrays[owner][own_name] = array = empty(stored.shape, stored.dtype)
                stored.read_into(array)
    return States(
        selector=State(scalars=selector_scalars, arrays=arrays["selector"]),
        strategy=State(scalars=strategy_scalars, arrays=arrays["strategy"]),
    )


# Models -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoundModel:
    """The model of a round. Until the updates are combined, this is the previous model.

    facts: facts about the updates for the selector. judgement: the selector's judgement on them.
    late_weights: weights of the late updates that are part of the model, in the order in which they
    joined. training_loss: mean loss of the trainings, if it is known from a sum of updates; else
    None. spent: privacy loss ε of each client in the run so far, if the coordinator adds noise;
    else None.
    """

    model: ModelVersion
    strategy_state: State
    training_loss: float | None = None
    spent: Mapping[str, float] | None = None
    late_weights: Sequence[float] = ()
    facts: UpdateFacts | None = None
    judgement: Judgement = field(default_factory=Judgement)
    metrics: Metrics = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    coverage: Mapping[str, Coverage] = field(default_factory=dict)


class Models:
    """Owns the models of a run, and the states of its selector and its strategy.

    Used on the event loop. work: computations that run in threads. current: the model that clients
    train from. states: states of selector and strategy after the last committed round. result:
    result of the current attempt; between rounds, of the last round. trained: completed share, in
    [0, 1], of the strategy's training on the coordinator; None if no such training runs.
    """

    def __init__(
        self,
        plan: RunPlan,
        work: ModelWork,
        files: ModelFiles,
        current: ModelVersion,
        states: States,
    ) -> None:
        self.work = work
        self.current = current
        self.states = states
        self.result = RoundModel(model=current, strategy_state=states.strategy)
        self.trained: float | None = None
        self._plan = plan
        self._files = files
        self._before: ModelVersion | None = None  # previous model, until `last_step` has used it
        self._enrolled: tuple[State, int, State] | None = None  # (rounds, clients, state)

    @contextmanager
    def training(self) -> Iterator[Callable[[float], None]]:
        """Set `trained` while the block runs, to show the progress of a training on the
        coordinator. Yields a function to call with the completed share."""

        def note(share: float) -> None:
            self.trained = share

        try:
            yield note
        finally:
            self.trained = None

    @property
    def digests(self) -> set[str]:
        """Digests of the models' files, which must not be deleted now."""
        return {digest for model in self._models() for digest in model.digests}

    def encoding_of(self, blake3: str) -> Encoding:
        """Return the encoding of one of the models' files; float32 for other files."""
        found = (each for each in self._models() if blake3 in each.digests)
        return next(found, self.current).encoding_of(blake3)

    def _models(self) -> list[ModelVersion]:
        models = (self.current, self._before, self.result.model)
        return [model for model in models if model is not None]

    def whole(self, blake3: str) -> ModelVersion:
        """Return a model by its digest, to be sent as one complete file. Raises NotFoundError."""
        size = self._files.existing(blake3).stat().st_size
        rendition = Rendition(blake3=blake3, size=size, encoding=Encoding.FLOAT32)
        return ModelVersion(blake3=blake3, size=size, renditions=(rendition,))

    def start_selector(self, population: Population) -> None:
        """Set the selector's initial state for these clients."""
        selector = self._plan.selector.init(population)
        self.states = replace(self.states, selector=selector)

    def begin_attempt(self) -> None:
        """Discard the result of the previous attempt."""
        self._files.let_go(self.result.model.digests)
        self.result = RoundModel(model=self.current, strategy_state=self.states.strategy)

    def commit(self, states: States) -> None:
        """Use the current result as the model that clients train from. states: the states stored
        with this result."""
        self._before, self.current, self.states = self.current, self.result.model, states

    async def last_step(self) -> float | None:
        """Return the norm of the last committed change of the model. Return None if no new change
        was committed since the last call."""
        if self._before is None:
            return None
        norm = await in_thread(self.work.step_norm, self._before, self.current)
        self._before = None
        return norm

    async def enrolled(self, clients: int, population: Callable[[], Population]) -> State:
        """Return the strategy's state for the current round, adapted to the clients in the roster.

        It is computed once for each roster. After a kill it is computed again from the same
        profiles, with the same result.
        """
        strategy, committed = self._plan.strategy, self.states.strategy
        if not (strategy.parts or strategy.needs_profiles):
            return committed
        known = self._enrolled
        if known is not None and known[0] is committed and known[1] == clients:
            return known[2]
        seed = self._plan.run_file.seed
        found = await in_thread(strategy.enrol, committed, population(), seed)
        self._enrolled = (committed, clients, found)
        return found


# Auxiliaries --------------------------------------------------------------------------------------


class AuxiliaryFiles:
    """Writes the files of auxiliaries, the tensors that a strategy sends beside the model, and
    returns references to these files. Used on the event loop."""

    def __init__(self, strategy: Strategy, models: Models, files: ModelFiles) -> None:
        self._strategy = strategy
        self._models = models
        self._files = files
        self._shared: tuple[int, ModelVersion] | None = None
        self._personal: dict[str, ModelVersion] = {}

    @property
    def digests(self) -> set[str]:
        """Digests of the files that hosts may still fetch."""
        files = list(self._personal.values())
        if self._shared is not None:
            files.append(self._shared[1])
        return {digest for file in files for digest in file.digests}

    async def message(self, client: str, round_number: int) -> coordinator_pb2.Auxiliary | None:
        """Return the part of a client's instruction that names its auxiliary files; None if the
        strategy sends none."""
        strategy, models = self._strategy, self._models
        correction = strategy.correction
        if correction is None:
            return None
        shared = await self._shared_file(round_number)
        message = coordinator_pb2.Auxiliary(
            correction=coordinator_pb2.Plugin(
                name=correction.name, options_json=json.dumps(dict(correction.options))
            ),
            names=sorted(strategy.auxiliary),
            shared=model_reference(shared),
        )
        personal = await in_thread(strategy.personal, models.states.strategy, client)
        if personal:
            file = await in_thread(models.work.write_auxiliaries, personal)
            self._personal[client] = file
            message.personal.CopyFrom(model_reference(file))
        return message

    async def _shared_file(self, round_number: int) -> ModelVersion:
        """Return the file of the auxiliaries that all clients receive. It is written once per
        round; after a restart, the same file is written again."""
        models = self._models
        if self._shared is None or self._shared[0] != round_number:
            with self._files.large_arrays():
                auxiliaries = await in_thread(self._strategy.broadcast, models.states.strategy)
            file = await in_thread(models.work.write_auxiliaries, auxiliaries)
            self._files.let_go(self.digests - file.digests)
            self._shared, self._personal = (round_number, file), {}
        return self._shared[1]
