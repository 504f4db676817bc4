"""The models of a run: the model that clients train from, and the model of the current round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.common.interruptible import in_thread
from potluck.common.learning.coverage import Coverage
from potluck.common.learning.spread import Spread
from potluck.common.tensors.encoding import Encoding
from potluck.server.aggregation.model_work import ModelWork
from potluck.server.aggregation.states import States
from potluck.server.rounds.plan import RunPlan
from potluck.server.selection import Judgement, Population, UpdateFacts
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles, ModelVersion, Rendition
from potluck.server.store.records import Metrics


@dataclass(frozen=True, kw_only=True)
class RoundModel:
    """The model of a round. Until the updates are combined, this is the previous model.

    facts: facts about the updates for the selector. judgement: the selector's judgement on them.
    late_weights: weights of the late updates that are part of the model, in the order in which they
    joined. training_loss: mean loss of the trainings, if it is known from a sum of updates; else
    None. spent: ε of each client in the run, if the coordinator adds noise; else None.
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
    result of the current attempt; between rounds, of the last round. trained: completed share of
    the training on the coordinator; None if there is none.
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

    @property
    def digests(self) -> set[str]:
        """Digests of the models' files, which must not be deleted now."""
        models = (self.current, self._before, self.result.model)
        return {digest for model in models if model is not None for digest in model.digests}

    def whole(self, blake3: str) -> ModelVersion:
        """Return a model by its digest, with only its whole file. Raises NotFoundError."""
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
        """Make the result the model that clients train from. states: the states stored with this
        result."""
        self._before, self.current, self.states = self.current, self.result.model, states

    async def last_step(self) -> float | None:
        """Return the norm of the last committed step. Return None if no new step was committed
        since the last call."""
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
