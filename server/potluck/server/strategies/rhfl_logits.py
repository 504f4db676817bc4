"""RHFL with one model per client. The models learn from one another's outputs (Fang & Ye 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.tensors.layout import Layout
from potluck.server.selection import Population
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategies.rhfl import confidence, losses_before, losses_told
from potluck.server.strategies.server_step import moved
from potluck.server.strategy import (
    Combine,
    RoundContext,
    ServerTraining,
    UpdateStatistics,
    Weights,
)

if TYPE_CHECKING:  # only the training process needs torch, which is slow to import
    from torch import Tensor

MOST_CLIENTS: Final = 64
CONFIDENCE: Final = "confidence"
"""Name of the model's float32 array with each client's weight when it last took part; 0 if it never
did."""
ROUNDS: Final = "rounds"
"""Name of the model's integer array with the round in which each client last took part; 0 if it
never did."""
_PLACE: Final = "place/"


@dataclass(kw_only=True)
class RHFLLogits(Averaging):
    """Each client trains its own model; the coordinator then makes the models' outputs more
    similar.

    For the round's N models, the coordinator trains model k to lower Σ_{i≠k} w_i·KL(p_i‖p_k) on
    public samples without labels (Eqs. 3–5, 11–13). p are the models' softmax outputs, w the
    weights of `rhfl`; 1/(N − 1) if no earlier loss is known. The run's model must be an `ensemble`
    with `clients` members, one model per client.

    epochs: number of passes over the public samples in each round. batch_size: number of public
    samples per batch. learning_rate: learning rate of Adam, which is reset in each round. For each
    batch, all members are updated together, towards the outputs that the other members had before
    this batch. A client's member is fixed by the first round that is committed after the client
    joined.
    """

    clients: Annotated[int, Field(ge=2, le=MOST_CLIENTS)] = 10
    epochs: PositiveInt = 1
    batch_size: Annotated[int, Field(ge=2)] = 256
    learning_rate: PositiveFloat = 0.001

    individual = True
    by_samples = False
    parts = True
    trains = True

    def __post_init__(self) -> None:
        self.most_clients = self.clients

    def check_model(self, layout: Layout) -> None:
        """Raise ConfigurationError unless the model is an `ensemble` of `clients` members."""
        shapes = {tensor.name: tuple(tensor.shape) for tensor in layout.tensors}
        found = {name.split(".")[1] for name in shapes if name.startswith("members.")}
        wanted = {str(place) for place in range(self.clients)}
        own = [shapes.get(name) for name in (CONFIDENCE, ROUNDS)]
        if found != wanted or own != [(self.clients,)] * 2:
            raise ConfigurationError(
                f"strategy rhfl-logits needs an ensemble of {self.clients} models, one per client; "
                f'set [model] name = "ensemble", members = '
                f"{self.clients}, and `of` to the model that each client trains",
                clients=self.clients,
            )

    def enrol(self, state: State, population: Population, seed: int) -> State:  # noqa: ARG002  part of the interface
        """Assign the next free members of the ensemble to clients that have none. Raises RunError
        if too few are left."""
        known = [name for name in state.scalars if name.startswith(_PLACE)]
        new = [client for client in population.ids if _PLACE + client not in state.scalars]
        if len(known) + len(new) > self.clients:
            raise RunError(
                f"strategy rhfl-logits has models for {self.clients} clients, but "
                f"{len(known) + len(new)} take part; raise strategy.clients and model.members "
                f'(to at most {MOST_CLIENTS}), or set round.late_joiners = "refuse"'
            )
        places = {_PLACE + client: len(known) + at for at, client in enumerate(new)}
        return State(scalars={**state.scalars, **places}, arrays=state.arrays)

    def part(self, state: State, client: str) -> int | None:
        """Return the number of the ensemble's member that this client trains."""
        place = state.scalars.get(_PLACE + client)
        return place if isinstance(place, int) else None

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request each member as its client sent it, and the mean of all other tensors, weighted by
        the fall of the clients' losses."""
        clients, before = statistics.clients, losses_before(statistics)
        shares = confidence(before, statistics.losses)
        if not np.isfinite(before).any():
            shares = np.full(len(clients), 1.0 / max(1, len(clients) - 1))
        places = [self.part(statistics.state, client) for client in clients]
        weights: dict[str, NDArray[np.float64]] = {}
        for name in statistics.tensors:
            part, _, rest = name.partition(".")
            member = int(rest.partition(".")[0]) if part == "members" else -1
            weights[name] = np.array([float(place == member) for place in places])
        return Combine(weights=shares, difference=True, tensor_weights=weights)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Replace the members of the round's clients; store weights and losses."""
        following = moved(model, combined, context.buffers, lambda _, __, delta: delta)
        weights, rounds = np.array(model[CONFIDENCE]), np.array(model[ROUNDS])
        for client, weight in zip(context.included, context.weights.tolist(), strict=True):
            place = self.part(state, client)
            if place is not None:
                weights[place], rounds[place] = weight, context.round
        following |= {CONFIDENCE: weights, ROUNDS: rounds}
        return following, State(scalars={**state.scalars, **losses_told(context)})

    def train(self, training: ServerTraining) -> None:
        """Train the members of the round's clients towards one another's outputs."""
        import torch

        from potluck.common.learning.optimizers import Adam

        network: Any = training.network
        places = [at for at, last in enumerate(network.rounds.tolist()) if last == training.round]
        if len(places) < 2:  # a single model has no other to learn from
            return
        members = [network.members[place] for place in places]
        weights = network.confidence[places].clone()
        parameters = [each for member in members for each in member.parameters()]
        optimizer = Adam(
            [each for each in parameters if each.requires_grad], learning_rate=self.learning_rate
        )
        order = torch.Generator().manual_seed(training.seed)
        network.train()
        for epoch in range(1, self.epochs + 1):
            shuffled = torch.randperm(len(training.inputs), generator=order)
            for batch in torch.split(shuffled, self.batch_size):
                if len(batch) < 2:  # batch normalisation needs two samples
                    continue
                inputs = training.inputs[batch]
                optimizer.clear_gradients()
                logits = torch.stack([member(inputs) for member in members])
                torch.autograd.backward(disagreement(logits, weights))
                optimizer.step()
            training.progress(epoch / self.epochs)


def disagreement(logits: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k Σ_{i≠k} w_i·KL(p_i‖p_k), averaged over b samples.

    p are softmaxes of logits, N × b × C. weights: w, N. Gradients flow to each p_k, not to any p_i:
    each output is a constant target for the others.
    """
    import torch

    logs = torch.log_softmax(logits, dim=2)
    given = logs.detach()
    beliefs = given.exp()
    entropies = (beliefs * given).sum(dim=2).mean(dim=1)
    crossed = torch.einsum("ibc,kbc->ik", beliefs, logs) / logits.shape[1]
    divergences = entropies[:, None] - crossed
    others = 1.0 - torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
    return (weights.to(logits.dtype)[:, None] * others * divergences).sum()
