"""Writes the report files of an experiment: an HTML page, its text, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from potluck.common.errors import ConfigurationError
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import CellResult
from potluck.experiments.reports.contest_tables import contest_notes, contest_sections
from potluck.experiments.reports.contests import contests_of, ranked_readings
from potluck.experiments.reports.experiment_summary import Summary, summarise
from potluck.experiments.reports.heat_maps import heat_maps
from potluck.experiments.reports.html_report import write_report
from potluck.experiments.reports.plots import plot_metric
from potluck.experiments.reports.rank_plot import plot_ranks
from potluck.experiments.reports.tables import markdown, write_tables


def write_report_files(
    plan: ExperimentFile,
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    folder: Path,
    *,
    quick: bool = False,
) -> str:
    """Write the files. Return the report as text, with the page's path as its last line.

    results: by the digests of their cells. quick: True if the plan is the quick one. Raises
    ConfigurationError without results.
    """
    done = [
        results[cell.digest].model_copy(update={"labels": dict(cell.labels)})
        for cell in cells
        if cell.digest in results
    ]
    if not done:
        raise ConfigurationError(f"no cell is finished in {folder}; run the experiment first")
    summary = summarise(plan, done, len(cells) - len(done), quick=quick)
    write_tables(done, folder)
    text, page = report_text(summary), folder / "report.html"
    (folder / "report.md").write_text(text, encoding="utf-8")
    pictures = {"metric": plot_metric(summary), **contest_pictures(summary)}
    if len(pictures) > 1:
        for name, picture in pictures.items():
            (folder / f"{name}.png").write_bytes(picture)
    write_report(summary, page, pictures)
    return f"{text.rstrip()}\n\n{page}"


def contest_pictures(summary: Summary) -> dict[str, bytes]:
    """Return PNGs of compared arms, by name; empty if no axis is compared."""
    contests = contests_of(summary)
    ranked_by = ranked_readings(summary, contests)
    ranks = plot_ranks(ranked_by)
    found = heat_maps(summary, contests, ranked_by)
    return found if ranks is None else {**found, "ranks": ranks}


def report_text(summary: Summary) -> str:
    """Return the report as text: the sections of every experiment, then those of contests."""
    contests = contests_of(summary)
    if not contests:
        return markdown(summary)
    parts = [markdown(summary)]
    for title, lines in contest_sections(summary, contests, ranked_readings(summary, contests)):
        parts += [f"## {title}", "", *lines, ""]
    parts += [f"- {note}" for note in contest_notes()]
    return "\n".join(parts).rstrip() + "\n"
