"""The models of a run: the one its clients train from, and the one that a round makes."""

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
    """The model of a round; until its updates are reduced, the model before it.

    facts, judgement: the selector's facts about the updates, and its judgement. late_weights: of
    the late updates in it, in the order in which they joined. training_loss: mean of the trainings'
    losses, if only the sum of the updates reveals it.
    """

    model: ModelVersion
    strategy_state: State
    training_loss: float | None = None
    late_weights: Sequence[float] = ()
    facts: UpdateFacts | None = None
    judgement: Judgement = field(default_factory=Judgement)
    metrics: Metrics = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    coverage: Mapping[str, Coverage] = field(default_factory=dict)


class Models:
    """Own the models of a run, and the states of its selector and its strategy.

    Lives on the event loop. work: the heavy part, done in threads. current: the model that clients
    train from. states: of selector and strategy after the last committed round. result: of the
    attempt under way, or of the last round until the next one is selected. trained: the share of
    the training on the coordinator that is done; None while there is none.
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
        self._before: ModelVersion | None = None  # as long as its step is not measured
        self._enrolled: tuple[State, int, State] | None = None  # committed, clients, for them

    @property
    def digests(self) -> set[str]:
        """The files of these models, which must not be deleted now."""
        models = (self.current, self._before, self.result.model)
        return {digest for model in models if model is not None for digest in model.digests}

    def whole(self, blake3: str) -> ModelVersion:
        """A model by its digest, as its whole file alone. Raises NotFoundError."""
        size = self._files.existing(blake3).stat().st_size
        rendition = Rendition(blake3=blake3, size=size, encoding=Encoding.FLOAT32)
        return ModelVersion(blake3=blake3, size=size, renditions=(rendition,))

    def start_selector(self, population: Population) -> None:
        """Begin with a selector state for these clients."""
        selector = self._plan.selector.init(population)
        self.states = replace(self.states, selector=selector)

    def begin_attempt(self) -> None:
        """Drop the result of the attempt before."""
        self._files.let_go(self.result.model.digests)
        self.result = RoundModel(model=self.current, strategy_state=self.states.strategy)

    def commit(self, states: States) -> None:
        """Make the result the model that clients train from. states: those it was stored with."""
        self._before, self.current, self.states = self.current, self.result.model, states

    async def last_step(self) -> float | None:
        """Measure the last committed step, once; None if that is done."""
        if self._before is None:
            return None
        norm = await in_thread(self.work.step_norm, self._before, self.current)
        self._before = None
        return norm

    async def enrolled(self, clients: int, population: Callable[[], Population]) -> State:
        """Return the strategy's state for the round under way, computed once for each roster.

        It may depend on which clients there are. After a kill it is computed again from the same
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
