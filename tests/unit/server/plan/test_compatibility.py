"""Compatible and incompatible settings in a run file, checked before any training."""

from __future__ import annotations

import pytest

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.plugins import OBJECTIVES, STRATEGIES, create, installed
from potluck.server.plan.plan import draw_up
from potluck.server.strategy import Strategy

TASK = '[task]\nname = "digits"\nclients = 6\n'


def test_every_strategy_except_fedbio_works_with_every_objective() -> None:
    for strategy in installed(STRATEGIES):
        for objective in installed(OBJECTIVES):
            text = f'{TASK}[strategy]\nname = "{strategy}"\n[objective]\nname = "{objective}"\n'
            if strategy == "fedbio" and objective != "cross-entropy":
                with pytest.raises(
                    ConfigurationError, match=f"and objective {objective} are not compatible"
                ):
                    draw_up(text, source="run file")
            else:
                assert not draw_up(text, source="run file").remarks


DRAWN = f'{TASK}[selector]\nname = "clustered-sampling"\nunbiased = true\n'


def test_selector_weights_are_refused_with_strategies_that_do_not_weight_by_samples() -> None:
    refused = {name for name in installed(STRATEGIES) if not create(Strategy, name, {}).by_samples}
    for strategy in installed(STRATEGIES):
        text = f'{DRAWN}[strategy]\nname = "{strategy}"\n'
        if strategy not in refused:
            draw_up(text, source="run file")
            continue
        with pytest.raises(ConfigurationError) as refusal:
            draw_up(text, source="run file")
        assert refusal.value.message == (
            f"run file: selector clustered-sampling and strategy {strategy} are not compatible: "
            f"clustered-sampling sets the weight of each update, and {strategy} ignores "
            "these weights; choose another strategy (fedavg, fedadam, fednova, …), or other "
            "options of clustered-sampling"
        )
    assert refused >= {"median", "trimmed-mean", "fedatt", "scaffold"}
    assert not refused & {"fedavg", "fedavgm", "fedadam", "fednova", "clipped-mean"}
    draw_up(f'{DRAWN}[strategy]\nname = "scaffold"\nweights = "samples"\n', source="run file")


@pytest.mark.parametrize(
    ("selector", "most"),
    [
        ('name = "fedcor"', 10_000),
        ('name = "divfl"', 3_000),
        ('name = "fedgs"', 1_000),
        ('name = "hics-fl"', 3_000),
        ('name = "clustered-sampling"\nby = "updates"', 3_000),
        ('name = "clustered-sampling"', None),
    ],
)
def test_roster_above_the_selector_maximum_is_refused_before_the_run(
    selector: str, most: int | None
) -> None:
    def text(roster: int) -> str:
        task = f'[task]\nname = "digits"\nclients = {roster}\n'
        return f"expected_clients = {roster}\n{task}[selector]\n{selector}\n"

    draw_up(text(most or 100_000), source="run file")
    if most is not None:
        with pytest.raises(
            ConfigurationError, match=f"up to {most:,} clients, but 'expected_clients' is"
        ):
            draw_up(text(most + 1), source="run file")


PYRAMID = f'{TASK}[selector]\nname = "pyramidfl"\n'


def test_partial_updates_are_refused_with_strategies_that_do_more_than_average() -> None:
    for strategy in installed(STRATEGIES):
        text = f'{PYRAMID}drop = true\n[strategy]\nname = "{strategy}"\n'
        made = create(Strategy, strategy, {})
        if not (made.individual or made.trains or made.auxiliary):
            draw_up(text, source="run file")
            continue
        with pytest.raises(ConfigurationError) as refusal:
            draw_up(text, source="run file")
        assert refusal.value.message == (
            f"run file: selector pyramidfl and strategy {strategy} are not compatible: pyramidfl "
            f"has clients omit tensors from their updates, and {strategy} needs whole updates; "
            "choose another strategy (fedavg, fedadam, fednova, …), or other options of pyramidfl"
        )
    for encoding in ("int8", "bfloat16"):
        draw_up(
            f'{PYRAMID}drop = true\n[transport.up]\nencoding = "{encoding}"\ndelta = true\n',
            source="run file",
        )


def test_passes_per_client_are_refused_with_a_fixed_number_of_steps() -> None:
    steps = "[training]\nsteps = 3\n"
    draw_up(f"{PYRAMID}{steps}", source="run file")
    with pytest.raises(ConfigurationError, match=r"training.steps = 3 counts steps; set training"):
        draw_up(f"{PYRAMID}prolong = true\n{steps}", source="run file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[strategy]\nname = "scaffold"\nstep = "fednova"\n',
            "strategies scaffold and fednova are not compatible: FedNova rescales",
        ),
        (
            '[strategy]\nname = "scaffold"\n[training]\noptimizer = "adam"\n',
            "run file: strategy scaffold and optimizer adam are not compatible: control variates",
        ),
        (
            '[strategy]\nname = "fedavgm"\nmomentum = 1.0\n',
            "strategy fedavgm: option 'momentum' is 1.0; it must be less than 1",
        ),
        (
            '[objective]\nname = "fedprox"\nmu = -1\n',
            "run file: objective fedprox: option 'mu' is -1; it must be greater than or equal to 0",
        ),
        ('[objective]\nname = "fedprox"\nnu = 1\n', "its options: mu"),
        (
            '[objective]\nname = "fedpox"\n',
            r"'fedpox' is not installed \(did you mean 'fedprox'\?\); installed: balanced",
        ),
        ('[strategy]\nname = "fedsgd"\n', "'fedsgd' is not installed; installed: bulyan"),
        (
            '[model]\nkeep = ["3.*"]\n[strategy]\nname = "feddf"\n',
            "strategy feddf trains on the coordinator, which has no whole model where clients",
        ),
        (
            '[model]\nkeep = ["3.*"]\n[selector]\nname = "feddiverse"\n',
            "needs triplets, which clients estimate by training all of the model",
        ),
        (
            '[model]\nkeep = ["3.*"]\n[selector]\nname = "hics-fl"\n',
            "'hics-fl' needs the updates' changes of the output layer, which may be among",
        ),
        (
            '[model]\nkeep = ["3.*"]\n[strategy]\nname = "rhfl-logits"\n',
            "strategy rhfl-logits trains on the coordinator, which has no whole model where",
        ),
        (
            '[strategy]\nname = "rhfl-logits"\nclients = 8\n',
            "supports up to 8 clients with these options, but 'clients_per_round' is 9",
        ),
        (
            '[strategy]\nname = "rhfl-logits"\nclients = 65\n',
            "option 'clients' is 65; it must be less than or equal to 64",
        ),
        (
            '[selector]\nname = "divfl"\nweighted = true\n[strategy]\nname = "rhfl-logits"\n',
            "selector divfl and strategy rhfl-logits are not compatible",
        ),
        (
            '[selector]\nname = "pyramidfl"\ndrop = true\n[strategy]\nname = "rhfl-logits"\n',
            "selector pyramidfl and strategy rhfl-logits are not compatible",
        ),
        (
            '[strategy]\nname = "scaffold"\nstep = "rhfl-logits"\n',
            "strategies scaffold and rhfl-logits are not compatible: the clients of rhfl-logits",
        ),
        (
            '[host_sums]\nenabled = true\n[strategy]\nname = "rhfl-logits"\n',
            "strategy rhfl-logits and host_sums are not compatible",
        ),
        ("[training]\nkept_epochs = 2\n", "kept_epochs is 2, but clients keep no tensors; list"),
        (
            '[model]\nname = "os:system"\n',
            "`model_modules` of this machine's configuration does not list",
        ),
        (
            '[model]\nname = "lenet7"\n',
            r"'lenet7' is not installed \(did you mean 'lenet5'\?\); installed: conc",
        ),
        ("[training]\nmomentum = 1.0\n", "'momentum': must be less than 1"),
    ],
)
def test_incompatible_plugins_and_settings_are_refused_before_the_run(
    text: str, message: str
) -> None:
    with pytest.raises((ConfigurationError, PluginError), match=message):
        draw_up(TASK + text, source="run file")


def test_fednova_with_adam_is_accepted_with_a_remark() -> None:
    text = f'{TASK}[strategy]\nname = "fednova"\n[training]\noptimizer = "adam"\n'
    [remark] = draw_up(text, source="run file").remarks
    assert "normalised by their number of steps" in remark


def test_run_whose_clients_keep_tensors_is_evaluated_on_the_clients() -> None:
    text = f'{TASK}[model]\nkeep = ["3.*"]\n'
    plan = draw_up(text, source="run file")
    [remark] = plan.remarks
    assert remark.startswith("[model] keep: clients measure the model, with what they keep")
    assert plan.kept == ["model"]
    scaffold = draw_up(f'{text}[strategy]\nname = "scaffold"\n', source="run file")
    assert scaffold.kept == ["correction", "model"]
    unmeasured = draw_up(f"{text}[evaluation]\nevery = 0\n", source="run file")
    assert list(unmeasured.remarks) == []


def test_model_of_the_run_file_replaces_the_model_of_the_task() -> None:
    text = f'{TASK}[model]\nname = "perceptron"\ninputs = 64\nclasses = 10\nhidden = [32]\n'
    plan = draw_up(text, source="run file")
    shapes = [tuple(parameter.shape) for parameter in plan.task.model().parameters()]
    assert shapes == [(32, 64), (32,), (10, 32), (10,)]
    assert plan.training.momentum == 0.9, "what the task recommends holds with any model"


@pytest.mark.parametrize("name", installed(STRATEGIES))
def test_secure_aggregation_is_refused_with_strategies_that_need_single_updates(name: str) -> None:
    text = f'secure_aggregation = true\nclients_per_round = 6\n{TASK}[strategy]\nname = "{name}"\n'
    correction = create(Strategy, name, {}).correction
    if name in (
        "fedatt",
        "median",
        "trimmed-mean",
        "clipped-mean",
        "krum",
        "multi-krum",
        "bulyan",
        "fltrust",
        "mifa",
        "fedawe",
        "lora-stacking",
        "feddf",
        "rhfl",
        "rhfl-logits",
        "fedconcat",
    ):
        with pytest.raises(ConfigurationError, match=f"{name} and secure aggregation are not"):
            draw_up(text, source="run file")
    elif correction is not None and correction.keeps:
        with pytest.raises(ConfigurationError, match=f"{name} is not compatible with secure"):
            draw_up(text, source="run file")
    else:
        draw_up(text, source="run file")


STEPWISE = '[profiles]\ndisclosure = "unsafe-stepwise"\n'


def test_protocol_steps_are_accepted_only_for_selectors_that_support_them() -> None:
    text = f'clients_per_round = 12\n{TASK}[selector]\nname = "dc-balanced"\n{STEPWISE}'
    plan = draw_up(text, source="run file")
    assert not plan.selector.needs_profiles
    assert any("a client that always reports 0 is always selected" in each for each in plan.remarks)
    with pytest.raises(
        ConfigurationError, match="selector fedentopt has no step-by-step procedure"
    ):
        draw_up(text.replace("dc-balanced", "fedentopt"), source="run file")
    with pytest.raises(ConfigurationError, match="4 of 9 clients are drawn at random"):
        draw_up(text.replace("clients_per_round = 12", "clients_per_round = 9"), source="run file")
