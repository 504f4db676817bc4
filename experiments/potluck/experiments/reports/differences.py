"""Differences between the arms of a contest and its baseline, with their significance.

Pure: takes contests; returns paired tests with Holm's correction, and tables of them in Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.experiments.grid.definition import Reading
from potluck.experiments.reports.contests import BEST, EQUAL, LAST, Contest, measures_of, together
from potluck.experiments.reports.experiment_summary import PairedTest, paired_test
from potluck.experiments.reports.ranks import LEVEL, holm
from potluck.experiments.reports.readings import MEASURES
from potluck.experiments.reports.tables import line, rule

_NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between an arm and the baseline, by seed.

    p: p value, with Holm's correction for all arms of the contest; None if no test is possible.
    partial: True if the difference includes a partial evaluation.
    """

    test: PairedTest
    p: float | None
    partial: bool = False

    @property
    def told_apart(self) -> bool:
        """True if the corrected p is below 5 %."""
        return self.p is not None and self.p < LEVEL


def baseline_of(reading: Reading) -> str | None:
    """Return the arm with which a contest's other arms are compared; None if none is named."""
    if reading.compared is None or set(reading.baseline) != {reading.compared}:
        return None
    return reading.baseline[reading.compared]


def differences(
    contest: Contest, baseline: str | None, measure: str, reading: str
) -> dict[str, Difference]:
    """Return each arm's difference to the baseline; empty if the contest lacks the baseline."""
    values = {arm.name: arm.readings.get((measure, reading), {}) for arm in contest.arms}
    if baseline is None or baseline not in values:
        return {}
    tests = {
        name: test
        for name, of in values.items()
        if name != baseline and (test := paired_test(of, values[baseline])) is not None
    }
    corrected = holm({name: test.p for name, test in tests.items()})
    partial = {arm.name for arm in contest.arms if (measure, reading) in arm.partial}
    return {
        name: Difference(
            test=test, p=corrected.get(name), partial=not partial.isdisjoint({name, baseline})
        )
        for name, test in tests.items()
    }


def difference_table(
    reading: Reading, contests: Sequence[Contest], measure: str, name: str
) -> list[str]:
    """Return a table of mean differences to the baseline with 95 % intervals.

    It has a row for each arm, a column for each contest and one for all contests together.
    Significant differences are bold. name: name of the reading. The table is empty if there is no
    baseline.
    """
    base = baseline_of(reading)
    columns = {each.column: differences(each, base, measure, name) for each in with_all(contests)}
    return table_of(reading.compared or "", columns)


def table_of(head: str, columns: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    """Return a table of differences with 95 % intervals: a row for each arm, and these columns by
    title. Empty without arms. head: title of the arms."""
    arms = list(dict.fromkeys(arm for column in columns.values() for arm in column))
    if not arms:
        return []
    rows = [[arm, *(_entry(column.get(arm)) for column in columns.values())] for arm in arms]
    return [line([head, *columns]), rule(1, len(columns)), *(line(row) for row in rows)]


def told_apart_table(reading: Reading, contests: Sequence[Contest]) -> list[str]:
    """Return a table with the numbers of arms significantly better and worse than the baseline.

    It has a row for each metric and reading, a column for each contest and one for all contests
    together. The table is empty if there is no baseline.
    """
    contests = with_all(contests)
    base = baseline_of(reading)
    rows: list[list[str]] = []
    for measure in measures_of(reading):
        for name in dict.fromkeys(of for each in contests for of in _readings(each, measure)):
            found = [differences(contest, base, measure, name) for contest in contests]
            if any(found):
                counts = [_counts(each, lower=measure == "loss") for each in found]
                rows.append([f"{MEASURES[measure]}, {name}", *counts])
    if not rows:
        return []
    heads = ["significantly different", *(contest.column for contest in contests)]
    return [line(heads), rule(1, len(contests)), *(line(row) for row in rows)]


def with_all(contests: Sequence[Contest]) -> list[Contest]:
    """Return the contests, followed by all of them combined if there are several."""
    whole = together(contests)
    return list(contests) if whole is None else [*contests, whole]


def _readings(contest: Contest, measure: str) -> list[str]:
    """Return the readings at which a metric is known, except the reading at the best rounds.

    The one at equal numbers of rounds is also omitted if its numbers equal those of `last`.
    """
    return [
        name
        for arm in contest.arms
        for (of, name), values in arm.readings.items()
        if of == measure
        and name != BEST
        and not all(map(math.isnan, values.values()))
        and (name != EQUAL + "rounds" or values != arm.readings[measure, LAST])
    ]


def _entry(found: Difference | None) -> str:
    if found is None or math.isnan(found.test.difference):
        return _NONE
    text = f"{found.test.difference:+.3f}"
    if found.test.low is not None and found.test.high is not None:
        text += f" [{found.test.low:+.3f}, {found.test.high:+.3f}]"
    text += " (partial)" * found.partial
    return f"**{text}**" if found.told_apart else text


def _counts(found: Mapping[str, Difference], *, lower: bool) -> str:
    """Return the numbers of better and worse arms as text. lower: True if less is better."""
    told = [each.test.difference for each in found.values() if each.told_apart]
    better = sum(difference < 0 if lower else difference > 0 for difference in told)
    return f"{better} better, {len(told) - better} worse" if told else "none"
