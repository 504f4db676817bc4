"""The settings of papers as run files to start from; assumptions of ours are marked.

A preset is the paper's own scale. An assumption is a value that we chose because the paper names
none, or names several: everybody who prints or uses a preset gets to see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomlkit

from potluck.common.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A dotted key of the run file whose value is ours, and why it is that value."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preset:
    """run: a run file, without seed and name. paper: whose settings these are. disclosure: what the
    hosts must allow, in their table of that name, beyond its defaults."""

    name: str
    paper: str
    run: Mapping[str, Any]
    disclosure: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()


def _because(**reasons: str) -> tuple[Assumption, ...]:
    """Keys with two underscores for each dot."""
    return tuple(
        Assumption(key=key.replace("__", "."), reason=reason) for key, reason in reasons.items()
    )


_FEDDIVERSE = Preset(
    name="feddiverse",
    paper="FedDiverse (diversity-driven client selection), CMNIST_GSC",
    run={
        "rounds": 200,
        "count": 9,
        "weighting": "equal",
        "task": {"name": "cmnist", "distribution": "cmnist-gsc"},
        "selector": {"name": "feddiverse"},
        "strategy": {"name": "fedavgm", "momentum": 0.95},
        "training": {"optimizer": "sgd", "learning_rate": 0.001, "batch_size": 28, "epochs": 1},
    },
    assumptions=_because(
        selector__cross_product="feddiverse takes the absolute product, which gives the shares of "
        "client types in the paper's figures; Algorithm 5 prints the signed one",
        selector__rotation="feddiverse moves on with the round, as in Algorithm 6; the text says "
        "with every three clients",
        training__optimizer="the paper does not name the clients' optimiser",
        training__epochs="the number of local steps is not stated; one pass over the samples",
        weighting="Algorithm 1 weighs by samples, §5.2 says all clients count the same",
        task__network="MobileNetV2 from ImageNet in the paper; here a small network from scratch",
    ),
)

_FEDENTOPT = Preset(
    name="fedentopt",
    paper="FedEntOpt (entropy-based client selection), CIFAR-10 with two labels per client",
    run={
        "rounds": 500,
        "count": 10,
        "task": {"name": "cifar10", "clients": 100, "partition": "labels", "labels": 2},
        "selector": {"name": "fedentopt", "buffer": 70},
        "strategy": {"name": "fedavg"},
        "training": {
            "learning_rate": 0.01,
            "learning_rate_decay": 0.98,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "batch_size": 64,
            "epochs": 5,
        },
    },
    assumptions=_because(
        selector__buffer="the figure is missing in the copy we have; 70 % of the clients, as ports "
        "of the code use for two labels",
        training__learning_rate="missing likewise; as ports of the code use",
        training__weight_decay="missing likewise; as ports of the code use",
        task__clients="missing likewise; as ports of the code use",
    ),
)

_DC = Preset(
    name="dc",
    paper="Distribution-controlled client selection, MNIST",
    run={
        "rounds": 100,
        "count": 15,
        "task": {
            "name": "mnist",
            "clients": 100,
            "partition": "dirichlet",
            "alpha": 0.1,
            "global_alpha": 2.0,
        },
        "selector": {"name": "dc-balanced", "added": 5},
        "strategy": {"name": "fedavg"},
        "training": {"learning_rate": 0.01, "batch_size": 64, "epochs": 3},
    },
    assumptions=_because(
        selector__stop_early="the dc selectors always add all, as Algorithm 1 says, so that "
        "cohorts are of equal size; the text stops when nobody improves the cohort",
        training__learning_rate="not stated; 0.01 as in NIID-Bench",
        training__batch_size="not stated; 64 as in NIID-Bench",
        task__network='"two 5 × 5 convolutions" leaves the widths open',
        task__samples="MNIST's own 60,000 training images instead of a random 80 % of all",
    ),
)

_FLASH = Preset(
    name="flash",
    paper="FLASH (simultaneous heterogeneities), CIFAR-10",
    run={
        "rounds": 1500,
        "count": 10,
        "task": {
            "name": "cifar10",
            "clients": 50,
            "partition": "one-class",
            "skewed": 0.3,
            "main": 0.8,
            "label_noise": 0.15,
        },
        "selector": {"name": "flash"},
        "strategy": {"name": "fedavg"},
        "objective": {"name": "noise-robust", "alpha": 1.0, "beta": 1.0},
        "training": {
            "optimizer": "adam",
            "learning_rate": 0.001,
            "batch_size": 64,
            "epochs": 5,
            "validation_share": 0.1,
        },
        "virtual_clock": {"enabled": True},
    },
    disclosure={"questions": ["context"]},
    assumptions=_because(
        selector__scale="flash divides durations and rewards by their running means; with seconds "
        "and nats as they are, selection is noise",
        training__learning_rate="not stated",
        training__validation_share="how T_k and V_k are split is not stated",
        training__batch_size="not stated",
        objective__alpha="the captions give pairs (α, β); (1, 1) is that of CIFAR-10",
        objective__beta="as objective.alpha",
        task__noisy_clients="every client's rate is drawn from the same Beta distribution",
        task__network="ResNet-18 in the paper; a small network unless the experiment says so",
    ),
)

_FEDCONCAT = Preset(
    name="fedconcat",
    paper="FedConcat (concatenated models of clusters), CIFAR-10",
    run={
        "rounds": 980,
        "count": 10,
        "task": {"name": "cifar10", "clients": 100, "partition": "labels", "labels": 2},
        "model": {
            "name": "concatenation",
            "groups": 5,
            "of": {"name": "lenet5", "classes": 10},
        },
        "selector": {"name": "uniform"},
        "strategy": {"name": "fedconcat", "groups": 5, "rounds": 480},
        "profiles": {"disclosure": "exact"},
        "training": {"learning_rate": 0.01, "batch_size": 64, "epochs": 5},
        "transport": {"up": {"delta": True, "compress": True}},
    },
    disclosure={"exact_label_counts": True},
    assumptions=_because(
        count="the traffic that is compared is for one client; ten of a hundred",
        task__partition="one of the skews that are compared",
        training__learning_rate="0.01 as in NIID-Bench",
        training__batch_size="64 as in NIID-Bench",
        training__epochs="the same in both phases; the head is trained for three batches a round",
        transport__up="spares what a client did not train",
    ),
)

_FEDDF = Preset(
    name="feddf",
    paper="FedDF (ensemble distillation), CIFAR-10",
    run={
        "rounds": 100,
        "count": 8,
        "task": {
            "name": "cifar10",
            "clients": 20,
            "partition": "dirichlet",
            "alpha": 1.0,
            "public": 5000,
        },
        "selector": {"name": "uniform"},
        "strategy": {
            "name": "feddf",
            "steps": 10_000,
            "batch_size": 128,
            "learning_rate": 0.001,
            "patience": 1000,
            "gradient_clip": 5.0,
        },
        "training": {"learning_rate": 0.1, "batch_size": 64, "epochs": 40},
    },
    assumptions=_because(
        count="not checked against the paper",
        task__public="training images without labels; the paper's are CIFAR-100's",
        task__alpha="one of the skews that are compared",
        training__learning_rate="not checked against the paper",
        training__batch_size="not checked against the paper",
        training__epochs="not checked against the paper",
        task__network="LeNet-5; the paper has residual networks",
    ),
)

_PRESETS = {each.name: each for each in (_DC, _FEDCONCAT, _FEDDF, _FEDDIVERSE, _FEDENTOPT, _FLASH)}


def preset_names() -> list[str]:
    """Names of all presets."""
    return sorted(_PRESETS)


def preset_named(name: str) -> Preset:
    """A preset. Raises ConfigurationError, listing what there is."""
    preset = _PRESETS.get(name)
    if preset is None:
        raise ConfigurationError(
            f"there is no preset '{name}'; there are: {', '.join(preset_names())}", name=name
        )
    return preset


def preset_run_file(preset: Preset) -> str:
    """The run file of a preset, with what is ours marked by its reason."""
    document = tomlkit.document()
    document.add(tomlkit.comment(preset.paper))
    if preset.disclosure:
        allowed = tomlkit.dumps(preset.disclosure).strip().replace("\n", ", ")
        document.add(tomlkit.comment(f"Hosts must allow, in [disclosure]: {allowed}"))
    reasons = {each.key: each.reason for each in preset.assumptions}
    for key, value in preset.run.items():
        if not isinstance(value, Mapping):
            _add(document, key, value, reasons.pop(key, None))
    for key, table in preset.run.items():
        if isinstance(table, Mapping):
            inner = tomlkit.table()
            for name, value in table.items():
                _add(inner, name, value, reasons.pop(f"{key}.{name}", None))
            for name in [name for name in reasons if name.startswith(f"{key}.")]:
                ours = f"{name.partition('.')[2]}: ours: {reasons.pop(name)}"
                inner.add(tomlkit.comment(ours))
            document.add(key, inner)
    return tomlkit.dumps(document)


def _add(table: Any, key: str, value: Any, reason: str | None) -> None:
    table.add(key, value)
    if reason is not None:
        table[key].comment(f"ours: {reason}")
