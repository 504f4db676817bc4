"""The steps of several clients' trainings, each computed for all clients at once.

A client's result equals that of `steps.loop` up to the rounding of floats: the samples and their
order, the dropout masks and the optimiser's rule are the same. The result does not depend on the
other clients' data, nor on their presence: the shapes of all tensors follow from the number of
lanes and the planned numbers of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.client.training.lanes.lane_layers import LaneLayer
from potluck.client.training.lanes.lane_network import LaneNetwork
from potluck.common.errors import RoundClosedError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples

# Vectors over lanes -------------------------------------------------------------------------------


class LaneVectors:
    """Stacked tensors, lanes × …, with all their numbers in one flat tensor.

    flat: all numbers, tensor by tensor. tensors: views into it.
    """

    def __init__(self, like: Sequence[Tensor], lanes: int) -> None:
        """Make zeros for `lanes` lanes. like: stacked tensors of any number of lanes."""
        shapes = [(lanes, *each.shape[1:]) for each in like]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        first = like[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.tensors = [
            part.view(shape)
            for part, shape in zip(torch.split(self.flat, sizes), shapes, strict=True)
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], lanes: int) -> LaneVectors:
        """Return a copy of the first lanes of stacked tensors."""
        made = cls(tensors, lanes)
        for mine, theirs in zip(made.tensors, tensors, strict=True):
            mine.copy_(theirs[:lanes])
        return made

    def norms(self) -> Tensor:
        """Return the Euclidean norm of each lane's vector."""
        of_tensors = [torch.linalg.vector_norm(each.flatten(1), dim=1) for each in self.tensors]
        found: Tensor = torch.linalg.vector_norm(torch.stack(of_tensors), dim=0)
        return found

    def scale(self, factors: Tensor) -> None:
        """Multiply each lane by its factor."""
        for each in self.tensors:
            each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))

    def squares(self) -> Tensor:
        """Return the squared Euclidean norm of each lane's vector."""
        return torch.stack([each.square().flatten(1).sum(1) for each in self.tensors]).sum(0)


# The steps ----------------------------------------------------------------------------------------

_STAGED_BYTES = 4 << 20
"""Maximum size of the inputs that are prepared at once, for several steps, on a CPU. It fits in a
cache. With 32 MB, allocating new pages took 1/14 of the time of LeNet-5's training."""
_STAGED_BYTES_ON_GPU = 32 << 20
"""Maximum size of prepared inputs on a GPU, where few large copies are faster."""
_REPORTS = 50


@dataclass(frozen=True, kw_only=True)
class ClientLane:
    """A client's place in a batched step: its samples and its planned steps.

    steps: planned number of steps; 0 for an unknown client. data: samples on the training device.
    None for a client that is not trained this time: its lane is then part of the batched step, but
    has no samples.
    """

    steps: int
    data: Examples | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LaneResult:
    """Result of the training in one lane.

    weights: views, in the order of the network's names. loss: mean over the last pass. Loss and
    weights may be NaN or infinite if the training diverged."""

    weights: Sequence[Tensor]
    loss: float

    def is_finite(self) -> bool:
        """Return False if the training diverged."""
        sums = torch.stack([each.sum().double() for each in self.weights])
        return math.isfinite(self.loss) and bool(sums.isfinite().all())


@dataclass(frozen=True, kw_only=True)
class LaneRules:
    """Rules for all lanes. mu: weight of the proximal term, 0 for none. round: from 1."""

    settings: LocalTraining
    mu: float
    round: int


@torch.no_grad()
def train_lanes(
    network: LaneNetwork,
    received: Sequence[Tensor],
    lanes: Sequence[ClientLane],
    rules: LaneRules,
    *,
    progress: Callable[[float], None],
    cancelled: Callable[[], bool],
) -> list[LaneResult | None]:
    """Train all lanes from the same weights; return a result, or None for a lane without data.

    received: stacked weights, lanes × …, in the order of `network.names`. Raises RoundClosedError
    when cancelled.
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
                raise RoundClosedError("the training was cancelled, because no run waits for it")
            run.take(step)
            taken += 1
            if taken % report_every == 0:
                progress(taken / planned)
    run.finish()
    results: list[LaneResult | None] = [None] * len(lanes)
    for place, lane in enumerate(order):
        if lanes[lane].data is not None:
            results[lane] = run.result(place)
    progress(1.0)
    return results


class _Batches:
    """The batches of one lane: the same as in `steps.loop`, padded to equal size."""

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
        """Return the mean loss over the last pass. losses: one per step of that pass, float64."""
        sizes = self.sizes[self.last_pass :].double()
        return float((losses * sizes).sum() / sizes.sum())


@dataclass(frozen=True)
class _Step:
    """A step of the lanes that are still training.

    inputs: lanes × samples × …. labels: lanes × samples × 1. weights: lanes × samples × 1, each
    sample's weight in its batch's mean. sizes: sizes of the batches.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    sizes: Sequence[int]


class _Run:
    """The lanes in training, sorted by number of steps, largest first."""

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
        self._all = LaneVectors.of(received, len(lanes))
        self._received = LaneVectors.of(received, 1)
        self._device = received[0].device
        self._batches = [None if lane.data is None else _Batches(lane, settings) for lane in lanes]
        self._masks = [torch.Generator().manual_seed(lane.seed) for lane in lanes]
        self._losses: dict[int, Tensor] = {}
        self._loss_from = min((each.last_pass for each in self._batches if each), default=0)
        self._taken = 0
        known = next(lane.data for lane in lanes if lane.data is not None)
        sample = known.inputs_at(torch.zeros(1, dtype=torch.int64, device=known.labels.device))
        self._shape, self._dtype = sample.shape[1:], sample.dtype
        staged = len(lanes) * settings.batch_size * sample.nbytes
        most = _STAGED_BYTES if self._device.type == "cpu" else _STAGED_BYTES_ON_GPU
        self.at_once = max(1, most // max(1, staged))
        self._weights = self._gradients = self._all
        self._moments: LaneVectors | None = None
        self._layers: Sequence[LaneLayer] = ()

    def narrow(self, active: int) -> None:
        """Continue with the first `active` lanes only."""
        if self._layers and active == len(self._weights.tensors[0]):
            return
        self._put_back()
        self._weights = LaneVectors.of(self._all.tensors, active)
        self._gradients = LaneVectors(self._all.tensors, active)
        if self._rules.settings.momentum:
            before = self._moments
            self._moments = (
                LaneVectors(self._all.tensors, active)
                if before is None
                else LaneVectors.of(before.tensors, active)
            )
        self._layers = self._network.layers_on(self._weights.tensors, self._gradients.tensors)

    def _put_back(self) -> None:
        """Copy the weights of the lanes that are still training to the stack of all lanes."""
        if self._layers:
            for mine, theirs in zip(self._all.tensors, self._weights.tensors, strict=True):
                mine[: len(theirs)] = theirs

    def staged(self, begin: int, end: int) -> Iterator[_Step]:
        """Yield some steps of the lanes that are still training."""
        steps, size = end - begin, self._rules.settings.batch_size
        active = len(self._weights.tensors[0])
        shape = (steps, active, size)
        inputs = torch.zeros(*shape, *self._shape, dtype=self._dtype, device=self._device)
        labels = torch.zeros(shape, dtype=torch.int64, device=self._device)
        sizes = torch.zeros(steps, active, dtype=torch.int64)
        for place, (lane, batches) in enumerate(zip(self.lanes, self._batches, strict=True)):
            if place == active:
                break
            if lane.data is None or batches is None:
                continue
            positions = batches.positions[begin:end].flatten().to(lane.data.labels.device)
            inputs[:, place] = lane.data.inputs_at(positions).view(steps, size, *self._shape)
            labels[:, place] = lane.data.labels.index_select(0, positions).view(steps, size)
            sizes[:, place] = batches.sizes[begin:end]
        there = torch.arange(size) < sizes.unsqueeze(2)
        weights = (there / sizes.clamp(min=1).unsqueeze(2)).to(self._device)
        each = (inputs.unbind(), labels.unsqueeze(3).unbind(), weights.unsqueeze(3).unbind())
        return map(_Step, *each, sizes.tolist())

    def take(self, step: _Step) -> None:
        """Take a step in every lane that is still training."""
        masks, outputs = _Dropout(self._masks, step.sizes), step.inputs
        for layer in self._layers:
            outputs = layer.forward(outputs, masks)
        if self._taken >= self._loss_from:
            self._losses[self._taken] = self._loss(outputs, step)
        # The gradient of cross-entropy: the softmax, minus 1 at the label.
        gradient = _softmax(outputs).mul_(step.weights)
        gradient.scatter_add_(2, step.labels, -step.weights)
        for place in range(len(self._layers) - 1, -1, -1):
            gradient = self._layers[place].backward(gradient, first=place == 0)
        self._move()
        self._taken += 1

    def _loss(self, logits: Tensor, step: _Step) -> Tensor:
        """Return each lane's loss, with the proximal term if there is one."""
        likely = torch.log_softmax(logits, 2).gather(2, step.labels)
        losses = -(likely * step.weights).sum((1, 2))
        if self._rules.mu:  # μ/2 · ‖w − received‖²
            away = LaneVectors.of(self._weights.tensors, len(losses))
            for mine, theirs in zip(away.tensors, self._received.tensors, strict=True):
                mine.sub_(theirs)
            losses = losses + away.squares() * (self._rules.mu / 2)
        return losses

    def _move(self) -> None:
        """Clip gradients as `clip_grad_norm_` does, then take a step as `StochasticGradientDescent`
        does.
        """
        settings, mu = self._rules.settings, self._rules.mu
        weights, gradients = self._weights.flat, self._gradients
        if mu:
            for each, now, then in zip(
                gradients.tensors, self._weights.tensors, self._received.tensors, strict=True
            ):
                each.add_(now - then, alpha=mu)
        if settings.gradient_clip is not None:
            gradients.scale((settings.gradient_clip / (gradients.norms() + 1e-6)).clamp(max=1.0))
        way = gradients.flat
        if settings.weight_decay:
            way.add_(weights, alpha=settings.weight_decay)
        if self._moments is not None:
            way = self._moments.flat.mul_(settings.momentum).add_(way)
        weights.add_(way, alpha=-self._rate)

    def result(self, place: int) -> LaneResult:
        """Return the result of the lane at index `place`. Call it after the last step."""
        batches, steps = self._batches[place], self.lanes[place].steps
        assert batches is not None  # noqa: S101  # asked of lanes with data alone
        losses = torch.stack(
            [self._losses[step][place] for step in range(batches.last_pass, steps)]
        )
        return LaneResult(
            weights=[each[place] for each in self._all.tensors],
            loss=batches.mean_loss(losses.double().cpu()),
        )

    def finish(self) -> None:
        """Store the final weights. Call it after the last step."""
        self._put_back()


def _softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, 3 times as fast as torch's for few classes."""
    powers = (logits - logits.amax(2, keepdim=True)).exp_()
    return powers.div_(powers.sum(2, keepdim=True))


class _Dropout:
    """Dropout masks: each lane draws the masks that its client would draw in a separate training.

    Each lane has its own generator, on the CPU, and draws for the samples of its batch."""

    def __init__(self, generators: Sequence[torch.Generator], sizes: Sequence[int]) -> None:
        self._generators, self._sizes = generators, sizes

    def __call__(self, share: float, shape: torch.Size) -> Tensor:
        """Return 0 for a random share of the activations, and 1 / (1 − share) for the others."""
        if share >= 1:
            return torch.zeros(shape)
        factors = torch.zeros(shape)
        for lane, size in enumerate(self._sizes):
            factors[lane, :size].bernoulli_(1 - share, generator=self._generators[lane])
        return factors.div_(1 - share)
