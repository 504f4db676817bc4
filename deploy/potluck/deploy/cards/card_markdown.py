"""A model card as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from potluck.deploy.cards.card_parts import CardFacts
from potluck.deploy.view.readable import readable_count, readable_measure

_SHOWN_CLIENTS = 50
_SHOWN_ROUNDS = 20
_SHOWN_DISCLOSURES = 20


def markdown(card: CardFacts) -> str:
    """The card for people. Lists are cut after some entries, and say how many there are in all."""
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
        ("model", f"{which} of run `{card.run}`{best}"),
        ("BLAKE3 digest", f"`{card.blake3}`"),
        ("rounds in this model", f"{len(card.rounds)} of the {card.planned_rounds} planned"),
        ("run started", card.created_at),
        ("run now", card.state),
        ("seed", str(card.seed)),
        ("digest of the initial model", f"`{card.initial_model_blake3}`"),
    ]
    if card.kept_by_clients:
        kept = ", ".join(f"`{pattern}`" for pattern in card.kept_by_clients)
        rows.append(("not in the file", f"tensors that each client keeps: {kept}"))
    return [f"# Model of run {_text(card.name)}", "", *_table(("", ""), rows)]


def _measures(card: CardFacts) -> list[str]:
    if not card.measures:
        return ["## Measures", "", "This model was not measured."]
    rows = [
        (name, readable_measure(value, card.units.get(name, "")))
        for name, value in card.measures.items()
    ]
    return ["## Measures", "", *_table(("measure", "value"), rows)]


def _made(card: CardFacts) -> list[str]:
    rows = [(name, f"`{json.dumps(value, default=str)}`") for name, value in card.tables.items()]
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
    )
    return [
        "## Whose data",
        "",
        f"{readable_count(len(clients), 'client')} on {readable_count(hosts, 'host')} took part.",
        "Updates used: in how many of the rounds that chose a client its update is in the model.",
        "Rounds: the first and the last of these. Samples and data epochs (how often data were",
        "replaced) are the host's word alone.",
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
            f"`{each.model_blake3[:12]}…`",
            ", ".join(each.included[:8]) + (" …" if len(each.included) > 8 else ""),
            *(readable_measure(each.measures.get(n), card.units.get(n, "")) for n in names),
        )
        for each in shown
    ]
    lines = ["## Rounds", "", *_table(("round", "digest", "updates of", *names), rows)]
    earlier = len(card.rounds) - len(shown)
    return [*lines, "", f"{earlier} earlier rounds are in the JSON form."] if earlier else lines


def _privacy(card: CardFacts) -> list[str]:
    privacy, spent = card.privacy, card.privacy.largest_epsilon
    seen = "only sums of clients' updates" if privacy.masked_updates else "each client's update"
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
        _spent(spent),
    ]
    if own:
        lines += ["", *_table(("client", "what it disclosed", "data epoch", "ε"), own)]
        lines += _more(len(privacy.profiles), _SHOWN_DISCLOSURES)
    if privacy.sums:
        released = sum(bool(each["released"]) for each in privacy.sums)
        lines += [
            "",
            f"Its clients took part in {readable_count(released, 'secure sum')}.",
            f"What one of them put in is hidden from {privacy.sums_hold_against}.",
        ]
    return lines


def _software(card: CardFacts) -> list[str]:
    rows = [(f"coordinator: {n}", ", then ".join(v)) for n, v in card.software.coordinator.items()]
    rows += [
        (f"hosts: potluck {version}", readable_count(hosts, "host"))
        for version, hosts in card.software.hosts.items()
    ]
    rows.append(("this card was written by", f"potluck {card.software.card}"))
    return ["## Software", "", *_table(("", ""), rows)]


def _spent(epsilon: float) -> str:
    if not epsilon:
        return "By the time of this card no client had made a noisy disclosure (ε = 0)."
    return (
        f"By the time of this card no client had spent more than ε = {epsilon:g} on noisy "
        "disclosures; each counts once, however many runs use it."
    )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "–"


def _more(count: int, shown: int) -> list[str]:
    return ["", f"… and {count - shown} more, in the JSON form."] if count > shown else []


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _line(heads)
    yield _line(["---"] * len(heads))
    for row in rows:
        yield _line([_text(cell) for cell in row])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(text: str) -> str:
    """Others name runs and clients: nothing of it becomes a cell, a line or a tag of its own."""
    plain = " ".join(text.split())
    return plain.replace("|", "\\|").replace("<", "&lt;")


def _fenced(language: str, text: str) -> list[str]:
    """A block of code, whatever fences are in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text.rstrip("\n"), fence]
