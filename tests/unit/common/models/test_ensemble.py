"""An ensemble with one model per client: the output of one member and of all."""

from __future__ import annotations

import pytest
import torch

from potluck.common.errors import ConfigurationError
from potluck.common.models.ensemble import Ensemble, ensemble

PERCEPTRON = {"name": "perceptron", "inputs": 4, "hidden": [5], "classes": 3, "dropout": 0.0}
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(members: int = 3) -> Ensemble:
    torch.manual_seed(1)
    return ensemble(of=PERCEPTRON, members=members).eval()


def beliefs(made: Ensemble) -> torch.Tensor:
    """Return the logits of each member alone: members × b × classes."""
    each = []
    for part in range(len(made.members)):
        made.use_part(part)
        each.append(torch.softmax(made(INPUTS), dim=1))
    made.use_part(None)
    return torch.stack(each)


def test_part_of_an_ensemble_trains_its_own_member() -> None:
    made = network()
    made.use_part(1)
    made(INPUTS).sum().backward()
    moved = {name for name, each in made.named_parameters() if each.grad is not None}
    assert moved
    assert all(name.startswith("members.1.") for name in moved)


def test_ensemble_output_is_the_mean_of_probabilities_weighted_by_confidence() -> None:
    made = network()
    each = beliefs(made)
    assert len({tuple(said.flatten().tolist()) for said in each}) == 3, "they begin unlike"
    torch.testing.assert_close(torch.softmax(made(INPUTS), dim=1), each.mean(dim=0))
    made.confidence.copy_(torch.tensor([3.0, 0.0, 1.0]))
    wanted = 0.75 * each[0] + 0.25 * each[2]
    torch.testing.assert_close(torch.softmax(made(INPUTS), dim=1), wanted)
    made(INPUTS).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None)


def test_ensemble_members_take_the_given_models_in_turn() -> None:
    kinds = [{**PERCEPTRON, "hidden": [width]} for width in (5, 7)]
    made = ensemble(of=kinds, members=3)
    widths = [made.get_submodule(f"members.{place}.1").out_features for place in range(3)]
    assert widths == [5, 7, 5]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({}, "model ensemble: option 'of' is {}; it must be a table with the name of another"),
        ([], "name at least one model"),
        ([{"name": "ensemble"}], "it must be a table with the name of another model"),
        ({"name": "concatenation"}, "it must be a table with the name of another model"),
        ({"name": "unknown"}, "'unknown' is not installed"),
    ],
)
def test_ensemble_of_invalid_models_is_refused(of: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ensemble(of=of)


def test_unknown_part_of_an_ensemble_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="the ensemble has 3 models, but the strategy trains model 3"
    ):
        network().use_part(3)
