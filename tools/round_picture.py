"""Draw one round for docs/contributing/architecture.md: its processes and their messages.

.venv/bin/python tools/round_picture.py > docs/images/round.svg
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass

from svg_parts import ARROW, drawing, line, rectangle, text

WIDTH = 960
OPERATOR, DISK, COORDINATOR, HOST, WORKER = 80, 250, 440, 700, 880
"""Horizontal positions of the participants' lines."""
PARTICIPANTS = {
    OPERATOR: ("Operator", "potluck, web UI, Python"),
    DISK: ("Disk", "database, model files"),
    COORDINATOR: ("Coordinator", "potluck-server"),
    HOST: ("Host", "potluck-client"),
    WORKER: ("Training worker", "thread or process"),
}
BANDS = ("#f4f8f4", "#faf4f2")
"""Background colours of the phases, used in turn."""
TOP = 72
NOTE_WIDTH, NOTE_LETTERS = 190, 31


@dataclass(frozen=True)
class Message:
    """Arrow from a sender to a receiver.

    name: the call or message of the schema; empty for a write to disk or within a host.
    """

    start: int
    end: int
    words: str
    name: str = ""


@dataclass(frozen=True)
class Note:
    """Local step of one participant."""

    at: int
    words: str


PHASES: dict[str, list[Message | Note]] = {
    "start": [
        Message(OPERATOR, COORDINATOR, "the run file", "StartRun"),
        Message(COORDINATOR, DISK, "row of the run"),
    ],
    "select": [
        Message(COORDINATOR, HOST, "could it train?", "Check"),
        Message(COORDINATOR, HOST, "one-time profile, on request", "Disclose"),
        Message(HOST, COORDINATOR, "answers, as the owner allows", "Attend"),
        Note(COORDINATOR, "the selector chooses the cohort"),
        Message(COORDINATOR, DISK, "attempt and cohort"),
    ],
    "train": [
        Message(COORDINATOR, HOST, "settings, seed, model’s digest", "Train"),
        Message(HOST, COORDINATOR, "asks for a model not yet in its cache", "FetchModel"),
        Message(HOST, WORKER, "model, settings"),
        Message(WORKER, HOST, "file of tensors, report"),
        Note(HOST, "keeps the update on its disk, then sends it"),
        Message(HOST, COORDINATOR, "report, then tensors in pieces", "SubmitUpdate"),
        Note(COORDINATOR, "checks digest, names, shapes and numbers"),
        Message(COORDINATOR, DISK, "row of the update"),
        Note(COORDINATOR, "the state machine counts it: all, or a quorum at the deadline"),
    ],
    "reduce": [
        Note(COORDINATOR, "the strategy combines the updates"),
        Message(COORDINATOR, DISK, "model file, synced"),
    ],
    "evaluate": [
        Message(COORDINATOR, HOST, "the new model’s digest", "Evaluate"),
        Message(HOST, COORDINATOR, "counts of held-out samples", "Attend"),
    ],
    "commit": [
        Message(COORDINATOR, DISK, "row of the round"),
        Message(COORDINATOR, HOST, "the host drops its kept update", "Settle"),
        Message(COORDINATOR, OPERATOR, "the committed round", "WatchRun"),
    ],
}


def messages() -> list[str]:
    """Return the names of calls and messages in the picture."""
    steps = [step for inside in PHASES.values() for step in inside]
    return [step.name for step in steps if isinstance(step, Message) and step.name]


def drawn_message(message: Message, y: float) -> tuple[list[str], float]:
    """Return a message's arrow, name above and content below, and the height of the drawing."""
    middle = (message.start + message.end) / 2
    if {message.start, message.end} == {OPERATOR, COORDINATOR}:
        middle = (OPERATOR + DISK) / 2  # so that the line of the disk crosses no word
    inwards = 3 if message.end > message.start else -3
    dashes = "" if message.name else " stroke-dasharray='5 4'"
    above = 22 if message.name else 8
    arrow = line(
        (message.start + inwards, y + above), (message.end - inwards, y + above), ARROW + dashes
    )
    parts = [arrow, text(middle, y + above + 15, message.words, size=11)]
    if message.name:
        parts.append(text(middle, y + 15, message.name, size=12, weight="bold"))
    return parts, above + 24


def drawn_note(note: Note, y: float) -> tuple[list[str], float]:
    """Return a box on a participant's line, and the height of the drawing."""
    lines = textwrap.wrap(note.words, NOTE_LETTERS)
    height = 10 + 15 * len(lines)
    left = note.at - NOTE_WIDTH / 2
    style = "rx='4' fill='#fffbe6' stroke='#b9a44c'"
    return [
        rectangle(left, y + 3, NOTE_WIDTH, height, style),
        *(text(note.at, y + 19 + 15 * index, words, size=11) for index, words in enumerate(lines)),
    ], height + 10


def picture() -> str:
    """Return the picture of all phases."""
    bands: list[str] = []
    steps: list[str] = []
    y = float(TOP)
    for index, (phase, inside) in enumerate(PHASES.items()):
        top = y
        y += 6
        for step in inside:
            draw = drawn_message(step, y) if isinstance(step, Message) else drawn_note(step, y)
            steps += draw[0]
            y += draw[1]
        y += 2
        bands += [
            rectangle(0, top, WIDTH, y - top, f"fill='{BANDS[index % 2]}'"),
            text(12, top + 20, phase, size=12, anchor="start"),
        ]
    people: list[str] = []
    for x, (name, program) in PARTICIPANTS.items():
        people += [
            line((x, TOP - 8), (x, y + 6), "stroke-width='1'"),
            rectangle(x - 75, 14, 150, 48, "rx='5' fill='white' stroke='#777'"),
            text(x, 34, name, size=14, weight="bold"),
            text(x, 52, program, size=11),
        ]
    words = (
        "Solid: a call or message over TLS. Hosts dial the coordinator, and it sends its messages "
        "as answers to Attend. Dashed: inside a machine."
    )
    legend = text(WIDTH / 2, y + 28, words, size=11)
    title = "The processes of a federation and the messages of one round"
    return drawing([*bands, *people, *steps, legend], width=WIDTH, height=y + 44, title=title)


if __name__ == "__main__":
    sys.stdout.write(picture())
