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
from potluck.experiments.benchmark.tier import tier_named
from potluck.experiments.grid.definition import merged
from potluck.experiments.reports.workload_card import card_markdown, card_title, workload_card

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "workloads.md"

WORKLOADS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("heart", {}),
    ("shakespeare", {}),
    ("tcga-brca", {}),
    ("mnist", {"partition": "dirichlet", "alpha": 0.5}),
    ("mnist", {"partition": "labels", "labels": 2}),
    ("cmnist", {}),
    ("cifar10", {"partition": "dirichlet", "alpha": 0.5}),
    ("covtype", {"partition": "dirichlet", "alpha": 0.5}),
)
"""Each workload's task and options; the other options have their defaults."""

OPENING: Final = """# Workloads

This page describes the workloads whose data were at hand, for people who choose some for an
experiment. You need their files to print the cards yourself; [Data sets](data.md) says where they
come from. `potluck data card TASK --data FOLDER` prints the card of any task.

The *distance* of a client's label mix is the total variation distance to the mix of all samples:
0 if they are equal, near 1 if the client holds other classes. GCI, GAI and GSC are the imbalance
of classes and of attributes and the spurious correlation in all samples together; CCI, CAI and
CSC are the means over clients. The accuracies are those of always answering the most frequent
label of all samples, or of the client. The last row counts what a selector would have to learn
about clients to know every label mix.

"""


def of_tier() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return task and options of the standard tier's workloads, by the sentence that names them."""
    tier = tier_named("standard")
    tables = {name: merged(tier.run, each.run)["task"] for name, each in tier.workloads.items()}
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for table in {repr(table): table for table in tables.values()}.values():
        names = [f"`{name}`" for name, other in tables.items() if other == table]
        options = {key: value for key, value in table.items() if key != "name"}
        found[f"In the benchmark's standard tier: {', '.join(names)}."] = table["name"], options
    return found


def page(data: Path, existing: str) -> str:
    """Return the page for the files of a data directory; without a file, a card stays as it is."""
    parts = ["## " + part for part in existing.split("\n## ")[1:]]
    kept = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}
    sentences = {card_title(*workload): sentence for sentence, workload in of_tier().items()}
    wanted = {card_title(*each): each for each in (*WORKLOADS, *of_tier().values())}
    cards: list[str] = []
    for title, (task, options) in wanted.items():
        try:
            card = card_markdown(workload_card(task, options, data))
        except ConfigurationError as error:
            sys.stderr.write(f"kept as it is: {title}: {error.message}\n")
            card = kept.get(title, "")
        else:
            if title in sentences:
                card += f"\n{sentences[title]}\n"
        cards.append(card)
    return OPENING + "\n".join(filter(None, cards))


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
