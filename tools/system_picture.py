"""Draw the processes of a federation for README.md: their connections, and the data sent.

.venv/bin/python tools/system_picture.py > docs/images/system.svg
"""

from __future__ import annotations

import sys

from svg_parts import ARROW, drawing, line, rectangle, text

WIDTH, HEIGHT = 860, 380
_PARTY = "rx='8' fill='#f4f8f4' stroke='#1b7f5c'"
_SITE = "rx='8' fill='#faf6ef' stroke='#e0912f'"
_PROCESS = "rx='5' fill='white' stroke='#777'"
_DATA = "rx='5' fill='#f0e6d6' stroke='#b5651d' stroke-dasharray='4 3'"
_SITES = (("Hospital A", "client-0, client-1"), ("Hospital B", "client-2"))
_SITE_LEFT, _SITE_TOP, _SITE_HEIGHT = 600, 40, 140
_COORDINATOR_RIGHT = 400
_DOWN = "down: model, training settings"
_UP = "up: updates, metrics; profiles if the owner allows"


def main() -> None:
    """Print the picture."""
    sys.stdout.write(picture())


def picture() -> str:
    """Return the picture as SVG."""
    parts = [
        rectangle(200, 110, 200, 170, _PARTY),
        text(300, 134, "Coordinator", size=14, weight="bold"),
        text(300, 152, "potluck-server", size=11),
        *(
            text(300, 182 + 20 * row, words, size=12)
            for row, words in enumerate(
                ("selects the clients", "checks and combines updates", "evaluates the model")
            )
        ),
        text(300, 262, "keeps rounds, models, reasons", size=11),
        rectangle(16, 130, 120, 130, _PARTY),
        text(76, 154, "Operator", size=14, weight="bold"),
        *(
            text(76, 178 + 20 * row, words, size=12)
            for row, words in enumerate(("potluck", "web UI", "Python"))
        ),
        line((136, 195), (198, 195), ARROW),
        text(168, 186, "dials", size=11),
        text(76, 282, "starts runs,", size=11),
        text(76, 298, "fetches models", size=11),
        *_sites(),
        text(
            WIDTH / 2,
            HEIGHT - 14,
            "Every arrow is one TLS connection with certificates on both sides, "
            "from the party that dials. No site opens a port.",
            size=12,
        ),
    ]
    return drawing(parts, width=WIDTH, height=HEIGHT, title="The processes of a federation")


def _sites() -> list[str]:
    """Return the sites and their connections to the coordinator."""
    parts: list[str] = []
    for place, (name, clients) in enumerate(_SITES):
        top = _SITE_TOP + place * (_SITE_HEIGHT + 20)
        middle = top + _SITE_HEIGHT / 2
        meets = 160 + 70 * place
        parts += [
            rectangle(_SITE_LEFT, top, 244, _SITE_HEIGHT, _SITE),
            text(_SITE_LEFT + 122, top + 22, name, size=14, weight="bold"),
            rectangle(_SITE_LEFT + 12, top + 36, 104, 90, _PROCESS),
            text(_SITE_LEFT + 64, top + 62, "Host", size=13, weight="bold"),
            text(_SITE_LEFT + 64, top + 80, "potluck-client", size=11),
            text(_SITE_LEFT + 64, top + 104, "trains", size=12),
            rectangle(_SITE_LEFT + 128, top + 36, 104, 90, _DATA),
            text(_SITE_LEFT + 180, top + 62, "Data", size=13, weight="bold"),
            text(_SITE_LEFT + 180, top + 82, clients, size=10),
            text(_SITE_LEFT + 180, top + 104, "never leave", size=12),
            line((_SITE_LEFT + 12, middle + 10), (_COORDINATOR_RIGHT + 2, meets), ARROW),
            text(500, (middle + 10 + meets) / 2 - 8, "dials", size=11),
        ]
    parts += [text(452, 60, _DOWN, size=11), text(452, 78, _UP, size=11)]
    return parts


if __name__ == "__main__":
    main()
