"""The picture of a secure sum is drawn by its script, and has every message of the protocol."""

from pathlib import Path

from potluck.secagg.protocol.wire.messages import MessageType, Stage
from secagg_picture import STAGES, Message, picture

HOUSE = Path(__file__).resolve().parents[3]
PICTURE = HOUSE / "docs" / "images" / "secure-sum.svg"
ENDINGS = {MessageType.REFUSAL, MessageType.ABORT, MessageType.DISPUTE, MessageType.EVIDENCE}
"""Messages only of sessions that fail; the page describes them below the picture."""


def test_committed_picture_of_a_secure_sum_equals_the_generated_one() -> None:
    assert picture() == PICTURE.read_text(), "the picture has changed; run: make pages"


def test_secure_sum_picture_shows_stages_and_messages_in_order() -> None:
    assert list(STAGES) == list(Stage)
    steps = [step for inside in STAGES.values() for step in inside]
    shown = [step.type for step in steps if isinstance(step, Message) and step.type]
    assert list(dict.fromkeys(shown)) == sorted(set(MessageType) - ENDINGS)


def test_no_page_has_a_mermaid_diagram() -> None:
    pages = [*HOUSE.glob("*.md"), *HOUSE.glob("docs/**/*.md"), *HOUSE.glob("examples/**/*.md")]
    assert [page.name for page in pages if "```mermaid" in page.read_text()] == []
