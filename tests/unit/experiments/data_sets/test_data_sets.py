"""Small generated files in the formats of the real downloads."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.tasks.table6 import interaction_matrices
from potluck.experiments.data_sets import cifar, idx, photographs
from potluck.experiments.data_sets import covertype_download as covertype
from potluck.experiments.data_sets.prepare import prepare
from potluck.experiments.data_sets.search import inside
from potluck.experiments.tasks.arrays import mapped_arrays
from potluck.experiments.tasks.spurious import Spawrious, Waterbirds


def idx_file(values: NDArray[np.uint8]) -> bytes:
    head = bytes([0, 0, 8, values.ndim])
    return head + np.array(values.shape, dtype=">u4").tobytes() + values.tobytes()


def some_images(count: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_mnist(folder: Path, *, images: NDArray[np.uint8]) -> None:
    labels = (np.arange(len(images)) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_file(images)))
        (folder / f"{prefix}-labels.idx1-ubyte").write_bytes(idx_file(labels))


def test_idx_files_are_read_compressed_or_not(tmp_path: Path) -> None:
    images = some_images(20, 28, 28)
    write_mnist(tmp_path, images=images)
    found = idx.mnist(tmp_path)
    assert np.array_equal(found["x_train"], images)
    assert found["y_test"].tolist() == [*range(10)] * 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not an idx file of bytes"),
        (idx_file(some_images(2, 3, 3))[:-1], "has 17 bytes, but its shape"),
        (idx_file(some_images(2, 3, 3)) + b"x", "has 19 bytes, but its shape"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "the invalid shape "),
    ],
)
def test_damaged_idx_file_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "broken-ubyte"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=why):
        idx.read_idx(path)


def test_images_other_than_mnist_are_refused_by_their_checksum(tmp_path: Path) -> None:
    write_mnist(tmp_path, images=some_images(20, 28, 28))
    with pytest.raises(
        ConfigurationError, match=r"x_train, y_train, x_test, y_test from .*SHA-256"
    ):
        prepare("mnist", tmp_path, tmp_path / "data", 224)
    assert not (tmp_path / "data").exists()


def test_missing_mnist_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train-images-idx3-ubyte.*needs MNIST's four"):
        prepare("mnist", tmp_path, tmp_path / "data", 224)


def cifar_records(count: int, labels: int) -> NDArray[np.uint8]:
    records = some_images(count, labels + 3072)
    records[:, :labels] = np.arange(count)[:, None] % 10
    return records


def test_cifar10_is_read_from_the_archive_in_a_fixed_order(tmp_path: Path) -> None:
    records = cifar_records(30, 1)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for number in range(6):
            name = f"data_batch_{number}.bin" if number else "test_batch.bin"
            content = records[5 * number : 5 * number + 5].tobytes()
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    found = cifar.cifar10(tmp_path)
    assert found["x_train"].shape == (25, 32, 32, 3)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    [row] = np.flatnonzero((found["x_train"] == images[7]).all(axis=(1, 2, 3)))
    assert found["y_train"][row] == records[7, 0]
    [row] = np.flatnonzero((found["x_test"] == images[2]).all(axis=(1, 2, 3)))
    assert found["y_test"][row] == records[2, 0]


def test_pickled_cifar_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": 1}))
    with pytest.raises(ConfigurationError, match="a pickle that could run code"):
        cifar.cifar10(tmp_path)


def test_cifar100_uses_the_superclasses_as_labels(tmp_path: Path) -> None:
    records = cifar_records(8, 2)
    records[:, 1] = 99
    for split in ("train", "test"):
        (tmp_path / f"{split}.bin").write_bytes(records.tobytes())
    assert cifar.cifar100(tmp_path)["y_train"].tolist() == [*range(8)]


def test_covertype_is_read_from_libsvm_format(tmp_path: Path) -> None:
    lines = [f"{1 + row % 2} 1:0.5 54:{row}" for row in range(10)]
    (tmp_path / "covtype.libsvm.binary.scale").write_text("\n".join(lines))
    found = covertype.covertype_binary(tmp_path)
    assert (found["x_train"].shape, found["x_test"].shape) == ((8, 54), (2, 54))
    assert (found["x_train"][:, 53].astype(int) % 2).tolist() == found["y_train"].tolist()
    assert set(found["x_train"][:, 0]) == {0.5}


# Photographs -----------------------------------------------------------------------------------


def write_image(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (value, 0, 255 - value)).save(path)


def write_waterbirds(folder: Path, train: NDArray[np.int64]) -> None:
    """Write training images, whose number per class (row) and place the matrix gives; and one test
    image of each."""
    rows = ["img_id,img_filename,y,split,place,place_filename"]
    for split, counts in ((0, train), (1, np.ones((2, 2), dtype=np.int64)), (2, np.ones((2, 2)))):
        for (label, place), count in np.ndenumerate(counts):
            for _ in range(int(count)):
                name = f"{label:03d}.Bird/{len(rows)}.jpg"
                rows.append(f"{len(rows)},{name},{label},{split},{place},/p/x.jpg")
                write_image(folder / name, 40 * label + 20 * place)
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")


def test_waterbirds_is_prepared_from_its_metadata(tmp_path: Path) -> None:
    write_waterbirds(tmp_path / "in", np.array([[3, 2], [1, 4]]))
    written = prepare("waterbirds", tmp_path / "in", tmp_path / "data", 8)
    arrays = mapped_arrays(written.path)
    assert arrays["x_train"].shape == (10, 8, 8, 3)
    cells = np.bincount(arrays["y_train"] * 2 + arrays["a_train"], minlength=4)
    assert cells.tolist() == [3, 2, 1, 4]
    red = arrays["x_train"][:, 4, 4, 0].astype(int)
    expected = 40 * arrays["y_train"].astype(int) + 20 * arrays["a_train"]
    assert np.abs(red - expected).max() <= 6  # JPEG changes the colours a little


def test_file_name_outside_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is outside"):
        inside(tmp_path, "../secret.png")


def test_file_that_is_not_an_image_is_refused(tmp_path: Path) -> None:
    write_waterbirds(tmp_path, np.ones((2, 2), dtype=np.int64))
    (tmp_path / "000.Bird" / "1.jpg").write_bytes(pickle.dumps("no image"))
    with pytest.raises(ConfigurationError, match="can't read the image"):
        photographs.waterbirds(tmp_path, 8)


def test_spawrious_test_set_has_equally_many_images_of_each_cell(tmp_path: Path) -> None:
    counts = {"labrador": 30, "dachshund": 25, "bulldog": 20, "corgi": 20}
    for breed, count in counts.items():
        for place in ("beach", "snow", "jungle"):
            for number in range(count):
                write_image(tmp_path / f"{number % 2}/{place}/{breed}/{number}.png", 100)
    found = photographs.spawrious(tmp_path, 8)
    assert np.bincount(found["y_test"] * 2 + found["a_test"]).tolist() == [2] * 8
    assert np.bincount(found["y_train"] * 2 + found["a_train"]).tolist() == [
        28, 28, 23, 23, 18, 18, 18, 18,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Waterbirds(), "waterbirds"),
        *(
            (Spawrious(distribution=each), "spawrious")
            for each in get_args(get_type_hints(Spawrious)["distribution"])
        ),
    ],
    ids=lambda value: getattr(value, "distribution", value),
)
def test_clients_of_every_distribution_have_its_matrices(
    tmp_path: Path, task: Waterbirds | Spawrious, name: str
) -> None:
    matrices = interaction_matrices(task.distribution)
    cells = np.zeros((4, 2), dtype=np.int64)
    cells[: matrices.shape[1]] = matrices.sum(axis=0)
    labels, attributes = np.divmod(np.repeat(np.arange(8), cells.ravel()), 2)
    test = np.arange(8) if name == "spawrious" else np.arange(4)
    np.savez(
        tmp_path / f"{name}.npz",
        x_train=np.zeros((len(labels), 2, 2, 3), dtype=np.uint8), y_train=labels,
        a_train=attributes, x_test=np.zeros((len(test), 2, 2, 3), dtype=np.uint8),
        y_test=test // 2, a_test=test % 2,
    )  # fmt: skip
    assert task.clients == len(matrices)
    for number, matrix in enumerate(matrices):
        train = task.client_data(ClientId(f"client-{number}"), tmp_path).train
        assert train.groups is not None
        held = np.bincount(train.groups.numpy(), minlength=task.groups)
        assert held.reshape(-1, 2).tolist() == matrix.tolist()
    evaluation = task.evaluation_data(tmp_path)
    assert evaluation is not None
    assert len(evaluation) == task.groups
