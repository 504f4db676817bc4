"""Fill the tables of docs/research/leaderboard.md from the results in this checkout.

    python tools/leaderboard_page.py
    python tools/leaderboard_page.py --measure oort --measure tifl

Tiers without results have no tables. The second command first measures these arms' seconds to
select on this machine, in all tiers, and writes them into the results. Measure one after another,
with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from potluck.common.errors import ConfigurationError, PotluckError
from potluck.experiments.benchmark.contestants import measured_again
from potluck.experiments.benchmark.leaderboard import comparable, leaderboard
from potluck.experiments.benchmark.standing import published, write_result
from potluck.experiments.benchmark.tier import TIERS, tier_named
from reference_pages import marked

ROOT = Path(__file__).resolve().parents[1]
# The checkout's results, whichever Potluck is installed: a row is added without installing again.
PUBLISHED = ROOT / "experiments" / "potluck" / "experiments" / "benchmark" / "published"
PAGE = ROOT / "docs" / "research" / "leaderboard.md"


def filled(page: str) -> str:
    """Return the page with the tables of each tier between its comments."""
    for name in TIERS:
        page = marked(page, f"tier {name}", tables(name))
    return page


def tables(name: str, folder: Path = PUBLISHED) -> str:
    """Return the tables of a tier; one sentence if it has no results.

    folder: contains a folder of results for each tier.
    """
    tier = tier_named(name)
    known = published(tier, folder)
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


def check_versions(name: str, folder: Path = PUBLISHED) -> int:
    """Return the number of a tier's results. Raise ConfigurationError if one of them is of a
    version with changes that were not committed, so that others can't repeat it."""
    known = published(tier_named(name), folder)
    if changed := sorted(arm for arm, each in known.items() if "dirty" in each.software):
        raise ConfigurationError(
            f"the results of {', '.join(changed)} in tier {name} are of a changed Potluck "
            f"({known[changed[0]].software}); commit or stash the changes of the checkout, install "
            "it again, and repeat `potluck bench` in another folder (--output)"
        )
    return len(known)


def measure(arms: Collection[str], folder: Path = PUBLISHED) -> None:
    """Measure the seconds to select of these arms, and write them into the results in a folder.

    folder: contains a folder of results for each tier. Raises ConfigurationError if an arm has no
    result.
    """
    results = [(tier, published(tier, folder)) for tier in map(tier_named, TIERS)]
    if unknown := sorted(set(arms).difference(*(known for _, known in results))):
        raise ConfigurationError(f"no tier has a published result of {', '.join(unknown)}")
    for tier, known in results:
        for arm in arms:
            if arm in known:
                write_result(measured_again(tier, known[arm]), folder / tier.name)


def main() -> None:
    """Measure the arms of the command line, then fill the page."""
    parser = argparse.ArgumentParser(description="Fill the tables of the leaderboard's page.")
    parser.add_argument(
        "--measure",
        action="append",
        default=[],
        metavar="ARM",
        help="arm whose seconds to select are measured again; may be repeated",
    )
    measure(parser.parse_args().measure)
    rows = {name: check_versions(name) for name in TIERS}
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    counts = ", ".join(f"{number} of tier {name}" for name, number in rows.items())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} has the rows {counts}\n")


if __name__ == "__main__":
    try:
        main()
    except PotluckError as error:
        sys.exit(f"leaderboard_page.py: {error}")
