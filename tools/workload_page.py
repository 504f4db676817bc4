"""Rewrite docs/reference/workloads.md: the cards of the workloads whose data are in a folder.

    .venv/bin/python tools/workload_page.py data

The folder holds the files that `potluck data prepare` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from potluck.experiments.reports.workload_card import card_markdown, workload_card

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


def page(data: Path) -> str:
    """Return the page for the files of a data directory."""
    cards = [card_markdown(workload_card(task, options, data)) for task, options in WORKLOADS]
    return OPENING + "\n".join(cards)


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
