"""Markdown tables that compare arms: results at equal budgets, selected clients, mean ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from potluck.deploy.view.readable import readable_bytes, readable_count, readable_seconds
from potluck.experiments.reports.contests import (
    BEST,
    EQUAL,
    LAST,
    Competitor,
    Contest,
    RankedReading,
    measures_of,
)
from potluck.experiments.reports.differences import difference_table, told_apart_table
from potluck.experiments.reports.experiment_summary import Summary
from potluck.experiments.reports.ranks import Ranks
from potluck.experiments.reports.readings import BUDGETS, MEASURES, deviation, mean
from potluck.experiments.reports.tables import line, ranked, rule

_NONE = "–"


def contest_table(summary: Summary, contest: Contest) -> list[str]:
    """Return a table with one row per arm: last and best metrics, and those at equal budgets."""
    axis = summary.experiment.reading.compared or ""
    columns: list[tuple[str, str, str]] = []
    for measure in measures_of(summary.experiment.reading):
        found = {reading for arm in contest.arms for reading in _known(arm, measure)}
        if LAST not in found:
            continue
        columns.append((measure, LAST, MEASURES[measure]))
        if measure == summary.experiment.reading.metric:
            columns.append((measure, BEST, "best (round)"))
        for name in BUDGETS:
            reading = EQUAL + name
            if reading in contest.budgets and (name != "rounds" or _uneven(contest, measure)):
                head = f"{MEASURES[measure]} at {_budget(name, contest.budgets[reading])}"
                columns.append((measure, reading, head))
    marks = [
        ranked([_mean(arm, measure, reading) for arm in contest.arms], lower=measure == "loss")
        for measure, reading, _ in columns
    ]
    lines = [line([axis, *(head for _, _, head in columns)]), rule(1, len(columns))]
    for arm in contest.arms:
        entries = [
            mark(_mean(arm, measure, reading), _value(arm, measure, reading))
            for mark, (measure, reading, _) in zip(marks, columns, strict=True)
        ]
        lines.append(line([arm.name, *entries]))
    return lines


def picks_table(summary: Summary, contest: Contest) -> list[str]:
    """Return a table with one row per arm: evenness of its picks, and their correlations.

    Correlations are between picks and the clients' traits.
    """
    axis = summary.experiment.reading.compared or ""
    traits = list(dict.fromkeys(trait for arm in contest.arms for trait in arm.leanings))
    heads = [axis, "evenness", "never picked", "most picked", *(f"{each}" for each in traits)]
    lines = [line(heads), rule(1, len(heads) - 1)]
    for arm in contest.arms:
        lines.append(
            line(
                [
                    arm.name,
                    f"{mean([each.evenness for each in arm.picks]):.2f}",
                    f"{mean([each.never for each in arm.picks]):.0%}",
                    f"{mean([each.most for each in arm.picks]):.0%}",
                    *(_leaning(arm, trait) for trait in traits),
                ]
            )
        )
    return lines


def rank_table(ranked_by: Sequence[RankedReading], axis: str, *, by_contest: bool) -> list[str]:
    """Return a table with one row per arm, sorted by the first reading, and final rows of tests.

    The last rows are the critical differences and Friedman's tests.
    """
    chosen = [(each, each.by_contest if by_contest else each.by_cell) for each in ranked_by]
    if not chosen:
        return []
    heads = [f"{MEASURES[each.measure]}, {each.reading}" for each, _ in chosen]
    lines = [line([axis, *heads]), rule(1, len(heads))]
    for arm in chosen[0][1].means:
        lines.append(line([arm, *(_rank(ranks, arm) for _, ranks in chosen)]))
    for name, entries in (
        ("critical difference", [_number(ranks.difference, "{:.2f}") for _, ranks in chosen]),
        ("Friedman's p", [_number(ranks.p, "{:.2g}") for _, ranks in chosen]),
        ("comparisons", [str(ranks.blocks) for _, ranks in chosen]),
    ):
        lines.append(line([name, *entries]))
    return lines


def contest_notes() -> Iterator[str]:
    """Yield the notes that a reader needs to judge these tables."""
    yield (
        "`best` is the best evaluation, chosen by the test samples: more than a run would give "
        "that had to choose by itself."
    )
    yield (
        "`(partial)` marks readings with a partial evaluation in one seed or more, and differences "
        "of such readings; mean ranks and tests use them like any other. `best` has none."
    )
    yield (
        "At equal bytes and at equal simulated seconds each run is read as if it had stopped when "
        "the cheapest arm of its seed was done, by the evaluations that it had until then; or when "
        "every arm had had one, where that was later. Bytes "
        "are counted as if each client were a machine of its own: a model for each client that "
        "trains or answers, what the strategy sends beside it, and the updates. Pre-training "
        "counts, in bytes and in seconds. Answers do not count, and neither do abandoned attempts "
        "at a round; answering takes no simulated time."
    )
    yield (
        "Evenness is 1 less the Gini coefficient of the clients' numbers of picks: 1 where all "
        "have the same. Beside each trait of the clients: Spearman's correlation of picks and the "
        "trait, and in brackets its mean over picks and over clients. A selector that has learnt "
        "to avoid wrong labels has a correlation below 0 there."
    )
    yield (
        "An arm differs significantly from the baseline of its contest if p is below 5 % in a "
        "paired t test over seeds, corrected by Holm for all arms of that contest; each reading "
        "is a family of tests. `all settings` compares the means over all settings, by "
        "seed; it holds for these settings, not for others. Intervals are 95 % each, uncorrected."
    )
    yield (
        "Mean ranks: 1 is the best; an arm without an evaluation by then is last. Arms whose mean "
        "ranks differ by less than the critical difference (Nemenyi, 5 %) from the best are bold: "
        "they do not differ from it significantly. If Friedman's p is above 5 %, no arms differ. "
        "Each column is tested by itself, without a correction for the number of columns. "
        "Seeds of one setting are not independent data sets. So the table over all cells finds "
        "more differences than it should; the one over settings is the careful one."
    )


def _known(arm: Competitor, measure: str) -> list[str]:
    return [
        reading
        for (of, reading), values in arm.readings.items()
        if of == measure and not all(math.isnan(value) for value in values.values())
    ]


def _uneven(contest: Contest, measure: str) -> bool:
    """Return True if arms had different numbers of rounds, so that their last rounds differ."""
    return any(
        arm.readings[measure, EQUAL + "rounds"] != arm.readings[measure, LAST]
        for arm in contest.arms
    )


def _mean(arm: Competitor, measure: str, reading: str) -> float:
    return mean(list(arm.readings.get((measure, reading), {}).values()))


def _value(arm: Competitor, measure: str, reading: str) -> str:
    values = list(arm.readings.get((measure, reading), {}).values())
    if not values or math.isnan(mean(values)):
        return _NONE
    spread = deviation(values)
    text = f"{mean(values):.4f}" + ("" if spread is None else f" ± {spread:.4f}")
    if reading == BEST:
        text += f" ({arm.best_round:.4g})"
    return text + " (partial)" * ((measure, reading) in arm.partial)


def _budget(name: str, amount: float) -> str:
    if name == "bytes":
        return readable_bytes(amount)
    if name == "rounds":
        return f"{amount:.4g} rounds"
    return f"{readable_seconds(amount)} simulated"


def _leaning(arm: Competitor, trait: str) -> str:
    of = arm.leanings.get(trait)
    if not of:
        return _NONE
    correlation = mean([each.correlation for each in of])
    picked, everybody = mean([each.picked for each in of]), mean([each.all for each in of])
    return f"{correlation:+.2f} ({picked:.3g} of {everybody:.3g})"


def _rank(ranks: Ranks, arm: str) -> str:
    if arm not in ranks.means:
        return _NONE
    text = f"{ranks.means[arm]:.2f}"
    return f"**{text}**" if arm in ranks.best else text


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def contest_sections(
    summary: Summary, contests: Sequence[Contest], ranked_by: Sequence[RankedReading]
) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, table) of each section on the contests."""
    axis = summary.experiment.reading.compared or ""
    if ranked_by and len(contests) > 1:
        settings = readable_count(len(contests), "setting")
        yield f"Mean ranks over {settings}", rank_table(ranked_by, axis, by_contest=True)
    if ranked_by:
        yield "Mean ranks over all cells", rank_table(ranked_by, axis, by_contest=False)
    reading = summary.experiment.reading
    told = told_apart_table(reading, contests)
    if told:
        yield "Significantly different from the baseline", told
        for name in dict.fromkeys([LAST, *(EQUAL + each for each in BUDGETS if each != "rounds")]):
            lines = difference_table(reading, contests, reading.metric, name)
            if lines:
                yield f"Against the baseline: {MEASURES[reading.metric]}, {name}", lines
    for contest in contests:
        yield contest.title or "Readings", contest_table(summary, contest)
        yield (
            f"{contest.title}: whom they pick" if contest.title else "Whom they pick",
            picks_table(summary, contest),
        )
