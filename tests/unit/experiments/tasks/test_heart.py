"""The task `heart`: its files, the transformation of a patient, the hospitals as clients."""

from hashlib import sha256
from importlib.resources import files

import numpy as np
import pytest
import torch

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.settings.plugins import TASKS, find
from potluck.experiments.tasks.heart import HOSPITALS, INPUTS, Heart, patients

# A column. Each number is followed by its marker for a missing value; categories come last.
MISSING_CHOL = 5


@pytest.mark.parametrize(
    ("hospital", "healthy", "ill"),
    [("cleveland", 164, 139), ("hungarian", 188, 106), ("switzerland", 8, 115), ("va", 51, 149)],
)
def test_heart_hospital_has_the_published_number_of_patients(
    hospital: str, healthy: int, ill: int
) -> None:
    inputs, labels = patients(hospital)
    assert np.bincount(labels).tolist() == [healthy, ill]
    assert inputs.shape == (healthy + ill, INPUTS)
    assert np.isfinite(inputs).all()
    assert np.abs(inputs).max() < 8


def test_heart_patient_is_transformed_by_fixed_constants() -> None:
    inputs, _ = patients("cleveland")
    # 63 years, male, pain of type 1, pressure 145, cholesterol 233, sugar high, ECG 2, rate 150,
    # no angina, depression 2.3, slope 3, no vessel, defect 6
    numbers: list[float] = [1.3, 0, 0.75, 0, -0.14, 0, 0.4, 0, 1.3, 0, 0, 0]
    categories = [0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0]
    assert inputs[0].tolist() == pytest.approx([*numbers, *categories])


def test_missing_value_of_a_patient_is_zero_with_a_marker() -> None:
    inputs, _ = patients("hungarian")  # patient 2 lacks cholesterol and the last three features
    numbers, categories = inputs[2, :12], inputs[2, 12:]
    assert numbers[MISSING_CHOL - 1 : MISSING_CHOL + 1].tolist() == [0, 1]
    assert numbers[10:].tolist() == [0, 1]
    assert categories[-6:].tolist() == [0] * 6


def test_cholesterol_of_zero_is_treated_as_missing() -> None:
    inputs, _ = patients("switzerland")  # its cholesterol is 0 for all patients
    assert inputs[:, MISSING_CHOL].all()
    assert not inputs[:, MISSING_CHOL - 1].any()


def test_heart_clients_are_found_by_hospital_name_and_by_number() -> None:
    task = Heart()
    for number, hospital in enumerate(HOSPITALS):
        named = task.client_data(ClientId(hospital), None)
        numbered = task.client_data(ClientId(f"client-{number}"), None)
        assert named.held_out is not None
        assert torch.equal(named.train.inputs, numbered.train.inputs)
        assert named.held_out.groups is not None
        assert set(named.held_out.groups.tolist()) == {number}
        total = len(patients(hospital)[1])
        assert len(named.held_out) == int(0.3 * total)
        assert len(named.train) == total - len(named.held_out)
    assert task.evaluation_data(None) is None


def test_unknown_heart_client_is_refused_listing_the_hospitals() -> None:
    with pytest.raises(ConfigurationError, match=r"'basel'; .*cleveland, hungarian"):
        Heart().client_data(ClientId("basel"), None)


@pytest.mark.parametrize(("network", "parameters"), [("logistic", 64), ("perceptron", 546)])
def test_heart_networks_accept_patients_and_have_the_stated_size(
    network: str, parameters: int
) -> None:
    task = find(TASKS, "heart")(network=network)
    model = task.model()
    held_out = task.client_data(ClientId("va"), None).held_out
    assert model(held_out.inputs).shape == (60, 2)
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_heart_data_files_are_unchanged_and_have_a_licence() -> None:
    folder = files("potluck.experiments.tasks") / "heart_data"
    licence = (folder / "LICENCE.txt").read_text(encoding="utf-8")
    assert "CC BY 4.0" in licence
    assert "10.24432/C52P4X" in licence
    found = [
        sha256((folder / f"processed.{hospital}.data").read_bytes()).hexdigest()[:16]
        for hospital in HOSPITALS
    ]
    assert found == [
        "a74b7efa387bc9d1",
        "d1ad108f785768cd",
        "834a405ccf5b66ab",
        "e7c93d8d0d2acdad",
    ]
