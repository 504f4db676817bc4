"""The leaderboard of a tier as Markdown: ranks, differences, costs to the target. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from potluck.deploy.view.readable import readable_bytes, readable_count, readable_seconds
from potluck.experiments.benchmark.standing import ArmResult
from potluck.experiments.benchmark.tier import Choice, Tier
from potluck.experiments.reports.contests import LAST, Competitor, Contest
from potluck.experiments.reports.differences import Difference, differences, table_of, with_all
from potluck.experiments.reports.ranks import Ranks, mean_ranks
from potluck.experiments.reports.readings import mean
from potluck.experiments.reports.tables import line, rule

RESOURCES: Mapping[str, str] = {
    "rounds": "rounds",
    "bytes": "bytes",
    "seconds": "seconds",
    "client_seconds": "client-seconds",
}
"""Title of each resource that arms spend until the target."""
WORST_RATIO = 4.0
"""Maximum cost, as a multiple of the best arm's, for which an arm has a score in a workload."""
_RATIOS = (1.0, 1.5, 2.0, WORST_RATIO)
_METRIC = "accuracy"
_NONE = "–"
_DIFFERENCES = (
    "Accuracy minus that of `{baseline}`, with 95 % intervals; bold is significant (paired t test "
    "over seeds, Holm's correction for all arms of a column). `all settings` is the mean over the "
    "ranked workloads:"
)
_CHANGES = (
    "Change of accuracy in the harder variants, of arms that change, with 95 % intervals; bold is "
    "significant (as above):"
)
_UNCHANGED = "unchanged"
_TUNED = "Settings that the tuning chose, by workload:"
_PROFILE = (
    "Performance profile by rounds: share of the workloads in which an arm reaches the target with "
    "at most this multiple of the best arm's rounds:"
)


def comparable(results: Sequence[ArmResult], baseline: ArmResult) -> list[ArmResult]:
    """Return the results with the baseline's data, training settings and targets."""
    return [
        each
        for each in results
        if each.data == baseline.data
        and each.training == baseline.training
        and each.targets == baseline.targets
    ]


def leaderboard(tier: Tier, results: Sequence[ArmResult], *, marked: str | None = None) -> str:
    """Return the tables of a tier. results: comparable, at least one. marked: arm to highlight."""
    ranks = _ranks(tier, results)
    order = {name: place for place, name in enumerate(ranks.means)} if ranks else {}
    ordered = sorted(results, key=lambda each: order.get(each.arm, len(order)))
    parts = [
        "\n".join(_standings(tier, ordered, ranks)),
        _rank_note(tier, ranks),
        *_tuning_table(tier, ordered),
        _DIFFERENCES.format(baseline=tier.baseline),
        "\n".join(table_of("arm", _differences(tier, ordered))),
        *_change_table(tier, ordered),
        "Median cost to the target, as rounds · bytes · simulated time · time of all clients:",
        "\n".join(_cost_table(tier, ordered)),
        _PROFILE,
        "\n".join(_profile_table(tier, ordered)),
    ]
    text = "\n\n".join(each for each in parts if each) + "\n"
    if marked is None:
        return text
    return re.sub(rf"(?m)^\| ({re.escape(marked)}(?: \([^|]*\))?) \|", r"| **\1** |", text)


def tuning_note(tier: Tier, result: ArmResult) -> str:
    """Return which settings of an arm were tried, and which were best in each ranked workload."""
    if len(result.tried) == 1:
        return f"{result.arm} was not tuned, since it has no grid."
    return (
        f"{result.arm} was tuned with {readable_count(len(result.tried), 'setting')}: "
        f"{'; '.join(map(_setting, result.tried))}. Best: {_chosen(tier, result)}."
    )


def _tuning_table(tier: Tier, results: Sequence[ArmResult]) -> list[str]:
    """Return a table of the tuned arms with its caption; nothing if no arm was tuned."""
    tuned = [each for each in results if len(each.tried) > 1]
    if not tuned:
        return []
    lines = [line(["arm", "own options", "best"]), "| --- | --- | --- |"]
    lines += [line([each.arm, _own(each), _chosen(tier, each)]) for each in tuned]
    return [_TUNED, "\n".join(lines)]


def _own(result: ArmResult) -> str:
    return ", ".join(f"{key} = {value}" for key, value in result.options.items()) or "defaults"


def _chosen(tier: Tier, result: ArmResult) -> str:
    """Return the best settings of an arm, each with the ranked workloads in which it was best."""
    chosen = result.training if result.arm == tier.baseline else result.tuned
    best: dict[str, list[str]] = {}
    for workload in tier.ranked:
        best.setdefault(_setting(chosen.get(workload, {})), []).append(workload)
    if len(best) == 1:
        return f"{next(iter(best))} in all"
    return "; ".join(f"{setting} in {', '.join(of)}" for setting, of in best.items())


def _setting(choice: Choice) -> str:
    """Return changed options as text."""
    changed = (f"{key.rpartition('.')[2]} = {value}" for key, value in choice.items())
    return ", ".join(changed) or "its own options"


# The main table -----------------------------------------------------------------------------------


def _standings(tier: Tier, results: Sequence[ArmResult], ranks: Ranks | None) -> list[str]:
    harder = list(_harder(tier))
    heads = ["arm", "mean rank", "accuracy", f"minus {tier.baseline}"]
    heads += [
        *RESOURCES.values(),
        *harder,
        "settings tried",
        "ε of profiles",
        "seconds to select",
        "learns about clients",
    ]
    whole = with_all(_contests(tier, results))[-1]
    found = differences(whole, tier.baseline, _METRIC, LAST)
    scores = {each: profile_scores(tier, results, each) for each in RESOURCES}
    lines = [line(heads), line(["---"] + ["---:"] * (len(heads) - 2) + ["---"])]
    for result in results:
        name = result.arm
        difference = found.get(name)
        lines.append(
            line(
                [
                    name if result.package is None else f"{name} ({result.package})",
                    _NONE if ranks is None else f"{ranks.means[name]:.2f}",
                    f"{_accuracy(result, tier.ranked):.3f}",
                    _NONE if difference is None else f"{difference.test.difference:+.3f}",
                    *(_share(scores[each][name]) for each in RESOURCES),
                    *(_loss(tier, result, each) for each in harder),
                    str(len(result.tried)),
                    _epsilon(result),
                    _seconds(result.server_seconds),
                    learned(result),
                ]
            )
        )
    return lines


def learned(result: ArmResult) -> str:
    """Return the data about clients that a selector uses, as text."""
    parts = [f"{kind}: {', '.join(of)}" for kind, of in result.learns.items()]
    return "; ".join(parts) or "nothing"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2g}" if value >= 0.001 else "< 0.001"


def _epsilon(result: ArmResult) -> str:
    """Return the largest privacy loss by profiles; a dash if the selector needs no profiles."""
    known = [each for each in result.epsilon.values() if each is not None]
    if not known:
        return "exact"
    return f"{max(known):g}" if max(known) > 0 else _NONE


def _loss(tier: Tier, result: ArmResult, workload: str) -> str:
    """Return the change of accuracy in a harder variant; a dash if no seed changes."""
    easier = tier.workloads[workload].harder or workload
    if result.values(workload) == result.values(easier):
        return _NONE
    return f"{_accuracy(result, [workload]) - _accuracy(result, [easier]):+.3f}"


def _accuracy(result: ArmResult, workloads: Sequence[str]) -> float:
    return mean([mean(list(result.values(each).values())) for each in workloads])


def _share(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.2f}"


# Ranks and differences ----------------------------------------------------------------------------


def _contests(tier: Tier, results: Sequence[ArmResult]) -> list[Contest]:
    """Return the ranked workloads as contests of the arms."""
    return [
        _contest(workload, {each.arm: each.values(workload) for each in results})
        for workload in tier.ranked
    ]


def _contest(title: str, values: Mapping[str, Mapping[str, float]]) -> Contest:
    """Return a contest with these values by arm and seed."""
    arms = [
        Competitor(
            name=arm, readings={(_METRIC, LAST): of}, best_round=math.nan, picks=(), leanings={}
        )
        for arm, of in values.items()
    ]
    return Contest(where={"workload": title}, arms=arms, budgets={})


def _differences(tier: Tier, results: Sequence[ArmResult]) -> dict[str, Mapping[str, Difference]]:
    """Return each arm's difference from the baseline, by arm in each ranked workload, in all of
    them together, and in each harder variant."""
    harder = [
        _contest(name, {each.arm: each.values(name) for each in results}) for name in _harder(tier)
    ]
    return {
        contest.column: differences(contest, tier.baseline, _METRIC, LAST)
        for contest in [*with_all(_contests(tier, results)), *harder]
    }


def _change_table(tier: Tier, results: Sequence[ArmResult]) -> list[str]:
    """Return a table of the changes in harder variants, with its caption; nothing without any."""
    columns = dict[str, Mapping[str, Difference]]()
    for name, easier in _harder(tier).items():
        changes = {
            each.arm: {
                seed: value - each.values(easier)[seed]
                for seed, value in each.values(name).items()
                if seed in each.values(easier)
            }
            for each in results
            if each.values(name) != each.values(easier)
        }
        zeros = {seed: 0.0 for of in changes.values() for seed in of}
        contest = _contest(name, {_UNCHANGED: zeros, **changes})
        columns[name] = differences(contest, _UNCHANGED, _METRIC, LAST)
    lines = table_of("arm", columns)
    return [_CHANGES, "\n".join(lines)] if lines else []


def _harder(tier: Tier) -> dict[str, str]:
    """Return the easier workload of each harder variant."""
    return {name: each.harder for name, each in tier.workloads.items() if each.harder}


def _ranks(tier: Tier, results: Sequence[ArmResult]) -> Ranks | None:
    return mean_ranks(
        [{each.arm: _accuracy(each, [workload]) for each in results} for workload in tier.ranked]
    )


def _rank_note(tier: Tier, ranks: Ranks | None) -> str:
    if ranks is None or ranks.difference is None:
        return ""
    p = "" if ranks.p is None else f"Friedman's p is {ranks.p:.2g}; "
    behind = ", ".join(arm for arm in ranks.means if arm not in ranks.best)
    return (
        f"Mean ranks are over {readable_count(len(tier.ranked), 'workload')}. {p}two arms differ "
        f"significantly if their mean ranks differ by more than {ranks.difference:.2f} (Nemenyi, "
        f"5 %). Significantly behind {next(iter(ranks.means))}: {behind or 'no arm'}."
    )


# Costs to the target ------------------------------------------------------------------------------


def ratios(tier: Tier, results: Sequence[ArmResult], resource: str) -> dict[str, list[float]]:
    """Return, by arm, its cost to the target in each ranked workload, divided by the best arm's
    cost.

    Infinite if the arm does not reach the target; NaN if costs are unknown.
    """
    found: dict[str, list[float]] = {each.arm: [] for each in results}
    for workload in tier.ranked:
        costs = {each.arm: each.cost(workload, resource) for each in results}
        known = [cost for cost in costs.values() if math.isfinite(cost)]
        best = min(known, default=math.nan)
        for arm, cost in costs.items():
            found[arm].append(cost / best if best and known else cost)
    return found


def profile_scores(tier: Tier, results: Sequence[ArmResult], resource: str) -> dict[str, float]:
    """Return each arm's score: the area under its performance profile, from 0 to 1.

    The profile is the share of workloads with a ratio of at most τ, for τ from 1 to `WORST_RATIO`.
    An arm that is the best in all workloads scores 1.
    """
    width = WORST_RATIO - 1.0
    return {
        arm: mean([math.nan if math.isnan(r) else max(0.0, WORST_RATIO - r) / width for r in of])
        for arm, of in ratios(tier, results, resource).items()
    }


def _profile_table(tier: Tier, results: Sequence[ArmResult]) -> list[str]:
    lines = [line(["arm", *(f"{each:g} ×" for each in _RATIOS)]), rule(1, len(_RATIOS))]
    for arm, of in ratios(tier, results, "rounds").items():
        shares = [mean([float(ratio <= most) for ratio in of]) for most in _RATIOS]
        lines.append(line([arm, *(f"{share:.2f}" for share in shares)]))
    return lines


def _cost_table(tier: Tier, results: Sequence[ArmResult]) -> list[str]:
    names = list(tier.workloads)
    baseline = results[0].targets
    heads = [f"{name} ({baseline[name]:.3f})" for name in names]
    lines = [line(["arm (target)", *heads]), rule(1, len(names))]
    for result in results:
        lines.append(line([result.arm, *(_costs(result, name) for name in names)]))
    return lines


def _costs(result: ArmResult, workload: str) -> str:
    rounds = result.cost(workload, "rounds")
    if not math.isfinite(rounds):
        return _NONE
    return " · ".join(
        _NONE if not math.isfinite(cost) else text(cost)
        for cost, text in (
            (rounds, lambda cost: f"{cost:g}"),
            (result.cost(workload, "bytes"), readable_bytes),
            (result.cost(workload, "seconds"), readable_seconds),
            (result.cost(workload, "client_seconds"), readable_seconds),
        )
    )
