"""The table of what leaves a client follows from the code."""

from __future__ import annotations

from reference_pages import OWNERS, marked
from what_leaves import ROWS, RUNS, Configuration, leaving_table


def test_disclosure_table_on_the_page_equals_the_generated_one() -> None:
    page = OWNERS.read_text(encoding="utf-8")
    assert marked(page, "leaves", leaving_table()) == page, "run: make pages"


def test_disclosure_table_shows_no_loss_with_noise_and_sums_with_masks() -> None:
    plain, masked, noisy, *both, later = (Configuration(*settings) for settings in RUNS.values())
    loss = ROWS["training loss and metrics"]
    found = [loss(each) for each in (plain, masked, noisy, *both, later)]
    assert found == [
        "exact",
        "in a sum over hosts",
        "no",
        "no",
        "no",
        "exact; the coordinator drops it",
    ]
    of_records, of_clients = both
    samples, update = ROWS["number of training samples"], ROWS["model update"]
    assert samples(of_records) == "in a sum over hosts"
    assert samples(of_clients) == "no"
    assert update(of_records) == "in a sum over hosts, with noise that hides a record"
    answers = ROWS["answers to a selector's questions"]
    assert answers(plain) == "exact †"
    assert answers(noisy) in ("refused", "with noise †")
