"""Limits on connections and streams of the web UI's server."""

from potluck.page.page_guard import OpenStreams, WaitingConnections


def test_oldest_idle_connection_is_closed_at_the_limit() -> None:
    closed = list[str]()
    waiting = WaitingConnections(2)
    for name in ("a", "b", "a", "c"):  # a had a request, and waits again
        waiting.add(name, lambda name=name: closed.append(name))  # type: ignore[misc]
    assert closed == ["b"]
    waiting.remove("a")
    waiting.remove("a")
    waiting.add("d", lambda: closed.append("d"))
    assert closed == ["b"]


def test_open_streams_are_limited_per_browser() -> None:
    streams = OpenStreams(1)
    with streams.counted("mine") as first, streams.counted("mine") as second:
        assert (first, second) == (True, False)
        with streams.counted("another") as elsewhere:
            assert elsewhere
    with streams.counted("mine") as again:
        assert again
