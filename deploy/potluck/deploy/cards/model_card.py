"""The card of a model: its run, its settings and clients, its metrics, as Markdown and as files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from potluck.common.errors import StorageError
from potluck.common.learning.spread import Coverage
from potluck.deploy.cards.card_parts import CardCoverage, CardFacts, CardNoise
from potluck.deploy.view.readable import readable_count, readable_coverage, readable_measure

# Markdown -----------------------------------------------------------------------------------------

_SHOWN_CLIENTS = 50
_SHOWN_ROUNDS = 20
_SHOWN_DISCLOSURES = 20

_MARKS = re.compile(r"[\\`*\[\]|@]|(?<=\bwww)\.|:(?=//)", re.IGNORECASE)
"""Characters that can start a link, an image, code, emphasis or a table cell, or make a bare URL a
link.
"""


class _Markup(str):
    """Markdown made by this module, which is not escaped; all other texts in table cells are."""

    __slots__ = ()


def markdown(card: CardFacts) -> str:
    """Return the card as Markdown. Long lists are cut, with the total number of entries."""
    sections = [
        _model(card),
        _measures(card),
        _made(card),
        _clients(card),
        _rounds(card),
        _privacy(card),
        _software(card),
        ["## Run file", "", *_fenced("toml", card.run_file)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _model(card: CardFacts) -> list[str]:
    which = f"after round {card.round}" if card.round else "before round 1"
    best = f", the run's best by {card.best_of}" if card.best_of else ""
    rows = [
        ("model", _Markup(f"{which} of run {_code(card.run)}{_text(best)}")),
        ("BLAKE3 digest", _code(card.blake3)),
        ("rounds in this model", f"{len(card.rounds)} of the {card.planned_rounds} planned"),
        ("run started", card.created_at),
        ("run now", card.state),
        ("seed", str(card.seed)),
        ("digest of the initial model", _code(card.initial_model_blake3)),
    ]
    if card.kept_by_clients:
        kept = ", ".join(map(_code, card.kept_by_clients))
        rows.append(
            ("not in the file", _Markup(f"tensors that each client keeps on its host: {kept}"))
        )
    return [f"# Model of run {_text(card.name)}", "", *_table(("", ""), rows)]


def _measures(card: CardFacts) -> list[str]:
    missing = [name for name, each in card.coverage.items() if name not in card.measures]
    if not card.measures and not missing:
        return ["## Measures", "", "The run did not measure this model."]
    rows = [
        (
            name,
            readable_measure(card.measures.get(name), card.units.get(name, "")),
            _over(card.coverage.get(name)),
        )
        for name in [*card.measures, *missing]
    ]
    return ["## Measures", "", *_table(("measure", "value", "over"), rows)]


def _over(coverage: CardCoverage | None) -> str:
    return "–" if coverage is None else readable_coverage(Coverage(**coverage.model_dump()))


def _made(card: CardFacts) -> list[str]:
    rows = [(name, _code(json.dumps(value, default=str))) for name, value in card.tables.items()]
    return ["## How it was made", "", *_table(("part", "settings"), rows)]


_PUBLIC = (
    "",
    "The coordinator trained the model further in each round, on public samples of its own.",
)


def _clients(card: CardFacts) -> list[str]:
    clients = card.clients
    rows = [
        (
            each.client,
            ", ".join(each.hosts),
            f"{each.included} of {each.selected}",
            _span(each.first_round, each.last_round),
            "–" if each.samples is None else str(each.samples),
            _numbers(each.data_epochs),
            f"{each.epsilon:g}",
            *([_loss(each.update_epsilon)] if card.privacy.noise else ()),
        )
        for each in clients[:_SHOWN_CLIENTS]
    ]
    hosts = len({host for each in clients for host in each.hosts})
    heads = (
        "client",
        "hosts",
        "updates used",
        "first to last round",
        "samples",
        "data epochs",
        "ε spent",
        *(("ε of updates",) if card.privacy.noise else ()),
    )
    return [
        "## Whose data",
        "",
        f"{readable_count(len(clients), 'client')} on {readable_count(hosts, 'host')} took part.",
        "Updates used: rounds that used the client's update, of the rounds that selected it.",
        "Rounds: the first and the last round that used an update. The hosts report samples and",
        "data epochs (how often data were replaced); nothing verifies these numbers.",
        *(_PUBLIC if card.coordinator_trains else ()),
        "",
        *_table(heads, rows),
        *_more(len(clients), _SHOWN_CLIENTS),
    ]


def _rounds(card: CardFacts) -> list[str]:
    shown = card.rounds[-_SHOWN_ROUNDS:]
    names = [name for name in card.measures if any(name in each.measures for each in shown)]
    rows = [
        (
            str(each.round),
            _code(f"{each.model_blake3[:12]}…"),
            ", ".join(each.included[:8]) + (" …" if len(each.included) > 8 else ""),
            *(
                readable_measure(each.measures.get(name), card.units.get(name, ""))
                + " (partial)" * (name in each.coverage and each.coverage[name].partial)
                for name in names
            ),
        )
        for each in shown
    ]
    lines = ["## Rounds", "", *_table(("round", "digest", "updates of", *names), rows)]
    earlier = len(card.rounds) - len(shown)
    return [*lines, "", f"{earlier} earlier rounds are in the JSON form."] if earlier else lines


def _privacy(card: CardFacts) -> list[str]:
    privacy, spent = card.privacy, card.privacy.largest_epsilon
    seen = "each client's update"
    if privacy.masked_updates:
        seen = "only sums of clients' updates"
    if privacy.claim:
        seen += f": {privacy.claim}"
    own = [
        (
            str(each["client"]),
            str(each["signal"]),
            str(each["data_epoch"]),
            "exact" if each["epsilon"] is None else f"{each['epsilon']:g}",
        )
        for each in privacy.profiles[:_SHOWN_DISCLOSURES]
    ]
    lines = [
        "## Privacy spent",
        "",
        f"The coordinator saw {seen}.",
        *_spent_on_updates(privacy.noise),
        _spent(spent),
    ]
    if own:
        lines += ["", *_table(("client", "what it disclosed", "data epoch", "ε"), own)]
        lines += _more(len(privacy.profiles), _SHOWN_DISCLOSURES)
    if privacy.sums:
        released = sum(bool(each["released"]) for each in privacy.sums)
        lines += [
            "",
            f"The run's clients took part in {readable_count(released, 'secure sum')}.",
            f"The sums hide the input of each client from {privacy.sums_hold_against}.",
        ]
    return lines


def _spent_on_updates(noise: CardNoise | None) -> list[str]:
    if noise is None:
        return []
    loss = "The coordinator does not know the privacy loss of the updates"
    if noise.largest is not None and noise.median is not None:
        loss = (
            f"No client has spent more than ε = {noise.largest:.4g} on its updates in this run "
            f"(median {noise.median:.4g})"
        )
    lines = [f"{loss}, at δ = {noise.delta:g} per {noise.unit}. Hosts also count other runs."]
    if noise.refused:
        lines.append(
            f"Excluded: {readable_count(noise.refused, 'client')}. The data owner's limit, or the "
            "run's number of trainings, is used up."
        )
    return lines


def _software(card: CardFacts) -> list[str]:
    rows = [(f"coordinator: {n}", ", then ".join(v)) for n, v in card.software.coordinator.items()]
    rows += [
        (f"hosts: potluck {version}", readable_count(hosts, "host"))
        for version, hosts in card.software.hosts.items()
    ]
    rows.append(("this card was written by", f"potluck {card.software.card}"))
    return ["## Software", "", *_table(("", ""), rows)]


def _loss(epsilon: float | None) -> str:
    return "–" if epsilon is None else f"{epsilon:.4g}"


def _spent(epsilon: float) -> str:
    if not epsilon:
        return "At the time of this card, no client had made a noisy disclosure (ε = 0)."
    return (
        f"At the time of this card, no client had spent more than ε = {epsilon:g} on noisy "
        "disclosures. Each disclosure counts once, even if several runs use it."
    )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "–"


def _more(count: int, shown: int) -> list[str]:
    return ["", f"… and {count - shown} more, in the JSON form."] if count > shown else []


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _line([_text(head) for head in heads])
    yield _line(["---"] * len(heads))
    for row in rows:
        yield _line([cell if isinstance(cell, _Markup) else _text(cell) for cell in row])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(text: str) -> str:
    """Escape a text from another party, such as the name of a run or client.

    The escaped text can't start a line, cell, tag, link, image or code.
    """
    plain = " ".join(text.split())
    return _MARKS.sub(r"\\\g<0>", plain.replace("&", "&amp;").replace("<", "&lt;"))


def _code(text: str) -> _Markup:
    """Quote a text as code in a table cell, between longer runs of backticks than it contains."""
    plain = " ".join(text.split())
    longest = max(map(len, re.findall("`+", plain)), default=0)
    space = " " if longest else ""  # Markdown drops one space on each side
    fence = "`" * (longest + 1)
    return _Markup(f"{fence}{space}{plain}{space}{fence}".replace("|", "\\|"))


def _fenced(language: str, text: str) -> list[str]:
    """Return the lines of a code block, whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text.rstrip("\n"), fence]


# The card -----------------------------------------------------------------------------------------
# Pure.


class ModelCard(CardFacts):
    """A model and all known facts about its origin."""

    def values(self) -> dict[str, Any]:
        """Return the whole card as plain values, for JSON."""
        return self.model_dump(mode="json")

    def json_text(self) -> str:
        """Return the whole card as indented JSON."""
        return self.model_dump_json(indent=2) + "\n"

    def markdown(self) -> str:
        """Return the card as Markdown, with long lists cut."""
        return markdown(self)

    def __str__(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        return f"<ModelCard: round {self.round} of run {self.run}; print it, or see .values()>"

    def _repr_markdown_(self) -> str:
        return self.markdown()


# Files --------------------------------------------------------------------------------------------


def write_card(card: ModelCard, model: Path) -> tuple[Path, Path]:
    """Write a card as JSON and Markdown, next to the model's file or into the folder of its shards.

    Returns their paths: `NAME.card.json` and `NAME.card.md`. Raises StorageError.
    """
    stem = model / "model" if model.is_dir() else model.with_suffix("")
    paths = (stem.with_name(f"{stem.name}.card.json"), stem.with_name(f"{stem.name}.card.md"))
    for path, text in zip(paths, (card.json_text(), card.markdown()), strict=True):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"can't write {path}: {error.strerror}", path=path) from error
    return paths
