"""Allowed values of `[stop]` and `retention.keep_best`, and their effect on a run."""

from __future__ import annotations

import pytest

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import example_run_file
from potluck.server.clock import utc
from potluck.server.plan.plan import draw_up
from potluck.server.plan.pretraining import pretraining_run

DIGITS = 'rounds = 20\n[task]\nname = "digits"\n'
COLORED = 'rounds = 20\n[task]\nname = "colored-digits"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[stop]\nmeasure = "accuracy"', "neither `patience` nor `target` is set"),
        ("[stop]\npatience = 3", "'stop.measure' is missing"),
        ('[stop]\nmeasure = "accuracy"\npatience = 0', "'stop.patience'"),
        ('[stop]\nmeasure = "accuracy"\npatience = 1.5', "'stop.patience'"),
        ('[stop]\nmeasure = "loss"\ntarget = 0.1\nminimum_delta = 0.1', "needs `patience`"),
        ('[stop]\nmeasure = "loss"\npatience = 1\nminimum_delta = -1', "'stop.minimum_delta'"),
        ('[stop]\nmeasure = "loss"\npatience = 1\ndelta = 1', "unknown key 'stop.delta'"),
        ('[stop]\nmeasure = "acuracy"\npatience = 1', r"did you mean 'accuracy'\?"),
        ('[stop]\nmeasure = "recall"\npatience = 1', "it measures: loss, accuracy, weighted_f1"),
        ('[stop]\nmeasure = "worst_group_accuracy"\npatience = 1', "the task has no groups"),
        ('[stop]\nmeasure = "personal_loss"\npatience = 1', 'needs personal.method = "ditto"'),
        ('[stop]\nmeasure = "tuned_loss"\npatience = 1', "needs evaluation.fine_tune_epochs"),
        ('[stop]\nmeasure = "training_loss"\npatience = 1', "needs an evaluation.every"),
        ('[stop]\nmeasure = "accuracy"\ntarget = 95', "accuracy is always from 0 to 1"),
        (
            '[evaluation]\nevery = 0\n[stop]\nmeasure = "loss"\npatience = 1',
            "evaluation.every = 0 no model is evaluated; set evaluation.every = 1",
        ),
        (
            '[evaluation]\nevery = 0\n[retention]\nkeep_best = "loss"',
            "'retention.keep_best' is 'loss', but with evaluation.every = 0",
        ),
        (
            '[stop]\nmeasure = "loss"\npatience = 1\n[retention]\nkeep_best = "accuracy"',
            "a run can follow only one measure: remove retention.keep_best",
        ),
    ],
)
def test_stop_rule_without_an_effect_is_refused_with_the_remedy(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        draw_up(DIGITS + text, source="test")


def test_stop_rule_direction_is_that_of_its_metric() -> None:
    def higher_is_better(text: str, task: str = DIGITS) -> bool:
        rule = draw_up(task + text, source="test").stop_rule
        assert rule is not None
        return rule.higher_is_better

    assert higher_is_better('[retention]\nkeep_best = "accuracy"')
    assert not higher_is_better('[retention]\nkeep_best = "loss"')
    assert higher_is_better('[stop]\nmeasure = "worst_group_accuracy"\ntarget = 0.9', COLORED)
    trained = '[evaluation]\nevery = 0\n[stop]\nmeasure = "training_loss"\npatience = 2'
    assert not higher_is_better(trained)
    tuned = '[evaluation]\nfine_tune_epochs = 1\n[stop]\nmeasure = "tuned_loss"\npatience = 2'
    assert not higher_is_better(tuned)


def test_run_without_stop_and_keep_best_has_no_stop_rule() -> None:
    assert draw_up(DIGITS, source="test").stop_rule is None
    assert draw_up(example_run_file(), source="test").stop_rule is None


def test_stop_rule_ignores_the_first_phase_of_fedconcat() -> None:
    text = DIGITS + (
        'clients = 6\n[strategy]\nname = "fedconcat"\ngroups = 2\nrounds = {}\n'
        '[model]\nname = "concatenation"\ngroups = 2\nof = {{ name = "mnist-cnn" }}\n'
        '[stop]\nmeasure = "loss"\npatience = 2\n'
    )
    rule = draw_up(text.format(15), source="test").stop_rule
    assert rule is not None
    assert rule.opening == 15
    with pytest.raises(ConfigurationError, match="the first 20 rounds don't count for"):
        draw_up(text.format(20), source="test")


def test_plan_remarks_what_the_best_model_does_not_contain() -> None:
    best = '[retention]\nkeep_best = "accuracy"\n'
    assert not draw_up(DIGITS + best, source="test").remarks
    kept = draw_up(DIGITS + best + '[model]\nkeep = ["3.*"]\n', source="test").remarks
    assert any("without the tensors that clients keep" in each for each in kept)
    own = '[personal]\nmethod = "ditto"\n[retention]\nkeep_best = "personal_accuracy"\n'
    [said] = draw_up(DIGITS + own, source="test").remarks
    assert "measures the clients' own models" in said


def test_pretraining_run_has_no_stop_rule() -> None:
    plan = draw_up(COLORED + '[stop]\nmeasure = "accuracy"\npatience = 1\n', source="test")
    before = pretraining_run("ab", plan.run_file, clients=4, at=utc())
    assert draw_up(before.run_file, source="pre-training").stop_rule is None
