"""Selectors and strategies with the settings that the papers comparing with them give.

FLASH compares itself with the bandits, RHFL and FedBiO; FedDiverse with FedPNS and HCSFed. What
their own papers did is another matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from potluck.experiments.presets.papers import FEDDIVERSE, FLASH
from potluck.experiments.presets.preset import Preset, because


def _with(preset: Preset, name: str, paper: str, run: Mapping[str, Any], **reasons: str) -> Preset:
    """Another method in a paper's setting. run: tables that take the place of the paper's own, None
    for one that is left out. reasons: for what is ours, with two underscores for each dot."""
    tables = {key: value for key, value in {**preset.run, **run}.items() if value is not None}
    kept = tuple(
        each for each in preset.assumptions if each.key.partition(".")[0] not in {*run, "selector"}
    )
    return replace(
        preset, name=name, paper=paper, run=tables, assumptions=(*kept, *because(**reasons))
    )


_BANDIT = "the method it is compared with has no federated form; ours is an adaptation"

_RESTLESS = _with(
    FLASH,
    "restless-bandit",
    "Restless bandit, as FLASH compares with it, CIFAR-10",
    {"selector": {"name": "restless-bandit"}},
    selector__name=_BANDIT,
)

_NEURAL = _with(
    FLASH,
    "neural-bandit",
    "Neural bandit, as FLASH compares with it, CIFAR-10",
    {"selector": {"name": "neural-bandit"}},
    selector__name=_BANDIT,
)

_RHFL = replace(
    _with(
        FLASH,
        "rhfl",
        "RHFL (robust heterogeneous federated learning) as an aggregation, CIFAR-10",
        {
            "selector": {"name": "uniform"},
            "strategy": {"name": "rhfl"},
            "objective": {"name": "symmetric-cross-entropy", "alpha": 0.1, "beta": 1.0},
        },
        strategy__name="RHFL's clients have models of their own; FLASH compares with it as an "
        "aggregator and does not say how",
        objective__alpha="as in the authors' program",
        objective__beta="as in the authors' program",
    ),
    disclosure={},
)

_FEDBIO = replace(
    _with(
        FLASH,
        "fedbio",
        "FedBiO (bilevel optimisation), as FLASH compares with it, CIFAR-10",
        {
            "selector": {"name": "uniform"},
            "strategy": {"name": "fedbio", "tau": 0.01, "eta": 0.1},
            "objective": None,
            "training": {
                "optimizer": "sgd",
                "learning_rate": 0.05,
                "batch_size": 64,
                "epochs": 5,
                "validation_share": 0.1,
            },
        },
        strategy__tau="not stated",
        strategy__eta="not stated",
        training__optimizer="its steps are plain ones",
        training__learning_rate="not stated",
        training__validation_share="how samples are split is not stated",
    ),
    disclosure={},
)

_FEDPNS = _with(
    FEDDIVERSE,
    "fedpns",
    "FedPNS (probabilistic node selection), as FedDiverse compares with it, CMNIST_GSC",
    {"selector": {"name": "fedpns", "alpha": 2.0, "beta": 0.7, "share": 0.8}},
    selector__alpha="as in the authors' program",
    selector__beta="as in the authors' program",
    selector__share="as in the authors' program",
)

_HCSFED = replace(
    _with(
        FEDDIVERSE,
        "hcsfed",
        "HCSFed (clusters of compressed updates), as FedDiverse compares with it, CMNIST_GSC",
        {"selector": {"name": "hcsfed", "clusters": 3, "numbers": 22}},
        selector__sketch="how updates are compressed is not stated; a sparse random projection",
    ),
    disclosure={"questions": ["sketch"]},
)

COMPARED = (_FEDBIO, _FEDPNS, _HCSFED, _NEURAL, _RESTLESS, _RHFL)
