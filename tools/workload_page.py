"""Rewrite docs/reference/workloads.md: the cards of the workloads whose data are in a folder.

    .venv/bin/python tools/workload_page.py data

The folder holds the files that `potluck data prepare` writes. Cards without a file stay as they
are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from potluck.common.errors import ConfigurationError
from potluck.experiments.benchmark.tier import TIERS, tier_named
from potluck.experiments.grid.definition import merged
from potluck.experiments.reports.workload_card import card_markdown, card_title, workload_card

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "workloads.md"

_RARE: Final = "which clients have the labels that others lack"

WORKLOADS: Final[tuple[tuple[str, Mapping[str, Any], str], ...]] = (
    ("heart", {}, ""),
    ("shakespeare", {}, ""),
    ("tcga-brca", {}, "which regions have other patients than the large ones"),
    ("mnist", {"partition": "dirichlet", "alpha": 0.5}, _RARE),
    ("mnist", {"partition": "labels", "labels": 2}, "which clients have the same two labels"),
    ("cmnist", {}, "which clients contradict the usual pair of colour and label"),
    ("cifar10", {"partition": "dirichlet", "alpha": 0.5}, _RARE),
    ("covtype", {"partition": "dirichlet", "alpha": 0.5}, _RARE),
)
"""Each workload's task, options, and what a selector would have to learn; empty if a tier has the
workload. The other options have their defaults."""

SELECTORS: Final = "What a selector would have to learn:"
LEARNED: Final = {
    "label-skew": "which clients have the labels that others lack",
    "label-noise": "which clients have wrong labels",
    "few-samples": "which clients have the labels that others lack, from updates of few samples",
    "slow-clients": "that slow clients have labels that quick ones lack",
    "misleading-colours": "which clients contradict the usual pair of colour and label",
    "hospitals": "which hospitals differ from the others",
    "plays": "which roles speak like many others, and which do not",
    "mnist-skew": "which clients have the labels that others lack",
    "mnist-label-noise": "which clients have wrong labels",
    "cifar10-skew": "which clients have the labels that others lack",
    "writers": "which writers write like many others, and which do not",
    "lost-clients": "which labels are held by clients that often drop out",
    "noisy-profiles": "how far profiles with noise can be trusted",
}
"""What a selector would have to learn, by workload."""

OPENING: Final = """# Workloads

This page describes the workloads whose data were at hand, for people who choose some for an
experiment. You need their files to print the cards yourself; [Data sets](data.md) says where they
come from. `potluck data card TASK --data FOLDER` prints the card of any task, without the line about
what a selector would have to learn.

The *distance* of a client's label mix is the total variation distance to the mix of all samples:
0 if they are equal, near 1 if the client holds other classes. GCI, GAI and GSC are the imbalance
of classes and of attributes and the spurious correlation in all samples together; CCI, CAI and
CSC are the means over clients. A dash means that the task has no attribute of two values, such as
a colour. The accuracies are those of always answering the most frequent
label of all samples, or of the client. The last row counts the numbers from which a selector
would know every label mix. The SHA-256 is that of the data set's arrays, or, for `heart` and the
digits, of the files that come with Potluck. The arrays of Fed-TCGA-BRCA are compared with known
digests when they are prepared. FEMNIST by writer and Fed-ISIC2019 have no card, since their files
were not at hand.

"""


def of_tiers() -> dict[str, tuple[str, Mapping[str, Any], list[str]]]:
    """Return each card of the tiers' workloads by title: task, options, lines on the workloads."""
    tiers: dict[tuple[str, str], list[str]] = {}
    tasks: dict[str, Mapping[str, Any]] = {}
    for tier in map(tier_named, TIERS):
        for name, each in tier.workloads.items():
            task = merged(tier.run, each.run)["task"]
            title = card_title(task["name"], _options(task))
            tasks[title] = task
            tiers.setdefault((title, name), []).append(f"`{tier.name}`")
    return {
        title: (
            task["name"],
            _options(task),
            [
                f"- {LEARNED[name]} (`{name}` in {', '.join(of)})."
                for (other, name), of in tiers.items()
                if other == title
            ],
        )
        for title, task in tasks.items()
    }


def _options(task: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in task.items() if key != "name"}


def page(data: Path, existing: str) -> str:
    """Return the page for the files of a data directory; without a file, a card stays as it is."""
    parts = ["## " + part for part in existing.split("\n## ")[1:]]
    kept = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}
    wanted: dict[str, tuple[str, Mapping[str, Any], list[str]]] = {}
    for task, options, learned in WORKLOADS:
        lines = [f"- {learned}."] if learned else []
        wanted[card_title(task, options)] = task, options, lines
    wanted |= of_tiers()
    cards: list[str] = []
    for title, (task, options, lines) in wanted.items():
        try:
            card = card_markdown(workload_card(task, options, data))
        except ConfigurationError as error:
            sys.stderr.write(f"kept as it is: {title}: {error.message}\n")
            card = kept.get(title, "").partition(f"\n{SELECTORS}\n")[0]
        if card and lines:
            card += "\n" + "\n".join([SELECTORS, "", *lines]) + "\n"
        cards.append(card)
    return OPENING + "\n".join(filter(None, cards))


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
