"""The leaderboard's tables are those of the results that come with Potluck."""

from leaderboard_page import PAGE, filled


def test_leaderboard_page_equals_the_generated_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run: make pages"
