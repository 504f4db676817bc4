"""Fill the tables of docs/research/leaderboard.md from the results that come with Potluck.

    python tools/leaderboard_page.py

Tiers without results have no tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

from potluck.common.errors import ConfigurationError, PotluckError
from potluck.experiments.benchmark.leaderboard import comparable, leaderboard
from potluck.experiments.benchmark.standing import published
from potluck.experiments.benchmark.tier import TIERS, tier_named
from reference_pages import marked

PAGE = Path(__file__).resolve().parents[1] / "docs" / "research" / "leaderboard.md"


def filled(page: str) -> str:
    """Return the page with the tables of each tier between its comments."""
    for name in TIERS:
        page = marked(page, f"tier {name}", tables(name))
    return page


def tables(name: str) -> str:
    """Return the tables of a tier; one sentence if it has no results."""
    tier = tier_named(name)
    known = published(tier)
    if not known:
        return f"There are no results of the tier `{name}` yet.\n"
    if tier.baseline not in known:
        raise ConfigurationError(
            f"tier {name} has no published result of {tier.baseline}, its baseline; copy "
            f"{tier.baseline}.json from the same folder of results, too"
        )
    shown = comparable(list(known.values()), known[tier.baseline])
    if others := sorted(known.keys() - {each.arm for each in shown}):
        raise ConfigurationError(
            f"the results of {', '.join(others)} in tier {name} have other data, training settings "
            f"or targets than those of {tier.baseline}; repeat `potluck bench` for them, with the "
            "data sets whose digests are in the published files"
        )
    return leaderboard(tier, shown)


if __name__ == "__main__":
    try:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except PotluckError as error:
        sys.exit(f"leaderboard_page.py: {error}")
