"""Selectors with the settings of their own papers, as far as these are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from potluck.experiments.presets.preset import UNCHECKED, Preset, because

_TRAINING: Mapping[str, Any] = {"learning_rate": 0.01, "batch_size": 64, "epochs": 5}
_TRAINING_UNCHECKED = {
    f"training__{key}": f"{UNCHECKED}; as in NIID-Bench" for key in ("learning_rate", "batch_size")
}


def _preset(
    name: str,
    paper: str,
    selector: Mapping[str, Any],
    *,
    rounds: int,
    count: int,
    task: Mapping[str, Any],
    reasons: Mapping[str, str],
    questions: tuple[str, ...] = (),
    **tables: Any,
) -> Preset:
    """selector: its options. reasons: for what is ours, with two underscores for each dot."""
    ours = dict(reasons)
    if "training" not in tables:
        ours |= _TRAINING_UNCHECKED | {"training__epochs": UNCHECKED}
    return Preset(
        name=name,
        paper=paper,
        run={
            "rounds": rounds,
            "count": count,
            "task": task,
            "selector": {"name": name, **selector},
            "strategy": {"name": "fedavg"},
            "training": dict(_TRAINING),
            **tables,
        },
        disclosure={"questions": list(questions)} if questions else {},
        assumptions=because(**ours),
    )


def _dirichlet(name: str, clients: int, alpha: float, **others: Any) -> Mapping[str, Any]:
    return {
        "name": name,
        "clients": clients,
        "partition": "dirichlet",
        "alpha": alpha,
        **others,
    }


_CLUSTERED = _preset(
    "clustered-sampling",
    "Clustered sampling (Fraboni et al. 2021), CIFAR-10",
    {"by": "updates"},
    rounds=1000,
    count=10,
    task=_dirichlet("cifar10", 100, 0.1),
    training={"learning_rate": 0.05, "batch_size": 50, "steps": 100},
    reasons={
        "rounds": UNCHECKED,
        "task__alpha": "one of the skews that are compared",
        "selector__unbiased": "who is drawn twice is replaced, so that cohorts are of equal size",
        "training__learning_rate": UNCHECKED,
        "training__batch_size": UNCHECKED,
        "training__steps": UNCHECKED,
    },
)

_DIVFL = _preset(
    "divfl",
    "DivFL (diverse client selection by submodular maximisation), federated EMNIST",
    {},
    rounds=200,
    count=10,
    task=_dirichlet("emnist", 200, 0.3),
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": UNCHECKED,
        "task__alpha": "the paper's clients are writers; ours are made by label",
    },
)

_HICS = _preset(
    "hics-fl",
    "HiCS-FL (heterogeneity-guided client sampling), CIFAR-10",
    {"temperature": 0.0025, "entropy_weight": 10.0, "annealing": 4.0},
    rounds=500,
    count=10,
    task=_dirichlet("cifar10", 50, 0.1),
    training={"optimizer": "adam", "learning_rate": 0.001, "batch_size": 64, "epochs": 2},
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": UNCHECKED,
        "task__alpha": "the paper mixes several skews",
        "selector__temperature": "a setting, which has to fit the length of the steps",
        "training__optimizer": UNCHECKED,
        "training__learning_rate": UNCHECKED,
        "training__batch_size": UNCHECKED,
        "training__epochs": UNCHECKED,
    },
)

_GREEDY = _preset(
    "greedyfed",
    "GreedyFed (clients by cumulative Shapley value), MNIST",
    {"tolerance": 0.0001},
    rounds=400,
    count=3,
    task=_dirichlet("mnist", 300, 0.1),
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": UNCHECKED,
        "task__alpha": "the paper's is smaller, and leaves many clients without samples",
        "selector__permutations": "the coordinator measures on the test samples; the paper keeps "
        "validation samples apart",
    },
)

_FEEL = _preset(
    "feel",
    "FEEL (scheduling by gradient norm and time), CIFAR-10",
    {"rho": 0.5},
    rounds=200,
    count=1,
    task={"name": "cifar10", "clients": 30, "partition": "labels", "labels": 2},
    training={"learning_rate": 0.05, "batch_size": 64, "steps": 1},
    virtual_clock={"enabled": True},
    questions=("gradient-norm",),
    reasons={
        "rounds": UNCHECKED,
        "task__clients": UNCHECKED,
        "task__partition": UNCHECKED,
        "selector__rho": "the paper's value is not at hand",
        "training__learning_rate": UNCHECKED,
        "training__batch_size": "the paper sends gradients; here it is one local step",
        "virtual_clock__enabled": "simulated training times; the paper simulates uploads by radio",
    },
)

_FEDLECC = _preset(
    "fedlecc",
    "FedLECC (clusters of labels, largest losses first), MNIST",
    {"clusters": 10},
    rounds=100,
    count=10,
    task=_dirichlet("mnist", 100, 0.1),
    profiles={"disclosure": "exact"},
    questions=("loss",),
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": UNCHECKED,
        "task__alpha": UNCHECKED,
        "selector__clusters": UNCHECKED,
        "profiles__disclosure": "the paper has exact histograms",
    },
)

_FEDCOR = _preset(
    "fedcor",
    "FedCor (correlations of losses), CIFAR-10",
    {"warm_up": 20, "refresh": 50, "memory": 0.99, "discount": 0.9},
    rounds=500,
    count=5,
    task={"name": "cifar10", "clients": 100, "partition": "labels", "labels": 2},
    questions=("loss",),
    reasons={
        "rounds": UNCHECKED,
        "task__labels": "one of the skews that are compared",
        "selector__memory": "the larger of two in the authors' program",
        "selector__refresh": "refreshes are rounds with uniform selection here; the authors throw "
        "their updates away",
    },
)

_FEDENTROPY = _preset(
    "fedentropy",
    "FedEntropy (maximum entropy of soft labels), CIFAR-10",
    {"exploration": 0.2},
    rounds=500,
    count=10,
    task=_dirichlet("cifar10", 100, 0.1),
    training={"learning_rate": 0.01, "momentum": 0.5, "batch_size": 50, "epochs": 5},
    questions=("soft-label",),
    reasons={
        "rounds": UNCHECKED,
        "task__alpha": "one of the skews that are compared",
        "selector__grouping": "weights as in the authors' program; the paper's own rule is not "
        "at hand",
        "training__learning_rate": UNCHECKED,
        "training__momentum": UNCHECKED,
        "training__batch_size": UNCHECKED,
        "training__epochs": UNCHECKED,
    },
)

_PYRAMIDFL = _preset(
    "pyramidfl",
    "PyramidFL (fine-grained client selection), federated EMNIST",
    {"prolong": True, "drop": True, "least_dropped": 0.1, "most_dropped": 0.6},
    rounds=500,
    count=50,
    task=_dirichlet("emnist", 1000, 0.3),
    round={"over_selection": 15},
    virtual_clock={"enabled": True, "draw": "client"},
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": "the paper's data sets are larger, and not at hand",
        "selector__prolong": "off by default in the authors' program",
        "selector__drop": "off by default in the authors' program",
        "virtual_clock__enabled": "simulated training times; the paper has traces of phones",
    },
)

_REFL = _preset(
    "refl",
    "REFL (resource-efficient selection, late updates), CIFAR-10",
    {"rest": 5, "memory": 0.25},
    rounds=500,
    count=10,
    task=_dirichlet("cifar10", 1000, 0.3),
    round={"over_selection": 3, "late_updates": {"rounds": 5, "beta": 0.35}},
    virtual_clock={"enabled": True, "draw": "client"},
    questions=("availability",),
    reasons={
        "rounds": UNCHECKED,
        "count": UNCHECKED,
        "task__clients": "the paper's data sets are larger, and not at hand",
        "selector__memory": UNCHECKED,
        "round__over_selection": "a third more, as the systems it compares with have",
        "round__late_updates": "at most five rounds late: not checked against the paper",
        "virtual_clock__enabled": "simulated training times; the paper has traces of phones, from "
        "which its clients forecast when they are there. Here it is [availability] of each host",
    },
)

SELECTORS = (
    _CLUSTERED,
    _DIVFL,
    _FEDCOR,
    _FEDENTROPY,
    _FEDLECC,
    _FEEL,
    _GREEDY,
    _HICS,
    _PYRAMIDFL,
    _REFL,
)
