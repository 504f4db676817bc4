"""SCAFFOLD on client and coordinator: hand-computed values, and invariants after kills."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from support.strategy_rounds import Rounds, Sent, vector
from torch import Tensor, nn

from potluck.client.correction import LocalCorrection
from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.auxiliary_files import (
    ReceivedAuxiliaries,
    corrected,
    sendable,
    write_kept,
)
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.scaffold_correction import ScaffoldCorrection
from potluck.client.training.steps.loop import Corrected, TrainingContext, TrainingResult, train
from potluck.client.transfer.saved_states import KeptStates
from potluck.common.errors import ConfigurationError, StateLostError
from potluck.common.learning.local_steps import normalizer
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import create
from potluck.common.task import Examples
from potluck.common.tensors.auxiliary import auxiliaries_layout, joined
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.server.strategies.scaffold import CONTROL, Scaffold


class _Point(nn.Module):
    """Network of one weight, which is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), 1)


class _Parabola(Objective):
    """The loss ½(x − m)² of output x and input m."""

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        return (logits - batch.inputs).square().mean() / 2


LAYOUT = Layout.of(vector(0.0))


class Client:
    """A client with the real training, correction and files of kept states."""

    def __init__(self, name: str, target: float, folder: Path) -> None:
        self.name, self._target, self._folder = name, target, folder
        folder.mkdir(exist_ok=True)
        self.states = KeptStates(folder)

    def restart(self) -> None:
        """Start again as after a kill, with the files that are on the disk."""
        self.states = KeptStates(self._folder)

    def train(
        self,
        model: Mapping[str, NDArray[Any]],
        shared: Path,
        update_id: str,
        included: str,
        settings: LocalTraining,
        personal: Path | None = None,
    ) -> Sent:
        received = ReceivedAuxiliaries(
            names=[CONTROL],
            shared=shared,
            personal=personal,
            kept=self._kept(included),
        )
        network = _Point()
        load_arrays(network, model)
        result: TrainingResult = train(
            network,
            Examples(inputs=torch.full((1, 1), self._target), labels=torch.zeros(1).long()),
            _Parabola(),
            settings,
            TrainingContext(classes=1, seed=0, round=1, device=torch.device("cpu")),
            corrected=corrected(ScaffoldCorrection(), received, LAYOUT),
        )
        assert result.correction is not None
        if result.correction.keep is not None:
            write_kept(result.correction.keep, self.states.path(update_id, CONTROL))
            self.states.pend("run", self.name, update_id)
        auxiliaries = sendable(result.correction.send, [CONTROL], LAYOUT)
        weights = {n: a.copy() for n, a in state_arrays(network).items()}
        return Sent(weights=weights, auxiliaries=auxiliaries)

    def _kept(self, included: str) -> Path | None:
        return self.states.begin("run", self.name, included, [CONTROL]).get(CONTROL)

    def control(self, included: str) -> float:
        """Return the control variate c_k as of the last included update."""
        path = self._kept(included)
        if path is None:
            return 0.0
        with open_tensors(path) as file:
            return float(file.arrays[f"auxiliary/{CONTROL}/w"][0])


class Server:
    """The strategy, and the id of each client's last included update."""

    def __init__(self, folder: Path, clients: int, **options: Any) -> None:
        self.rounds = Rounds(Scaffold(**options), vector(0.0), folder)
        self.included: dict[str, str] = {}
        self._folder, self._clients = folder, clients

    @property
    def c(self) -> float:
        return float(self.rounds.strategy.broadcast(self.rounds.state)[CONTROL]["w"][0])

    def shared(self) -> Path:
        return self._write("shared", self.rounds.strategy.broadcast(self.rounds.state))

    def personal(self, client: str) -> Path | None:
        found = self.rounds.strategy.personal(self.rounds.state, client)
        return self._write(f"personal-{client}", found) if found else None

    def _write(self, name: str, auxiliaries: Mapping[str, Any]) -> Path:
        path = self._folder / name
        write_tensors(path, joined(auxiliaries), layout=auxiliaries_layout(LAYOUT, auxiliaries))
        return path

    def commit(self, sent: Mapping[str, Sent], ids: Mapping[str, str]) -> None:
        self.rounds.play(sent, clients=self._clients)
        self.included |= ids


@pytest.mark.parametrize("keeper", ["clients", "coordinator"])
def test_scaffold_on_two_parabolas_equals_values_computed_by_hand(
    tmp_path: Path, keeper: str
) -> None:
    """Two clients have f = ½(x − m)² with m = 0 and 4; η = 0.1, and J = 2 steps."""
    settings_ = LocalTraining(learning_rate=0.1, steps=2)
    server = Server(tmp_path, 2, keeper=keeper)
    clients = [Client(f"k{i}", m, tmp_path / f"k{i}") for i, m in enumerate((0.0, 4.0))]
    expected = [(0.38, -1.9), (0.6878, -1.539)]
    for number, (x, c) in enumerate(expected, start=1):
        shared = server.shared()
        ids = {each.name: f"run/{number}.1/{each.name}" for each in clients}
        sent = {
            each.name: each.train(
                server.rounds.model,
                shared,
                ids[each.name],
                server.included.get(each.name, "") if keeper == "clients" else "",
                settings_,
                server.personal(each.name),
            )
            for each in clients
        }
        if number == 1:
            assert [float(s.weights["w"][0]) for s in sent.values()] == pytest.approx([0, 0.76])
            changes = [float(s.auxiliaries[CONTROL]["w"][0]) for s in sent.values()]
            assert changes == pytest.approx([0, -3.8], rel=1e-5)
        server.commit(sent, ids)
        assert float(server.rounds.model["w"][0]) == pytest.approx(x, rel=1e-5)
        assert server.c == pytest.approx(c, rel=1e-5)


def test_scaffold_control_variate_is_the_gradient_for_any_momentum(tmp_path: Path) -> None:
    """If the gradient is constant, c_k⁺ is that gradient, whatever the momentum."""

    class Slope(Objective):
        def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
            return 3.0 * logits.mean()

    for momentum in (0.0, 0.9):
        model = _Point()
        zeros = {CONTROL: {"w": torch.zeros(1)}}
        result = train(
            model,
            Examples(inputs=torch.zeros(1, 1), labels=torch.zeros(1).long()),
            Slope(),
            LocalTraining(learning_rate=0.1, steps=5, momentum=momentum),
            TrainingContext(classes=1, seed=0, round=1, device=torch.device("cpu")),
            corrected=_corrected(zeros),
        )
        assert result.correction is not None
        assert float(result.correction.send[CONTROL]["w"]) == pytest.approx(3.0, rel=1e-5)
        assert result.normalizer / 5 == pytest.approx(2.62882 if momentum else 1.0, rel=1e-4)


def _corrected(shared: Any) -> Corrected:
    return Corrected(
        correction=ScaffoldCorrection(), shared=shared, personal={}, kept=None, layout=LAYOUT
    )


def test_scaffold_with_adam_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="SCAFFOLD is not compatible with the optimizer adam"
    ):
        train(
            _Point(),
            Examples(inputs=torch.zeros(1, 1), labels=torch.zeros(1).long()),
            _Parabola(),
            LocalTraining(optimizer="adam"),
            TrainingContext(classes=1, seed=0, round=1, device=torch.device("cpu")),
            corrected=_corrected({CONTROL: {"w": torch.zeros(1)}}),
        )


@pytest.mark.parametrize(
    ("momentum", "eta_mu", "steps", "amount"),
    [
        (0.0, 0.0, 7, 7.0),
        (0.9, 0.0, 1, 1.0),
        (0.9, 0.0, 2, 2.9),
        (0.9, 0.0, 5, 13.1441),
        (0.9, 0.0, 10, 41.3811),
        (0.0, 0.1, 3, 2.71),
    ],
)
def test_normalizer_of_momentum_steps_equals_the_closed_form(
    momentum: float, eta_mu: float, steps: int, amount: float
) -> None:
    training = LocalTraining(learning_rate=1.0, momentum=momentum)
    found = normalizer(training, steps, round_number=1, mu=eta_mu)
    assert found == pytest.approx(amount, abs=5e-5)
    if momentum:
        closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        assert found == pytest.approx(closed)
    adam = LocalTraining(optimizer="adam", momentum=momentum)
    assert normalizer(adam, steps, round_number=1, mu=eta_mu) == steps


def drawn() -> tuple[nn.Linear, Examples, dict[str, Any], dict[str, Any]]:
    """Return a model, samples, and control variates c and c_k, all at random."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    samples = Examples(inputs=torch.randn(6, 4), labels=torch.arange(6) % 3)
    common, own = ({n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in "ab")
    return model, samples, {CONTROL: common}, {CONTROL: own}


def trained_with(control: str, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train three steps over all samples; return the sent part of c_k and the weights."""
    model, samples, common, own = drawn()
    result = train(
        model,
        samples,
        CrossEntropy(),
        LocalTraining.model_validate(
            {"optimizer": optimizer, "learning_rate": 0.05, "steps": 3, "batch_size": 6}
        ),
        TrainingContext(classes=3, seed=0, round=1, device=torch.device("cpu")),
        corrected=Corrected(
            correction=create(LocalCorrection, "scaffold", {"control": control}),
            shared=common,
            personal={},
            kept=own,
            layout=Layout.of(state_arrays(model)),
        ),
    )
    assert result.correction is not None
    assert result.correction.keep is not None
    sent = dict(result.correction.send[CONTROL])
    for name, kept in result.correction.keep[CONTROL].items():
        assert kept.tolist() == (own[CONTROL][name] + sent[name]).tolist()
    return sent, {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_control_variate_from_summed_gradients_equals_that_from_the_weight_delta() -> None:
    added, read = (trained_with(control, "sgd") for control in ("gradients", "way"))
    for name in ("weight", "bias"):
        assert added[1][name].tolist() == read[1][name].tolist()
        assert added[0][name].flatten().tolist() == pytest.approx(
            read[0][name].flatten().tolist(), abs=1e-5
        )


def test_scaffold_with_adam_corrects_and_sums_gradients() -> None:
    """Compare with numpy: Adam as in its paper, and softmax gradients by hand."""
    model, samples, common, own = drawn()
    x, y = samples.inputs.double().numpy(), np.eye(3)[samples.labels.numpy()]
    w = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    offset = {n: (common[CONTROL][n] - own[CONTROL][n]).double().numpy() for n in w}
    first, second, total = ({n: np.zeros_like(a) for n, a in w.items()} for _ in "abc")
    for step in (1, 2, 3):
        z = x @ w["weight"].T + w["bias"]
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        gradients = {"weight": (p - y).T @ x / len(x), "bias": (p - y).mean(axis=0)}
        for name, gradient in gradients.items():
            total[name] += gradient
            corrected_ = gradient + offset[name]
            first[name] = 0.9 * first[name] + 0.1 * corrected_
            second[name] = 0.999 * second[name] + 0.001 * corrected_**2
            unbiased = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            w[name] -= 0.05 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    sent, weights = trained_with("gradients", "adam")
    for name in w:
        expected = total[name] / 3 - own[CONTROL][name].double().numpy()
        assert sent[name].double().numpy() == pytest.approx(expected, abs=1e-5)
        assert weights[name].double().numpy() == pytest.approx(w[name], abs=1e-5)


def test_lost_client_state_directory_is_refused(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    with pytest.raises(StateLostError, match=r"client 'k' has lost .* strategy.keeper"):
        states.begin("run", "k", "run/3.1/k", [CONTROL])
    assert states.begin("run", "k", "", [CONTROL]) == {}


class Crashes(RuleBasedStateMachine):
    """Rounds in which updates and messages get lost, and clients die at any moment."""

    names = ("k0", "k1", "k2", "k3")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        self.server = Server(root, len(self.names))
        self.clients = {n: Client(n, float(i), root / n) for i, n in enumerate(self.names)}
        self.attempt = 0
        self.settings = LocalTraining(learning_rate=0.1, steps=3, momentum=0.5)

    @rule(
        cohort=st.sets(st.sampled_from(names), min_size=1),
        dies_training=st.sets(st.sampled_from(names)),
        upload_lost=st.sets(st.sampled_from(names)),
        settle_lost=st.sets(st.sampled_from(names)),
        dies_after=st.sets(st.sampled_from(names)),
        repeated=st.sets(st.sampled_from(names)),
        abandoned=st.booleans(),
    )
    def round(
        self,
        cohort: set[str],
        dies_training: set[str],
        upload_lost: set[str],
        settle_lost: set[str],
        dies_after: set[str],
        repeated: set[str],
        abandoned: bool,
    ) -> None:
        self.attempt += 1
        shared, sent, ids = self.server.shared(), {}, {}
        for name in sorted(cohort):
            client = self.clients[name]
            ids[name] = f"run/{self.server.rounds.number + 1}.{self.attempt}/{name}"
            # An instruction sent twice is the same work.
            for _ in range(2 if name in repeated else 1):
                sent[name] = client.train(
                    self.server.rounds.model,
                    shared,
                    ids[name],
                    self.server.included.get(name, ""),
                    self.settings,
                )
            if name in dies_training:
                client.restart()
        arrived = {name: sent[name] for name in sorted(cohort - upload_lost)}
        if arrived and not abandoned:
            self.server.commit(arrived, {name: ids[name] for name in arrived})
        for name in sorted(cohort - settle_lost):
            included = name in arrived and not abandoned
            if not abandoned:
                self.clients[name].states.settle("run", name, ids[name], included=included)
            if name in dies_after:
                self.clients[name].restart()

    @precondition(lambda self: hasattr(self, "server"))
    @invariant()
    def c_is_the_mean_of_what_is_committed(self) -> None:
        """It is so once each client's next instruction has named its last included update."""
        controls = [
            client.control(self.server.included.get(name, ""))
            for name, client in self.clients.items()
        ]
        assert self.server.c == pytest.approx(np.mean(controls), rel=1e-4, abs=1e-5)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=15, stateful_step_count=8, deadline=None)
