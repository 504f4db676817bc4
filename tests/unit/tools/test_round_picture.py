"""The picture of a round is drawn by its script, and its messages are in the schema."""

import re

from support.repository import ROOT

from round_picture import messages, picture


def test_committed_picture_of_a_round_equals_the_generated_one() -> None:
    drawn = (ROOT / "docs" / "images" / "round.svg").read_text()
    assert picture() == drawn, "the picture has changed; run: make pages"


def test_messages_in_the_picture_of_a_round_are_in_the_schema() -> None:
    schema = "\n".join(file.read_text() for file in (ROOT / "protos").rglob("*.proto"))
    named = set(re.findall(r"^(?:  rpc|message) (\w+)", schema, re.MULTILINE))
    assert messages()
    assert set(messages()) <= named
