import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from potluck.common.errors import ConfigurationError
from potluck.common.learning.heterogeneity import federated_heterogeneity
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.settings.plugins import create
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tasks.digits import ColoredDigits, Digits, images_and_digits
from potluck.common.tensors.model_arrays import state_arrays


def all_clients(task: Digits | ColoredDigits) -> list[ClientData]:
    return [task.client_data(ClientId(f"client-{number}"), None) for number in range(task.clients)]


def images(parts: list[Examples]) -> set[bytes]:
    """Return the drawings of images as bytes, without their colours."""
    inputs = torch.cat([part.inputs for part in parts])
    shapes = inputs.sum(dim=1) if inputs.dim() == 4 else inputs
    return {image.numpy().tobytes() for image in shapes}


def test_digit_images_equal_those_of_scikit_learn() -> None:
    expected_pixels, expected_digits = load_digits(return_X_y=True)
    pixels, digits = images_and_digits()
    assert np.array_equal(pixels.reshape(-1, 64) * 16, expected_pixels)
    assert np.array_equal(digits, expected_digits)


def test_digits_task_does_not_import_scikit_learn() -> None:
    program = (
        "import sys; from potluck.common.tasks.digits import Digits; "
        "Digits().evaluation_data(None); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("task", [Digits(public=300), ColoredDigits(public=300)], ids=str)
def test_public_images_belong_to_no_client_and_have_no_labels(task: Digits | ColoredDigits) -> None:
    public = task.public_data(None)
    assert public is not None
    assert len(public) == 300
    evaluation = task.evaluation_data(None)
    assert evaluation is not None
    labels = torch.zeros(300, dtype=torch.int64)
    found = images([Examples(inputs=public, labels=labels)])
    theirs = images([*(each.train for each in all_clients(task)), evaluation])
    assert not found & theirs
    again = task.public_data(None)
    assert again is not None
    assert torch.equal(public, again)
    assert type(task)().public_data(None) is None


def test_more_public_images_than_available_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="'public' is 1390, but the 1397 samples must also suffice"
    ):
        Digits(public=1390).public_data(None)


@pytest.mark.parametrize("name", ["digits", "colored-digits"])
def test_digits_tasks_are_found_by_name_and_have_consistent_data(name: str) -> None:
    task = create(Task, name, {"held_out": 0.2})
    assert isinstance(task, Task)
    data = task.client_data(ClientId("client-3"), None)
    assert data.held_out is not None
    for examples in (data.train, data.held_out, task.evaluation_data(None)):
        assert examples is not None
        assert examples.inputs.dtype == torch.float32
        assert examples.labels.dtype == torch.int64
        assert task.model()(examples.inputs).shape == (len(examples), task.classes)
        assert int(examples.labels.max()) < task.classes
        if task.groups:
            assert examples.groups is not None
            assert int(examples.groups.max()) < task.groups
    assert training_for(task, {}, source="test").epochs > 1


def test_every_digit_image_belongs_to_one_client_or_the_test_set() -> None:
    task = Digits(held_out=0.25)
    clients, test = all_clients(task), task.evaluation_data(None)
    assert test is not None
    assert torch.bincount(test.labels).tolist() == [40] * 10
    held_out = [client.held_out for client in clients if client.held_out is not None]
    counts = [len(client.train) for client in clients]
    assert sum(counts) + sum(map(len, held_out)) + len(test) == 1797
    assert min(counts) >= 8
    assert not images([client.train for client in clients]) & images([*held_out, test])


def test_all_digit_images_belong_to_clients_without_a_central_test_set() -> None:
    task = Digits(central_test=False, held_out=0.2)
    assert task.evaluation_data(None) is None
    assert sum(len(c.train) + len(c.held_out or ()) for c in all_clients(task)) == 1797


@pytest.mark.parametrize("clients", [1, 24, 200])
def test_digits_are_split_over_any_number_of_clients(clients: int) -> None:
    counts = [len(c.train) for c in all_clients(Digits(clients=clients, alpha=0.1))]
    assert sum(counts) == 1397
    assert min(counts) >= 3


def test_digits_partition_depends_on_the_seed() -> None:
    first, again, other = (
        torch.cat([c.train.inputs for c in all_clients(Digits(seed=seed))]) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_colored_digits_clients_have_table_6_scaled_to_58_samples() -> None:
    matrices = torch.stack(
        [
            torch.bincount(client.train.groups, minlength=4)
            for client in all_clients(ColoredDigits())
            if client.train.groups is not None
        ]
    )
    assert matrices.tolist()[:3] == [[26, 26, 3, 3], [26, 3, 26, 3], [26, 3, 3, 26]]
    # 15 spurious clients and one with the opposite correlation; the other clients cancel out
    assert matrices.sum(dim=0).tolist() == [509, 187, 187, 509]
    metrics = federated_heterogeneity(matrices.reshape(24, 2, 2).numpy())
    assert (metrics.gci, metrics.gai) == pytest.approx((0, 0), abs=1e-12)
    scaled = (metrics.gsc, metrics.cci, metrics.cai, metrics.csc)
    # the metrics of Table 6, but 26 : 3 is not exactly 9 : 1
    assert scaled == pytest.approx((0.1634, 0.0885, 0.0885, 0.3540), abs=0.013)


def test_colored_test_set_is_balanced_and_contains_no_training_data() -> None:
    task = ColoredDigits()
    test = task.evaluation_data(None)
    assert test.groups is not None
    assert torch.bincount(test.groups).tolist() == [100] * 4
    trained = [client.train for client in all_clients(task)]
    assert not images(trained) & images([test])
    assert sum(len(part) for part in trained) == len(images(trained)) == 24 * 58


def test_colour_of_a_digit_encodes_its_group_and_blue_is_unused() -> None:
    train = ColoredDigits().client_data(ClientId("client-5"), None).train
    assert train.groups is not None
    lit = train.inputs.sum(dim=(2, 3)) > 0
    assert torch.equal(lit[:, 1], train.groups % 2 == 1)
    assert torch.equal(lit[:, 0], train.groups % 2 == 0)
    assert not lit[:, 2].any()
    assert torch.equal(train.groups // 2, train.labels)


@pytest.mark.parametrize(("clients", "samples"), [(1, 200), (8, 174), (48, 28), (100, 13)])
def test_colored_digits_are_split_over_any_number_of_clients(clients: int, samples: int) -> None:
    parts = all_clients(ColoredDigits(clients=clients))
    assert {len(client.train) for client in parts} == {samples}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"clients": 0}, "task digits: option 'clients' is 0; it must be greater than 0"),
        ("digits", {"clients": "24"}, "'clients' is '24'; it must be a whole number"),
        ("digits", {"alpha": 0}, "'alpha' is 0; it must be greater than 0"),
        ("digits", {"held_out": 0.6}, "'held_out' is 0.6; it must be less than or equal to 0.5"),
        ("digits", {"central_test": False}, "no data to evaluate on; set held_out"),
        (
            "digits",
            {"colour": "red"},
            "its options: .*clients, alpha, seed, held_out, central_test",
        ),
        ("colored-digits", {"seed": -1}, "'seed' is -1; it must be greater than or equal to 0"),
    ],
)
def test_invalid_task_options_are_refused_in_one_line(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        create(Task, name, options)
    assert "\n" not in caught.value.message


def test_more_clients_than_digit_images_allow_are_refused() -> None:
    task = ColoredDigits(clients=140)
    with pytest.raises(ConfigurationError, match="1397 images, too few for 140 clients"):
        task.client_data(ClientId("client-0"), None)
    many = Digits(clients=1398)
    with pytest.raises(ConfigurationError, match="1397 samples are too few for 1398 clients"):
        many.client_data(ClientId("client-0"), None)


def test_initial_model_weights_follow_the_torch_seed() -> None:
    def weights(seed: int) -> bytes:
        torch.manual_seed(seed)
        return b"".join(array.tobytes() for array in state_arrays(ColoredDigits().model()).values())

    assert weights(1) == weights(1) != weights(2)


def test_ordered_option_sorts_clients_by_digit_and_keeps_their_images() -> None:
    plain, ordered = Digits(seed=3), Digits(seed=3, ordered=True)
    means = [float(each.train.labels.double().mean()) for each in all_clients(ordered)]
    assert means == sorted(means)
    parts = [
        {each.train.labels.numpy().tobytes() for each in all_clients(t)} for t in (plain, ordered)
    ]
    assert parts[0] == parts[1]


def test_digit_groups_option_makes_each_digit_a_group() -> None:
    task = Digits(digit_groups=True, label_noise=0.5)
    test = task.evaluation_data(None)
    assert test is not None
    assert test.groups is not None
    assert task.groups == 10
    assert torch.equal(test.groups, test.labels)
    assert Digits().groups == 0


def test_samples_option_limits_the_number_of_images() -> None:
    few = all_clients(Digits(samples=400))
    assert sum(len(each.train) for each in few) == 400
    assert min(len(each.train) for each in few) >= 8
    assert sum(len(each.train) for each in all_clients(Digits(samples=5000))) == 1397
