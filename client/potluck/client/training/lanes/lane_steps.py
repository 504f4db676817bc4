"""The steps of several clients' trainings, taken together.

What comes out for a client is what `steps.loop` makes of it, up to the rounding of floats: the same
samples in the same order, the same masks of dropout, the same rule of the steps. It does not depend
on the other clients' data, nor on whether they are there at all: the shapes of all that is computed
follow from the number of lanes and the numbers of steps that are planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.sgd import sgd

from potluck.client.training.lanes.lane_network import LaneNetwork
from potluck.common.errors import RoundClosedError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples

_STAGED_BYTES = 32 << 20
"""The inputs of as many steps are laid out at once."""
_REPORTS = 50


@dataclass(frozen=True, kw_only=True)
class ClientLane:
    """A client's place. steps: planned, 0 for one that is not known. data: on the training device;
    None for a client that is not trained this time: its lane goes along with nothing in it."""

    steps: int
    data: Examples | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LaneResult:
    """What came of a lane. weights: in the order of the network's names; views. loss: the mean over
    the last pass; NaN or infinite, as weights may be, where the training diverged."""

    weights: Sequence[Tensor]
    loss: float

    def is_finite(self) -> bool:
        """False where the training diverged."""
        sums = torch.stack([each.sum().double() for each in self.weights])
        return math.isfinite(self.loss) and bool(sums.isfinite().all())


@dataclass(frozen=True, kw_only=True)
class LaneRules:
    """How all lanes train. mu: of the proximal term, 0 for none. round: from 1."""

    settings: LocalTraining
    mu: float
    round: int


def train_lanes(
    network: LaneNetwork,
    received: Sequence[Tensor],
    lanes: Sequence[ClientLane],
    rules: LaneRules,
    *,
    progress: Callable[[float], None],
    cancelled: Callable[[], bool],
) -> list[LaneResult | None]:
    """Train all lanes from the same weights; a result for each that has data, in their order.

    received: stacked, lanes × …, as `network.names`; written over. Raises RoundClosedError when
    cancelled.
    """
    order = sorted(range(len(lanes)), key=lambda lane: (-lanes[lane].steps, lane))
    run = _Run(network, received, [lanes[lane] for lane in order], rules)
    planned = run.lanes[0].steps if run.lanes else 0
    report_every = max(1, planned // _REPORTS)
    taken = 0
    while taken < planned:
        active = sum(lane.steps > taken for lane in run.lanes)
        last = run.lanes[active - 1].steps
        run.narrow(active)
        for step in run.staged(taken, min(last, taken + run.at_once)):
            if cancelled():
                raise RoundClosedError("the training was cancelled; nobody waits for it")
            run.take(*step)
            taken += 1
            if taken % report_every == 0:
                progress(taken / planned)
    results: list[LaneResult | None] = [None] * len(lanes)
    for place, lane in enumerate(order):
        if lanes[lane].data is not None:
            results[lane] = run.result(place)
    progress(1.0)
    return results


class _Batches:
    """The batches of one lane: those of `steps.loop`, padded to one size."""

    def __init__(self, lane: ClientLane, settings: LocalTraining) -> None:
        assert lane.data is not None  # noqa: S101  # an empty lane has none
        samples, size = len(lane.data), settings.batch_size
        order = torch.Generator().manual_seed(lane.seed)
        positions = torch.zeros(lane.steps, size, dtype=torch.int64)
        self.sizes = torch.zeros(lane.steps, dtype=torch.int64)
        taken = 0
        while taken < lane.steps:
            self.last_pass = taken
            permutation = torch.randperm(samples, generator=order)
            for batch in torch.split(permutation, size)[: lane.steps - taken]:
                positions[taken, : len(batch)] = batch
                self.sizes[taken] = len(batch)
                taken += 1
        self.positions = positions

    def mean_loss(self, losses: Tensor) -> float:
        """Over the last pass. losses: of each step, float64."""
        sizes = self.sizes[self.last_pass :].double()
        return float((losses[self.last_pass :] * sizes).sum() / sizes.sum())


class _Run:
    """Lanes under way, those with the most steps first, so that those that go on are the first."""

    def __init__(
        self,
        network: LaneNetwork,
        received: Sequence[Tensor],
        lanes: Sequence[ClientLane],
        rules: LaneRules,
    ) -> None:
        settings = rules.settings
        self.lanes, self._network, self._rules = lanes, network, rules
        self._rate = settings.learning_rate_in(rules.round)
        self._all = list(received)
        self._received = [each.clone() for each in received] if rules.mu else []
        self._moments = [torch.zeros_like(each) for each in received] if settings.momentum else []
        self._device = received[0].device
        self._batches = [None if lane.data is None else _Batches(lane, settings) for lane in lanes]
        self._masks = [torch.Generator().manual_seed(lane.seed) for lane in lanes]
        self._losses: list[Tensor] = []
        known = next(lane.data for lane in lanes if lane.data is not None)
        sample = known.inputs_at(torch.zeros(1, dtype=torch.int64, device=known.labels.device))
        self._shape, self._dtype = sample.shape[1:], sample.dtype
        staged = len(lanes) * settings.batch_size * sample.nbytes
        self.at_once = max(1, _STAGED_BYTES // max(1, staged))
        self._active = 0
        self._weights: list[Tensor] = []

    def narrow(self, active: int) -> None:
        """Only the first lanes go on."""
        if active != self._active:
            self._active = active
            self._weights = [each[:active].detach().requires_grad_() for each in self._all]

    def staged(self, begin: int, end: int) -> Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Inputs, labels, weights of the samples in their batch's mean, and sizes of the batches,
        of each of some steps, for the lanes that go on."""
        steps, size = end - begin, self._rules.settings.batch_size
        shape = (steps, self._active, size)
        inputs = torch.zeros(*shape, *self._shape, dtype=self._dtype, device=self._device)
        labels = torch.zeros(shape, dtype=torch.int64, device=self._device)
        sizes = torch.zeros(steps, self._active, dtype=torch.int64)
        for place, (lane, batches) in enumerate(zip(self.lanes, self._batches, strict=True)):
            if place == self._active:
                break
            if lane.data is None or batches is None:
                continue
            positions = batches.positions[begin:end].flatten().to(lane.data.labels.device)
            inputs[:, place] = lane.data.inputs_at(positions).view(steps, size, *self._shape)
            labels[:, place] = lane.data.labels.index_select(0, positions).view(steps, size)
            sizes[:, place] = batches.sizes[begin:end]
        there = torch.arange(size) < sizes.unsqueeze(2)
        weights = (there / sizes.clamp(min=1).unsqueeze(2)).to(self._device)
        return list(zip(inputs, labels, weights, sizes, strict=True))

    def take(self, inputs: Tensor, labels: Tensor, weights: Tensor, sizes: Tensor) -> None:
        """A step of every lane that goes on."""
        masks = _Dropout(self._masks, sizes)
        logits = self._network.forward(self._weights, inputs, masks)
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = (each.view_as(weights) * weights).sum(1)
        if self._rules.mu:
            losses = losses + self._proximal()
        gradients = list(torch.autograd.grad(losses.sum(), self._weights))
        with torch.no_grad():
            self._losses.append(losses.detach())
            self._move(gradients)

    def _proximal(self) -> Tensor:
        """μ/2 · ‖w − received‖² of each lane."""
        squares = [
            (now - then[: self._active]).square().flatten(1).sum(1)
            for now, then in zip(self._weights, self._received, strict=True)
        ]
        return torch.stack(squares).sum(0) * (self._rules.mu / 2)

    def _move(self, gradients: list[Tensor]) -> None:
        """As `StochasticGradientDescent`, after `clip_grad_norm_` where gradients are clipped."""
        settings = self._rules.settings
        if settings.gradient_clip is not None:
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
            factors = (settings.gradient_clip / (norms + 1e-6)).clamp(max=1.0)
            for each in gradients:
                each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))
        moments: list[Tensor | None] = [each[: self._active] for each in self._moments]
        sgd(
            [each.detach() for each in self._weights],
            gradients,
            moments or [None for _ in gradients],
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            lr=self._rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            foreach=True,
        )

    def result(self, place: int) -> LaneResult:
        """What came of the lane at a place."""
        batches, steps = self._batches[place], self.lanes[place].steps
        assert batches is not None  # noqa: S101  # asked of lanes with data alone
        losses = torch.stack([each[place] for each in self._losses[:steps]]).double().cpu()
        return LaneResult(
            weights=[each[place] for each in self._all], loss=batches.mean_loss(losses)
        )


class _Dropout:
    """Masks that each lane draws as its client would alone: from a generator of its own, for as
    many samples as its batch has. On a CPU."""

    def __init__(self, generators: Sequence[torch.Generator], sizes: Tensor) -> None:
        self._generators, self._sizes = generators, sizes.tolist()

    def __call__(self, share: float, shape: torch.Size) -> Tensor:
        """Zeros for a share of the activations, and what makes up for them elsewhere."""
        if share >= 1:
            return torch.zeros(shape)
        factors = torch.zeros(shape)
        for lane, size in enumerate(self._sizes):
            factors[lane, :size].bernoulli_(1 - share, generator=self._generators[lane])
        return factors.div_(1 - share)
