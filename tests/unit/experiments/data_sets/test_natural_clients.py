"""Data sets with natural clients: their published formats, small and generated, and their tasks."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.settings.old_spelling import OldSpellingWarning
from potluck.common.settings.plugins import TASKS, find
from potluck.experiments.data_sets.flamby_files import isic2019, tcga_brca
from potluck.experiments.data_sets.leaf import femnist
from potluck.experiments.data_sets.plays import LEAST, STEP, samples_by_role
from potluck.experiments.data_sets.prepare import prepare
from potluck.experiments.data_sets.search import Found
from potluck.experiments.tasks.femnist import Femnist
from potluck.experiments.tasks.flamby import PATIENT_COLUMNS, Isic2019, TcgaBrca
from potluck.experiments.tasks.images import Emnist
from potluck.experiments.tasks.natural import NaturalTask
from potluck.experiments.tasks.shakespeare import ALPHABET, WINDOW, Shakespeare

LINE = "Now is the time, and this the place; go on!"


def written(folder: Path, task: NaturalTask, found: Found) -> Path:
    """Write the arrays as a file of the task."""
    np.savez(folder / task.form.file_name, allow_pickle=False, **found)
    return folder


def small_play(roles: dict[str, int]) -> str:
    """Return a play in which roles take turns; each speaks its number of lines, two at a time."""
    left = dict(roles)
    blocks: list[str] = []
    while any(left.values()):
        for role, lines in left.items():
            if lines:
                said = min(2, lines)
                left[role] -= said
                blocks.append("\n".join([f"{role}:", *[LINE] * said]))
    return "\n\n".join(blocks) + "\n"


def test_roles_with_enough_characters_are_clients_in_the_order_of_their_first_words() -> None:
    found = samples_by_role(small_play({"YORICK": 40, "Page": 3, "First Ghost": 30}), source="t")
    assert found["names"].tolist() == ["YORICK", "First Ghost"]
    said = 40 * (len(LINE) + 1) - 1
    train = said - int(0.2 * said)
    windows = [len(range(0, length - WINDOW, STEP)) for length in (train, said - train)]
    assert [int((found[f"c_{split}"] == 0).sum()) for split in ("train", "test")] == windows


@given(lines=st.integers(25, 60), at=st.integers(0, 20))
def test_a_sample_is_the_text_before_its_label(lines: int, at: int) -> None:
    found = samples_by_role(small_play({"A": lines}), source="t")
    text = "\n".join([LINE] * lines)
    start = at * STEP
    characters = [ALPHABET[code] for code in [*found["x_train"][at], found["y_train"][at]]]
    assert "".join(characters) == text[start : start + WINDOW + 1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("A:\nall 7 of us\n", r"t, line 2: the character '7' is not one of the 65"),
        (
            "A:\nwords\n\nno name\nwords\n",
            r"t, line 4: 'no name' is not a name with a colon; begin",
        ),
        ("A:\nwords\n", rf"t: no role speaks at least {LEAST} characters, the minimum"),
    ],
)
def test_another_text_is_refused_with_its_line(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        samples_by_role(text, source="t")


def test_another_play_than_the_pinned_text_is_not_prepared(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text(small_play({"A": 40}))
    with pytest.raises(ConfigurationError, match="does not have the known SHA-256 of shakespeare"):
        prepare("shakespeare", tmp_path, tmp_path / "data", 224)


@pytest.mark.parametrize("network", ["gru", "transformer"])
def test_a_role_predicts_characters(tmp_path: Path, network: Any) -> None:
    task = Shakespeare(clients=2, network=network)
    data = written(
        tmp_path, task, samples_by_role(small_play({"A": 40, "B": 30, "C": 30}), source="t")
    )
    assert task.client_names(data) == ("A", "B")
    mine = task.client_data(ClientId("client-1"), data)
    assert mine.held_out is not None
    assert task.evaluation_data(data) is None
    inputs = mine.train.inputs_at(torch.arange(5))
    assert (inputs.shape, inputs.dtype) == ((5, WINDOW), torch.int64)
    model = task.model()
    loss = torch.nn.functional.cross_entropy(model(inputs), mine.train.labels[:5])
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(
        ConfigurationError, match=r"147 clients, .* samples of 3 clients; set the task's"
    ):
        Shakespeare().client_data(ClientId("client-0"), data)


def test_the_coordinator_may_evaluate_on_all_clients_test_samples(tmp_path: Path) -> None:
    found = samples_by_role(small_play({"A": 40, "B": 30, "C": 30}), source="t")
    data = written(tmp_path, Shakespeare(), found)
    central = Shakespeare(clients=2, evaluation="coordinator")
    assert central.client_data(ClientId("client-0"), data).held_out is None
    together = central.evaluation_data(data)
    assert together is not None
    assert len(together) == int((found["c_test"] < 2).sum())


def test_every_third_sample_of_a_role_for_shorter_runs(tmp_path: Path) -> None:
    found = samples_by_role(small_play({"A": 40, "B": 30}), source="t")
    data = written(tmp_path, Shakespeare(), found)
    of = [Shakespeare(clients=2, every=n).client_data(ClientId("client-1"), data) for n in (1, 3)]
    assert of[1].train.labels.tolist() == of[0].train.labels.tolist()[::3]
    assert of[0].held_out is not None
    assert of[1].held_out is not None
    assert of[1].held_out.labels.tolist() == of[0].held_out.labels.tolist()[::3]


def leaf_file(path: Path, users: dict[str, list[int]], **odd: Any) -> None:
    """Write a file as LEAF does: paper is 1, and the ink of a sample is at its label's position."""
    data = {}
    for user, labels in users.items():
        images = np.ones((len(labels), 784))
        images[np.arange(len(labels)), labels] = 0.0
        data[user] = {"x": images.tolist(), "y": labels} | odd
    content = {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": data,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_leafs_users_become_clients_by_writer(tmp_path: Path) -> None:
    leaf_file(tmp_path / "train" / "all_data_1.json", {"f2_b": [3, 61, 3], "f0_a": [7]})
    leaf_file(tmp_path / "train" / "all_data_0.json", {"f1_c": [10, 11]})
    leaf_file(tmp_path / "test" / "all_data_0.json", {"f2_b": [5], "f1_c": [1]})
    task = Femnist(clients=3)
    prepare("femnist", tmp_path, tmp_path / "data", 224)
    assert task.client_names(tmp_path / "data") == ("f0_a", "f1_c", "f2_b")
    clients = [task.client_data(ClientId(f"client-{k}"), tmp_path / "data") for k in range(3)]
    assert [client.train.labels.tolist() for client in clients] == [[7], [10, 11], [3, 61, 3]]
    assert clients[0].held_out is None
    image = clients[1].train.inputs[1]
    assert image.shape == (1, 28, 28)
    assert (float(image.sum()), float(image.flatten()[11])) == (1.0, 1.0)
    assert task.model()(clients[2].train.inputs).shape == (3, 62)


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"y": [62]}, r"user 'a': labels are in \[62, 62\], but must be in \[0, 61\]"),
        ({"x": [[2.0] * 784]}, r"user 'a': pixels are in \[2, 2\], but must be in \[0, 1\]; run"),
        ({"x": [[0.0] * 9]}, r"'x' has shape \(1, 9\) and 'y' has shape \(1,\), but n × 784 and n"),
        ({"x": None}, r"user 'a'.*run preprocess.sh again"),
    ],
)
def test_a_wrong_leaf_file_is_refused(tmp_path: Path, odd: dict[str, Any], error: str) -> None:
    for split in ("train", "test"):
        leaf_file(tmp_path / split / "x.json", {"a": [1]}, **odd)
    with pytest.raises(ConfigurationError, match=error):
        femnist(tmp_path)


def test_leafs_split_by_user_is_refused(tmp_path: Path) -> None:
    leaf_file(tmp_path / "train" / "x.json", {"a": [1]})
    leaf_file(tmp_path / "test" / "x.json", {"b": [1]})
    with pytest.raises(
        ConfigurationError, match=r"user 'b' has test samples but no training.*-t s"
    ):
        femnist(tmp_path)


def write_table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


FOLDS = [f"{split}_{region}" for split in ("train", "test") for region in range(6)]


def test_flambys_patients_are_read_by_region(tmp_path: Path) -> None:
    features = [f"feature {number}" for number in range(PATIENT_COLUMNS)]
    patients = [[f"P{k}", 50 + k, *[k % 2] * 38, float(k % 2), 100.0] for k in range(25)]
    write_table(tmp_path / "brca.csv", ["pid", *features, "E", "T"], patients)
    folds = [[f"P{k}", FOLDS[k % 12].partition("_")[0], FOLDS[k % 12]] for k in range(24)]
    write_table(tmp_path / "train_test_split.csv", ["pid", "fold", "fold2"], folds)
    found = tcga_brca(tmp_path)
    assert found["x_train"].shape == (12, PATIENT_COLUMNS)
    data = written(tmp_path, TcgaBrca(), found)
    mine = TcgaBrca().client_data(ClientId("client-2"), data)
    assert mine.train.inputs[:, 0].tolist() == pytest.approx([0.52, 0.64])
    assert mine.train.labels.tolist() == [0, 0]
    assert mine.train.groups is not None
    assert mine.train.groups.tolist() == [2, 2]
    write_table(tmp_path / "train_test_split.csv", ["pid", "fold", "fold2"], folds[:11])
    with pytest.raises(ConfigurationError, match=r"fold2 must have the values .* 'test_5'"):
        tcga_brca(tmp_path)
    write_table(tmp_path / "brca.csv", ["pid", *features, "E", "T"], [[*patients[0][:-2], 2, 1]])
    with pytest.raises(ConfigurationError, match="the row of P0 must have 39 features"):
        tcga_brca(tmp_path)


def test_flambys_photographs_are_read_by_centre(tmp_path: Path) -> None:
    images = tmp_path / "ISIC_2019_Training_Input_preprocessed"
    images.mkdir()
    rows = []
    for number, fold in enumerate(FOLDS):
        Image.new("RGB", (12, 9), (20 * number, 0, 0)).save(images / f"ISIC_{number}.jpg")
        rows.append([f"ISIC_{number}", number % 8, fold[-1], fold.partition("_")[0], fold])
    header = ["image", "target", "center", "fold", "fold2"]
    write_table(tmp_path / "train_test_split", header, rows)
    data = written(tmp_path, Isic2019(), isic2019(tmp_path, 8))
    task = Isic2019()
    held = task.client_data(ClientId("client-1"), data)
    assert held.held_out is not None
    assert held.held_out.labels.tolist() == [7]
    assert task.model().eval()(held.train.inputs).shape == (1, 8)
    write_table(tmp_path / "train_test_split", header, [["ISIC_99", 0, 0, "train", "train_0"]])
    with pytest.raises(ConfigurationError, match=r"names ISIC_99.jpg, which is missing in"):
        isic2019(tmp_path, 8)


def test_a_client_without_training_samples_is_refused(tmp_path: Path) -> None:
    found = samples_by_role(small_play({"A": 40, "B": 30}), source="t")
    data = written(tmp_path, Shakespeare(), {**found, "names": np.array(["A", "B", "C"])})
    with pytest.raises(ConfigurationError, match="client 'C' has no training sample"):
        Shakespeare(clients=2).client_data(ClientId("client-0"), data)


def test_the_old_name_of_emnist_by_label_is_accepted_with_a_warning() -> None:
    assert find(TASKS, "emnist-by-label") is Emnist
    with pytest.warns(OldSpellingWarning, match="'emnist' is written 'emnist-by-label' now"):
        old = find(TASKS, "emnist")(clients=3)
    assert old.clients == 3
