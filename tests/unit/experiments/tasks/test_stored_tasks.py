"""Tasks that read a data directory: contents, sharing, and errors if data is missing."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.task import Task
from potluck.common.tasks.stored import StoredExamples
from potluck.common.tasks.table6 import interaction_matrices
from potluck.experiments.tasks.arrays import mapped_arrays
from potluck.experiments.tasks.covertype import Covertype
from potluck.experiments.tasks.images import Cifar10, Cifar100, Cinic10, Emnist, Mnist
from potluck.experiments.tasks.label_skew import LabelSkewTask
from potluck.experiments.tasks.preparing import Images
from potluck.experiments.tasks.spurious import ColoredMnist


def write_data(
    folder: Path, task: LabelSkewTask, *, train: int = 600, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write random samples in the task's format."""
    form = task._form()
    generator = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for split, count in (("train", train), ("test", 80)):
        shape = (count, *(form.shape or ()))
        arrays[f"x_{split}"] = generator.integers(0, 200, shape).astype(form.dtype)
        arrays[f"y_{split}"] = (np.arange(count) % form.classes).astype(np.uint8)
    merged = arrays | dict(extra or {})
    np.savez(folder / form.file_name, allow_pickle=False, **merged)
    return folder


@pytest.mark.parametrize(
    "task",
    [
        Mnist(clients=6),
        Mnist(clients=6, network="perceptron"),
        Mnist(clients=6, network="cnn-wide"),
        Emnist(clients=6),
        Cifar10(clients=6),
        Cifar100(clients=6),
        Cinic10(clients=6),
        Covertype(clients=6),
        Covertype(clients=6, binary=True),
    ],
    ids=str,
)
def test_training_data_is_split_completely_over_the_clients(
    tmp_path: Path, task: LabelSkewTask
) -> None:
    data = write_data(tmp_path, task)
    assert isinstance(task, Task)
    clients = [task.client_data(ClientId(f"client-{number}"), data) for number in range(6)]
    assert sum(len(client.train) for client in clients) == 600
    inputs = clients[0].train.inputs_at(torch.arange(3))
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, clients[0].train.inputs[:3])
    assert task.model().eval()(inputs).shape == (3, task.classes)
    evaluation = task.evaluation_data(data)
    assert evaluation is not None
    assert len(evaluation) == 80
    assert abs(float(torch.cat([client.train.inputs for client in clients]).mean())) < 2


@pytest.mark.parametrize("samples", [0, 400])
def test_public_samples_belong_to_no_client(tmp_path: Path, samples: int) -> None:
    task = Cifar10(clients=6, public=100, seed=3, samples=samples)
    data = write_data(tmp_path, task)
    public = task.public_data(data)
    assert public is not None
    assert public.shape == (100, 3, 32, 32)
    clients = [task.client_data(ClientId(f"client-{number}"), data).train for number in range(6)]
    assert sum(len(client) for client in clients) == (samples or 600) - 100
    theirs = {row.numpy().tobytes() for client in clients for row in client.inputs}
    assert not theirs & {row.numpy().tobytes() for row in public}
    assert Cifar10(clients=6).public_data(None) is None


def test_clients_share_one_memory_mapping_of_the_file(tmp_path: Path) -> None:
    task = Mnist(clients=6, held_out=0.2)
    data = write_data(tmp_path, task)
    first, second = (task.client_data(ClientId(f"client-{n}"), data) for n in (0, 1))
    assert isinstance(first.train, StoredExamples)
    assert isinstance(second.train, StoredExamples)
    one, other = (each.train.stored.array.numpy() for each in (first, second))  # type: ignore[attr-defined]
    assert np.shares_memory(one, other)
    assert isinstance(one.base, np.memmap) or one.base is not None
    assert first.held_out is not None
    assert np.shares_memory(one, first.held_out.stored.array.numpy())  # type: ignore[attr-defined]


def test_replaced_labels_do_not_copy_the_samples(tmp_path: Path) -> None:
    data = write_data(tmp_path, Mnist(clients=6))
    train = Mnist(clients=6).client_data(ClientId("client-0"), data).train
    assert isinstance(train, StoredExamples)
    changed = train.with_labels(train.labels + 1)
    assert changed.stored is train.stored
    assert torch.equal(replace(train, labels=train.labels + 1).inputs, changed.inputs)
    moved = train.to(torch.device("cpu"))
    assert torch.equal(moved.inputs, train.inputs)


def test_images_are_normalised_with_channels_first() -> None:
    images = torch.tensor([[[[255, 0, 51]]]], dtype=torch.uint8)
    made = Images(means=(0.5, 0.5, 0.2), deviations=(0.5, 1.0, 2.0))(images, None)
    assert made.shape == (1, 3, 1, 1)
    assert made.flatten().tolist() == pytest.approx([1.0, -0.5, 0.0], abs=1e-6)


def test_coloured_mnist_clients_have_the_class_and_colour_counts_of_the_paper(
    tmp_path: Path,
) -> None:
    write_data(tmp_path, Mnist(), train=6000)
    task = ColoredMnist(seed=3)
    for number, matrix in enumerate(interaction_matrices("cmnist-gsc")):
        held = task.client_data(ClientId(f"client-{number}"), tmp_path).train.groups
        assert held is not None
        assert np.bincount(held, minlength=4).reshape(2, 2).tolist() == matrix.tolist()
    train = task.client_data(ClientId("client-23"), tmp_path).train
    inputs, groups = train.inputs, train.groups
    assert groups is not None
    assert inputs.shape[1:] == (3, 28, 28)
    red, green, blue = inputs.sum(dim=(2, 3)).unbind(1)
    assert torch.equal(green > 0, (groups % 2).bool())
    assert torch.equal(red > 0, ~(groups % 2).bool())
    assert not blue.any()
    test = task.evaluation_data(tmp_path)
    assert test is not None
    assert test.groups is not None
    assert torch.bincount(test.groups).tolist() == [20, 20, 20, 20]


# What is wrong with a file --------------------------------------------------------------------


def test_missing_data_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"mnist\.npz.*x_train.*data prepare mnist"):
        Mnist().client_data(ClientId("client-0"), tmp_path)
    with pytest.raises(ConfigurationError, match="set data_directory"):
        Mnist().evaluation_data(None)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        (
            {"x_train": np.zeros((600, 28), dtype=np.uint8)},
            r"x_train is uint8 \(600, 28\)",
        ),
        (
            {"x_test": np.zeros((80, 28, 28))},
            r"x_test is float64 .*but uint8 n × 28 × 28 is expected",
        ),
        ({"y_train": np.full(600, 10)}, r"y_train is in \[10, 10\], but must be in \[0, 9\]"),
        ({"y_train": np.zeros(599, dtype=np.int64)}, r"y_train is int64 \(599,\)"),
    ],
)
def test_stored_arrays_incompatible_with_the_task_are_refused(
    tmp_path: Path, arrays: dict[str, NDArray[Any]], why: str
) -> None:
    write_data(tmp_path, Mnist(), extra=arrays)
    with pytest.raises(ConfigurationError, match=why):
        Mnist().client_data(ClientId("client-0"), tmp_path)


def test_npz_file_with_python_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", x_train=np.array([object()], dtype=object))
    with pytest.raises(ConfigurationError, match="contains Python objects"):
        mapped_arrays(tmp_path / "mnist.npz")


def test_file_that_is_not_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(b"no archive")
    with pytest.raises(ConfigurationError, match=r"not an \.npz file"):
        mapped_arrays(tmp_path / "mnist.npz")
    buffer = io.BytesIO()
    np.save(buffer, np.arange(100))
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
        archive.writestr("x.npy", buffer.getvalue()[:-50])
    with pytest.raises(ConfigurationError, match=r"not an \.npz file"):
        mapped_arrays(tmp_path / "cut.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_compressed_npz_files_are_read(tmp_path: Path, save: Any) -> None:
    values: dict[str, NDArray[Any]] = {
        "a": np.arange(12, dtype=np.int16).reshape(3, 4),
        "b": np.asfortranarray(np.eye(3)),
    }
    save(tmp_path / "some.npz", **values)
    found = mapped_arrays(tmp_path / "some.npz")
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in values.items()
    }
