"""Watchers of a run receive its end, even if it has just ended."""

from __future__ import annotations

from datetime import UTC, datetime

from potluck.server.live.feed import RunFeed

AT = datetime(2026, 1, 2, tzinfo=UTC)


def test_watcher_receives_all_notices_and_the_end_of_the_run() -> None:
    feed = RunFeed()
    feed.say("before", AT, warning=False)
    watcher = feed.watch()
    feed.say("after", AT, warning=True)
    feed.close()
    first, second, end = (watcher.get_nowait() for _ in range(3))
    assert first is not None
    assert second is not None
    assert [first.notice.text, second.notice.text] == ["before", "after"]
    assert end is None


def test_watcher_that_connects_after_the_end_receives_notices_and_the_end() -> None:
    feed = RunFeed()
    feed.say("before", AT, warning=False)
    feed.close()
    watcher = feed.watch()
    first = watcher.get_nowait()
    assert first is not None
    assert first.notice.text == "before"
    assert watcher.get_nowait() is None
