"""Draw a secure sum for docs/security/specification.md: its messages, from top to bottom.

    .venv/bin/python tools/secagg_picture.py > docs/images/secure-sum.svg

Names of messages and stages come from the code.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass

from potluck.secagg.protocol.wire.messages import MessageType, Stage
from svg_parts import ARROW, drawing, line, rectangle, text

WIDTH = 860
CLIENT, COORDINATOR, OTHERS = 168, 560, 780
"""Horizontal positions of the three participants' lines."""
NAMES = {CLIENT: "Client", COORDINATOR: "Coordinator", OTHERS: "The others"}
BANDS = ("#f4f8f4", "#faf4f2")
"""Background colours of the stages, used in turn."""
TOP = 56
NOTE_WIDTH, NOTE_LETTERS = 316, 50


@dataclass(frozen=True)
class Message:
    """Arrow from a sender to a receiver. type: None if it is not a message of the protocol."""

    start: int
    end: int
    words: str
    type: MessageType | None = None


@dataclass(frozen=True)
class Note:
    """Local step of one participant."""

    at: int
    words: str


def told(type: MessageType, words: str) -> Message:  # noqa: A002  # the protocol's word
    """Return a message from the coordinator to a client."""
    return Message(COORDINATOR, CLIENT, words, type)


def sent(type: MessageType, words: str) -> Message:  # noqa: A002  # the protocol's word
    """Return a message from a client to the coordinator."""
    return Message(CLIENT, COORDINATOR, words, type)


STAGES: dict[Stage, list[Message | Note]] = {
    Stage.ADVERTISE: [
        told(MessageType.INVITATION, "the header, on which everything hangs"),
        Note(CLIENT, "checks it against its own policy"),
        sent(MessageType.ADVERT, "two public keys, a commitment (signed)"),
    ],
    Stage.SHARE: [
        told(MessageType.ROSTER, "everybody’s adverts"),
        Note(CLIENT, "verifies each signature by the membership, and each key"),
        sent(MessageType.SHARES, "of two secrets, encrypted for each other client (signed)"),
    ],
    Stage.UPLOAD: [
        told(MessageType.DELIVERY, "who has shared, and the shares meant for this client"),
        Note(CLIENT, "from here on masks belong to this set of sharers"),
        Message(CLIENT, COORDINATOR, "the masked vector"),
        sent(MessageType.MASKED_INPUT, "the vector’s digest (signed)"),
    ],
    Stage.CONSENT: [
        told(MessageType.SURVIVORS, "whose vectors have arrived"),
        Note(CLIENT, "checks the set against sizes, thresholds and what was summed before"),
        sent(MessageType.CONSENT, "to this set and no other (signed)"),
        Message(OTHERS, COORDINATOR, "to the same set (signed)", MessageType.CONSENT),
    ],
    Stage.REVEAL: [
        told(MessageType.CERTIFICATE, "a quorum of consents"),
        Note(CLIENT, "writes the set into its ledger"),
        sent(MessageType.REVEAL, "one share of each sharer’s secrets"),
        Note(COORDINATOR, "rebuilds the secrets, takes the masks off the sum"),
    ],
}


def drawn_message(message: Message, y: float) -> tuple[list[str], float]:
    """Return a message's arrow, name above and content below, and the height of the drawing."""
    middle = (message.start + message.end) / 2
    inwards = 3 if message.end > message.start else -3
    dashes = "" if message.type else " stroke-dasharray='5 4'"
    parts = [
        line((message.start + inwards, y + 22), (message.end - inwards, y + 22), ARROW + dashes)
    ]
    if message.type:
        parts.append(text(middle, y + 15, message.type.name, size=12, weight="bold"))
    return [*parts, text(middle, y + 37, message.words, size=11)], 46


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
    """Return the picture of all stages."""
    bands: list[str] = []
    steps: list[str] = []
    y = float(TOP)
    for index, (stage, inside) in enumerate(STAGES.items()):
        top = y
        y += 8
        for step in inside:
            draw = drawn_message(step, y) if isinstance(step, Message) else drawn_note(step, y)
            steps += draw[0]
            y += draw[1]
        y += 4
        bands += [
            rectangle(0, top, WIDTH, y - top, f"fill='{BANDS[index % 2]}'"),
            text(WIDTH - 10, top + 20, stage.value, size=12, anchor="end"),
        ]
    people: list[str] = []
    for x, name in NAMES.items():
        people += [
            line((x, TOP - 8), (x, y + 6), "stroke-width='1'"),
            rectangle(x - 60, 14, 120, 32, "rx='5' fill='white' stroke='#777'"),
            text(x, 35, name, size=14, weight="bold"),
        ]
    title = "The messages of a secure sum, stage by stage"
    return drawing([*bands, *people, *steps], width=WIDTH, height=y + 14, title=title)


if __name__ == "__main__":
    sys.stdout.write(picture())
