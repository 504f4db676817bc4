"""Writes the report files of an experiment: an HTML page, its content as text, and tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment

from potluck.common.errors import ConfigurationError, StorageError
from potluck.deploy.view.readable import readable_bytes, readable_seconds
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import CellResult
from potluck.experiments.reports.contest_tables import contest_notes, contest_sections
from potluck.experiments.reports.contests import contests_of, ranked_readings
from potluck.experiments.reports.experiment_summary import Costs, Summary, summarise
from potluck.experiments.reports.heat_maps import heat_maps
from potluck.experiments.reports.plots import plot_entropy, plot_metric, plot_ranks, plot_rasters
from potluck.experiments.reports.tables import (
    comparison_table,
    line,
    markdown,
    metric_table,
    notes,
    origin,
    rule,
    timing_line,
    write_tables,
)

# The page -----------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid #999; }
th.label, td.label { text-align: left; }
img { max-width: 100%; height: auto; }
.quiet { color: #666; }
.warning { background: #fff4d6; padding: .6rem 1rem; border-radius: .3rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ origin }}</p>
<p class="quiet">{{ seeds }} · {{ timing }}</p>
{% for paragraph in text %}<p>{{ paragraph }}</p>
{% endfor %}
{% if missing %}<p class="warning">{{ missing }} cells are not finished yet.</p>{% endif %}
<h2>Results</h2>
{{ table(results) }}
<h2>By round</h2>
<p class="quiet">Means over seeds; bands are one standard deviation.</p>
<img alt="the metric by round" src="{{ metric }}">
<h2>What it took, and how it compares</h2>
{{ table(comparison) }}
{% if costs %}
<h2>Costs to a target</h2>
{{ table(costs) }}
{% endif %}
<h2>Entropy of the cohorts' labels</h2>
<p class="quiet">Of the true labels of all included clients together.</p>
<img alt="entropy by round" src="{{ entropy }}">
<h2>Who was included when</h2>
<p class="quiet">The first seed of each.</p>
<img alt="who was included when" src="{{ rasters }}">
{% if maps %}<h2>What arms come to, and whom they pick</h2>
<p class="quiet">In percent; blue is better than the baseline, bold differs from it significantly.
Of picks: how evenly they are shared out, and how they go with what the experiment knows of the
clients; red is avoided.</p>
{% for name, picture in maps.items() %}<img alt="{{ name }} of each arm" src="{{ picture }}">
{% endfor %}{% endif %}
{% for name, lines in sections %}<h2>{{ name }}</h2>
{{ table(lines) }}
{% if loop.first and ranks %}<img alt="mean ranks" src="{{ ranks }}">{% endif %}
{% endfor %}
<h2>Notes</h2>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
</body>
</html>
"""

_TABLE = """<div class="table"><table><thead><tr>
{% for head in heads %}<th{% if loop.index0 < labels %} class="label"{% endif %}>{{ head }}</th>
{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>
{% for entry, kind in row %}<td{% if loop.index0 < labels %} class="label"{% endif %}>
{%- if kind == "best" %}<strong>{{ entry }}</strong>
{%- elif kind == "second" %}<u>{{ entry }}</u>{% else %}{{ entry }}{% endif %}</td>
{% endfor %}</tr>
{% endfor %}</tbody></table></div>"""

Row = list[str]


def write_report(summary: Summary, path: Path, pictures: Mapping[str, bytes]) -> None:
    """Write the report of at least one finished cell. Raises StorageError."""
    try:
        path.write_text(html(summary, pictures), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from None


def html(summary: Summary, pictures: Mapping[str, bytes]) -> str:
    """Return the page. All text from the experiment file is escaped.

    pictures: PNGs by name, `metric` and those of `contest_pictures`.
    """
    environment = Environment(autoescape=True)
    experiment = summary.experiment
    contests = contests_of(summary)
    by_reading = ranked_readings(summary, contests)
    environment.globals["table"] = _Tables(environment)
    return environment.from_string(_PAGE).render(
        title=experiment.title or experiment.name,
        text=[each for each in experiment.text.strip().split("\n\n") if each],
        seeds=f"seeds {', '.join(map(str, experiment.seeds))}",
        timing=timing_line(summary),
        origin=origin(summary),
        missing=summary.missing,
        results=metric_table(summary),
        comparison=comparison_table(summary),
        costs=cost_table(summary),
        metric=_embedded(pictures["metric"]),
        entropy=_embedded(plot_entropy(summary)),
        rasters=_embedded(plot_rasters(summary)),
        maps={
            name: _embedded(picture)
            for name, picture in pictures.items()
            if name not in ("metric", "ranks")
        },
        sections=list(contest_sections(summary, contests, by_reading)),
        ranks=_embedded(pictures["ranks"]) if "ranks" in pictures else None,
        notes=[*notes(summary), *(contest_notes() if contests else ())],
    )


def cost_table(summary: Summary) -> list[str]:
    """Return a table of rounds, bytes and seconds to each target; empty if there are no targets."""
    targets = summary.experiment.reading.targets
    if not targets:
        return []
    axes = list(summary.experiment.axes)
    heads = [*axes, "target", "seeds that reach it", "round", "bytes", "seconds"]
    lines = [line(heads), rule(len(axes), len(heads) - len(axes))]
    for arm in summary.arms:
        for cost in arm.costs:
            reached = f"{cost.reached} of {len(arm.values)}"
            lines.append(line([*arm.labels.values(), f"{cost.target:g}", reached, *_cost(cost)]))
    return lines


def _cost(cost: Costs) -> Row:
    if cost.round is None or cost.bytes is None or cost.seconds is None:
        return ["–", "–", "–"]
    return [f"{cost.round:.4g}", readable_bytes(cost.bytes), readable_seconds(cost.seconds)]


class _Tables:
    """Renders tables whose rows are lines of Markdown."""

    def __init__(self, environment: Environment) -> None:
        self._template = environment.from_string(_TABLE)

    def __call__(self, lines: list[str]) -> object:
        from markupsafe import Markup

        heads, below, *rows = [_entries(each) for each in lines]
        return Markup(  # noqa: S704 - rendered by a template that escapes
            self._template.render(
                heads=heads,
                labels=sum(entry == "---" for entry in below),
                rows=[[_marked(entry) for entry in row] for row in rows],
            )
        )


def _entries(row: str) -> Row:
    inner = row.strip().removeprefix("| ").removesuffix(" |")
    return [entry.replace("\\|", "|") for entry in re.split(r"(?<!\\) \| ", inner)]


def _marked(entry: str) -> tuple[str, str]:
    for pattern, kind in ((r"\*\*(.*)\*\*", "best"), (r"<u>(.*)</u>", "second")):
        if found := re.fullmatch(pattern, entry):
            return found[1], kind
    return entry, ""


def _embedded(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


# The files ----------------------------------------------------------------------------------------


def write_report_files(
    plan: ExperimentFile,
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    folder: Path,
    *,
    quick: bool = False,
) -> str:
    """Write the files. Return the report as text, with the page's path as its last line.

    results: by digest of the cell. quick: True if the plan has its [quick] table applied. Raises
    ConfigurationError without results.
    """
    done = [
        results[cell.digest].model_copy(update={"labels": dict(cell.labels)})
        for cell in cells
        if cell.digest in results
    ]
    if not done:
        raise ConfigurationError(f"{folder} has no finished cell; run the experiment first")
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
