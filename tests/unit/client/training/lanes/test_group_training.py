"""Clients trained in one batched step: the same as one by one, up to rounding."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.client.training.classification import Classification
from potluck.client.training.lanes.lane_choice import LaneChoice
from potluck.client.training.task_training import (
    GroupMember,
    LoadedTask,
    TrainedMember,
    TrainingFiles,
    UnfitForLanesError,
)
from potluck.common.disclosure import Weighting
from potluck.common.errors import RoundClosedError, TrainingError
from potluck.common.models.lenet import lenet5
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True, kw_only=True)
class Clouds(Task):
    """Points in four dimensions; client-I has `sizes[I]` of them. spoilt: client with huge values.
    lost: client with unreadable points. mislabelled: client with labels outside the classes. wide:
    client with one more dimension."""

    sizes: Sequence[int]
    network: nn.Module
    shape: Sequence[int] = (4,)
    spoilt: int = -1
    lost: int = -1
    mislabelled: int = -1
    wide: int = -1

    classes = 3

    def model(self) -> nn.Module:
        return self.network

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        number = int(client.rpartition("-")[2])
        generator = torch.Generator().manual_seed(number)
        if number == self.lost:
            raise KeyError("no such file")
        labels = torch.arange(self.sizes[number]) % (4 if number == self.mislabelled else 3)
        inputs = torch.randn(len(labels), *self.shape, generator=generator)
        if number == self.spoilt:
            inputs = inputs * 1e30
        if number == self.wide:
            inputs = inputs.unsqueeze(1)
        return ClientData(train=Examples(inputs=inputs, labels=labels))

    def evaluation_data(self, data: Path | None) -> Examples | None:
        return None


def mlp(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Sequential(nn.Linear(8, 5, bias=False), nn.Tanh()),
        nn.Linear(5, 3),
    )


class Scene:
    """A loaded task, and the trainings of one attempt, with all clients in the cohort."""

    def __init__(
        self,
        folder: Path,
        task: Clouds,
        *,
        objectives: Sequence[rpc.Plugin] = (),
        choices: Path | None = None,
        **training: Any,
    ) -> None:
        self.training = Classification(LoadedTask("clouds", task, "cpu", None, choices=choices))
        self.model = folder / "model"
        write_tensors(self.model, state_arrays(task.network))
        self.clients = [ClientId(f"client-{number}") for number in range(len(task.sizes))]
        self._objectives = list(objectives) or [rpc.Plugin(name="cross-entropy")]
        self._settings = json.dumps({"batched": True, **training})
        self._folder = folder

    def member(self, client: ClientId) -> GroupMember:
        instruction = rpc.Instruction(
            id=f"run/1.1/{client}",
            client_id=client,
            run_id="run",
            round=2,
            train=rpc.Train(
                objective=self._objectives[0],
                further_objectives=self._objectives[1:],
                training_json=self._settings,
                seed=100 + int(client.rpartition("-")[2]),
                companions=[f"run/1.1/{each}" for each in self.clients],
            ),
        )
        files = TrainingFiles(
            model=self.model, update=self._folder / client, keep_at=self._folder.joinpath
        )
        return GroupMember(
            instruction=instruction,
            files=files,
            progress=TrainingProgress(),
            lane=self.clients.index(client),
        )

    def alone(self, client: ClientId) -> tuple[dict[str, torch.Tensor], Any]:
        member = self.member(client)
        outcome = self.training.train(member.instruction, member.files, member.progress)
        return self.weights(), outcome.report(Weighting.EXACT)

    def together(
        self, clients: Sequence[ClientId]
    ) -> list[tuple[dict[str, torch.Tensor], Any] | TrainingError]:
        found: list[Any] = []
        members = [self.member(client) for client in clients]
        for each in self.training.train_together(members, self.clients):
            if isinstance(each, TrainedMember):
                each.load()
                found.append((self.weights(), each.outcome.report(Weighting.EXACT)))
            else:
                found.append(each)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.training.loaded.model.state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}


def check_alike(scene: Scene, *, tolerance: float = 1e-4) -> None:
    """Check that training together gives the weights of separate trainings."""
    for client, found in zip(scene.clients, scene.together(scene.clients), strict=True):
        assert not isinstance(found, TrainingError)
        weights, report = found
        expected, told = scene.alone(client)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=tolerance, atol=tolerance)
        assert (report.samples, report.steps) == (told.samples, told.steps)
        assert report.normalizer == told.normalizer
        assert report.loss == pytest.approx(told.loss, rel=1e-3, abs=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    batch_size=st.integers(1, 9),
    amount=st.one_of(
        st.fixed_dictionaries({"epochs": st.integers(1, 3)}),
        st.fixed_dictionaries({"steps": st.integers(1, 7)}),
    ),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    gradient_clip=st.sampled_from([None, 0.5]),
    dropout=st.sampled_from([0.0, 0.3]),
    mu=st.sampled_from([0.0, 0.5]),
)
def test_batched_clients_get_the_weights_of_separate_trainings(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    amount: dict[str, Any],
    dropout: float,
    mu: float,
    **training: Any,
) -> None:
    proximal = rpc.Plugin(name="fedprox", options_json=json.dumps({"mu": mu}))
    scene = Scene(
        tmp_path_factory.mktemp("scene"),
        Clouds(sizes=sizes, network=mlp(dropout)),
        objectives=[proximal] if mu else [],
        learning_rate=0.05,
        **amount,
        **training,
    )
    check_alike(scene)


def test_batched_convolutions_give_the_weights_of_separate_trainings(tmp_path: Path) -> None:
    torch.manual_seed(1)
    task = Clouds(sizes=[5, 7, 3], network=lenet5(classes=3), shape=(3, 32, 32))
    check_alike(Scene(tmp_path, task, batch_size=4, momentum=0.5))


def unusual_networks() -> dict[str, tuple[nn.Module, Sequence[int]]]:
    """Return networks that a careless check would take for simpler ones, with the shape of a
    sample."""
    torch.manual_seed(1)
    relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return {
        "layers used twice": (
            nn.Sequential(
                *(nn.Conv2d(1, 2, 3, padding=1), relu, pool),
                *(nn.Conv2d(2, 3, 3, padding=1), relu, pool),
                *(nn.Flatten(), nn.Linear(12, 6), relu, nn.Linear(6, 3)),
            ),
            (1, 8, 8),
        ),
        "activations in place": (
            nn.Sequential(
                *(nn.Linear(4, 8), nn.LeakyReLU(0.1, inplace=True), nn.Linear(8, 6)),
                *(nn.ReLU(inplace=True), nn.Linear(6, 3), nn.SiLU(inplace=True)),
            ),
            (4,),
        ),
        "convolutions of all kinds": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=2, stride=2, dilation=2, groups=2, bias=False),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, padding=1, dilation=2, ceil_mode=True),
                *(nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 3)),
            ),
            (2, 9, 9),
        ),
        "pooling in odd places": (
            nn.Sequential(
                *(nn.MaxPool2d(2), nn.Conv2d(2, 4, (3, 1)), nn.ReLU(), nn.ReLU()),
                *(nn.MaxPool2d((2, 1)), nn.Tanh(), nn.MaxPool2d(1), nn.ReLU()),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
            ),
            (2, 9, 9),
        ),
    }


@pytest.mark.parametrize("name", unusual_networks())
def test_unusual_networks_give_the_weights_of_separate_trainings(tmp_path: Path, name: str) -> None:
    network, shape = unusual_networks()[name]
    task = Clouds(sizes=[5, 7, 3], network=network, shape=shape)
    check_alike(Scene(tmp_path, task, batch_size=4, steps=3, momentum=0.5, learning_rate=0.1))


def test_batched_result_of_a_client_is_identical_whichever_members_are_present(
    tmp_path: Path,
) -> None:
    """Bit for bit: after a kill, only clients whose update is missing are trained again."""
    for network, shape in ((mlp(0.2), (4,)), (lenet5(classes=3), (3, 32, 32))):
        task = Clouds(sizes=[9, 17, 4, 8], network=network, shape=shape)
        scene = Scene(tmp_path, task, batch_size=4, momentum=0.9)
        everybody = scene.together(scene.clients)
        for chosen in ((3,), (1, 2), (2, 0, 1)):
            some = scene.together([scene.clients[number] for number in chosen])
            for number, found in zip(chosen, some, strict=True):
                wanted = everybody[number]
                assert not isinstance(found, TrainingError)
                assert not isinstance(wanted, TrainingError)
                (weights, report), (expected, told) = found, wanted
                assert report.loss == told.loss
                assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_diverging_group_member_does_not_affect_the_others(tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    sizes = [8, 8, 8]
    sound = Scene(tmp_path, Clouds(sizes=sizes, network=network()), batch_size=4)
    expected = sound.together(sound.clients)
    scene = Scene(tmp_path, Clouds(sizes=sizes, network=network(), spoilt=1), batch_size=4)
    first, second, third = scene.together(scene.clients)
    assert isinstance(second, TrainingError)
    assert "diverged" in second.message
    for found, wanted in ((first, expected[0]), (third, expected[2])):
        assert not isinstance(found, TrainingError)
        assert not isinstance(wanted, TrainingError)
        assert all(torch.equal(found[0][name], wanted[0][name]) for name in found[0])


def test_group_member_without_samples_does_not_affect_the_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Clouds(sizes=[8, 0, 4], network=mlp()), steps=3)
    first, second, third = scene.together(scene.clients)
    assert isinstance(second, TrainingError)
    assert "no training samples" in second.message
    assert not isinstance(first, TrainingError)
    assert not isinstance(third, TrainingError)


def hooked() -> nn.Module:
    def halved(_layer: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs / 2

    network = mlp()
    network[-1].register_forward_hook(halved)
    return network


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Clouds(sizes=[8, 5, 4], network=mlp(), lost=1), "KeyError"),
        (
            Clouds(sizes=[8, 5, 4], network=mlp(), mislabelled=1),
            "0 to 3, but the task has classes 0 to 2",
        ),
    ],
    ids=["lost", "mislabelled"],
)
def test_group_member_with_invalid_data_does_not_affect_the_others(
    tmp_path: Path, task: Clouds, reason: str
) -> None:
    first, second, third = (scene := Scene(tmp_path, task, steps=3)).together(scene.clients)
    assert isinstance(second, TrainingError)
    assert reason in second.message
    assert not isinstance(first, TrainingError)
    assert not isinstance(third, TrainingError)


@pytest.mark.parametrize("there", [(0, 1, 2), (1, 2), (1,)])
def test_group_member_with_a_different_sample_shape_is_excluded_from_the_batch(
    tmp_path: Path, there: Sequence[int]
) -> None:
    """Client 1 differs from the other clients of its group, whichever members are present."""
    task = Clouds(sizes=[8, 5, 4], network=mlp(), wide=1)
    scene = Scene(tmp_path, task, batch_size=4)
    members = [scene.member(scene.clients[number]) for number in there]
    found = dict(zip(there, scene.training.train_together(members, scene.clients), strict=True))
    odd = found.pop(1)
    assert isinstance(odd, UnfitForLanesError)
    assert "differ in shape or type" in str(odd)
    assert all(isinstance(each, TrainedMember) for each in found.values())


def test_group_whose_duration_can_not_be_measured_is_trained_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(
        tmp_path, Clouds(sizes=[4, 4], network=mlp()), choices=tmp_path / "choices", batched="auto"
    )
    normal = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, **how: normal(*sizes, **how) * torch.nan)
    with pytest.raises(
        UnfitForLanesError, match="the speed of batched steps can't be measured: training diverged"
    ):
        scene.training.train_together([scene.member(each) for each in scene.clients], scene.clients)
    assert not (tmp_path / "choices").exists()


def test_cancelled_group_member_does_not_affect_the_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Clouds(sizes=[8, 5], network=mlp()))
    first, second = (scene.member(client) for client in scene.clients)
    second = replace(second, progress=TrainingProgress(cancelled=lambda: True))
    trained, cancelled = scene.training.train_together([first, second], scene.clients)
    assert isinstance(trained, TrainedMember)
    assert isinstance(cancelled, RoundClosedError)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"network": mlp().double()}, "float32"),
        ({"network": hooked()}, "hooks"),
        ({"network": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "BatchNorm1d"),
        ({"network": nn.Bilinear(4, 4, 3)}, "a Bilinear"),
        ({"optimizer": "adam"}, "adam"),
        ({"smallest_batch_size": 2}, "smallest_batch_size"),
        ({"objectives": [rpc.Plugin(name="focal")]}, "objective"),
    ],
)
def test_training_unfit_for_lanes_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    network = change.pop("network", None) or mlp()
    scene = Scene(tmp_path, Clouds(sizes=[4, 4], network=network), **change)
    members = [scene.member(client) for client in scene.clients]
    with pytest.raises(UnfitForLanesError, match=reason):
        scene.training.train_together(members, scene.clients)


@pytest.mark.parametrize("together", [True, False])
def test_auto_trains_one_by_one_if_a_batched_step_was_measured_slower(
    tmp_path: Path, together: bool
) -> None:
    choices = tmp_path / "choices"
    scene = Scene(tmp_path, Clouds(sizes=[4, 4], network=mlp()), choices=choices, batched="auto")
    members = [scene.member(client) for client in scene.clients]
    with contextlib.suppress(UnfitForLanesError):
        scene.training.train_together(members, scene.clients)
    [path] = choices.iterdir()
    found = LaneChoice.model_validate_json(path.read_bytes())
    other = {"alone_seconds": 1.0, "together_seconds": 0.5 if together else 2.0}
    path.write_text(found.model_copy(update=other).model_dump_json())
    scene = Scene(tmp_path, Clouds(sizes=[4, 4], network=mlp()), choices=choices, batched="auto")
    if together:
        check_alike(scene)
    else:
        with pytest.raises(UnfitForLanesError, match="2,000,000 µs in a batched step"):
            scene.training.train_together(members, scene.clients)


def test_lane_measurement_does_not_use_diverged_weights(tmp_path: Path) -> None:
    task = Clouds(sizes=[4, 4], network=mlp())
    scene = Scene(tmp_path, task, choices=tmp_path / "choices", batched="auto")
    with torch.no_grad():
        for tensor in scene.training.loaded.model.parameters():
            tensor.fill_(torch.nan)
    with contextlib.suppress(UnfitForLanesError):  # raised if single training is faster here
        scene.training.train_together([scene.member(each) for each in scene.clients], scene.clients)
    assert len(list((tmp_path / "choices").iterdir())) == 1
