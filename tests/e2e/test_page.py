"""The web UI in a real browser: its views, its controls and its error messages."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect
from support.browser import CHROMIUM, opened_tab, running_browser
from support.federation import until
from support.operator_service import (
    RUN_ID,
    Event,
    FakeOperatorService,
    committed,
    covering,
    member,
    notice,
    progress,
    running_operator_service,
    status,
)
from support.pages import OpenPage, running_page
from support.pki import TestFederation, make_federation, tls_files

from potluck.common.net.identity import Role
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.deploy.pki import authority
from potluck.deploy.view.readable import readable_bytes, readable_measure, readable_seconds
from potluck.page import event_stream, overview_watch, page_guard, run_watch
from potluck.page.run_draft import FIRST_DRAFT
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
]
TRAINING = MemberState.MEMBER_STATE_TRAINING
LOST = MemberState.MEMBER_STATE_LOST
RUN_PATH = f"/runs/{RUN_ID}"
SEEN = """(seen) => {
  Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""Simulates that the browser shows another tab, or this one again."""


def under_way() -> Event:
    """Return the progress of a round with one late client among four, and one lost client."""
    event = progress(
        3, "train", member(0), member(1), member(2, TRAINING, 0.25), member(3, LOST, 0.5)
    )
    event.progress.seconds = 30.0
    event.progress.bytes_down = 1_500_000
    for one in event.progress.members[:2]:
        one.seconds = 2.0
    event.progress.members[3].trouble = "host-0 went away"
    event.progress.members[2].reason = "entropy +0.41 bit"
    return event


def history(*, clients: int = 3, rounds: int = 2) -> list[Event]:
    return [
        committed(number, 0.3 + 0.5 * number / rounds, *(member(each) for each in range(clients)))
        for number in range(1, rounds + 1)
    ]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    return make_federation(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def service() -> FakeOperatorService:
    events = [status(committed=2), *history(), notice("host-0 left"), under_way()]
    return FakeOperatorService(  # type: ignore[abstract]  # calls that no test makes
        runs=[status(committed=2).status],
        clients=[
            operator_pb2.ClientStatus(
                client_id=f"client-{number}",
                host_id=f"host-{number % 2}",
                attending=number % 2 == 0,
                device="cuda:0 (NVIDIA H100)",
                software_version="0.0.9" if number % 2 == 0 else "",
                selected=number,
            )
            for number in range(6)
        ],
        profiles=[
            operator_pb2.ClientProfile(client_id=f"client-{number}", label_counts=[number, 6.0])
            for number in range(6)
        ],
        watches=[list(events) for _ in range(8)],
        holds=True,
    )


@pytest.fixture
async def config(
    service: FakeOperatorService, federation: TestFederation
) -> AsyncIterator[OperatorConfig]:
    async with running_operator_service(service, federation) as config:
        yield config


@pytest.fixture
async def server(config: OperatorConfig) -> AsyncIterator[OpenPage]:
    async with running_page(config) as server:
        yield server


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


async def fits(page: Page) -> bool:
    """Return True if no element overflows the width of the window."""
    fitting: bool = await page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    return fitting


async def dots(plot: Locator) -> list[tuple[str, str]]:
    """Return the fill and stroke colours of each point in a plot, in order."""
    found: list[tuple[str, str]] = await plot.locator("circle").evaluate_all(
        "all => all.map((dot) => [dot.getAttribute('fill'), dot.getAttribute('stroke')])"
    )
    return [(fill, stroke) for fill, stroke in found]


async def test_user_can_navigate_from_the_run_list_to_the_reason_of_a_selection(
    browser: Browser, server: OpenPage
) -> None:
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await page.get_by_role("link", name="tea").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("tea")
        live = page.get_by_role("region", name="Round 3")
        await expect(live).to_contain_text("training · 30 s · 1.5 MB down")
        await expect(live.get_by_role("row", name="client-2")).to_contain_text("entropy +0.41 bit")
        await expect(live.get_by_role("row", name="client-2")).to_contain_text("straggler")
        await expect(live.get_by_role("row", name="client-3")).to_contain_text("host-0 went away")
        meter = live.get_by_role("progressbar", name="Progress of client-2")
        await expect(meter).to_have_attribute("aria-valuenow", "25")
        await expect(live.get_by_role("listitem")).to_have_text(
            ["1 training", "2 update received", "1 lost", "1 straggler"]
        )
        await expect(page.get_by_role("region", name="Notices")).to_contain_text("host-0 left")

        curve = page.get_by_role("img", name="accuracy from 55.0 % to 80.0 % in round 2")
        await curve.focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("region", name="Metrics")).to_contain_text(
            "Round 1: accuracy 55.0 % · worst group"
        )
        await page.get_by_text("Shares, more is better, as a table").click()
        table = page.get_by_role("table", name="Shares, more is better")
        await expect(table.get_by_role("row")).to_have_count(3)

        picks = page.get_by_role("region", name="Who was picked")
        await picks.get_by_role("img", name="Picks of 6 clients in 2 rounds").focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowDown")
        await expect(picks.get_by_role("status")).to_have_text(
            "client-1, round 1: picked, in the model · picked 2× in all"
        )
        await picks.get_by_label("Order of clients").select_option("picks")
        await picks.get_by_role("img", name="Picks of 6 clients in 2 rounds").focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_role("row", name="client-1")).to_contain_text("uniform")
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await page.get_by_role("button", name="Who was picked in round 2, and why").click()
        await dialog.get_by_role("button", name="Close").click()

        mix = page.get_by_role("region", name="Labels of the cohorts")
        await mix.get_by_role("img", name="Label mix of 2 cohorts").focus()
        await page.keyboard.press("ArrowRight")
        await expect(mix.get_by_role("status")).to_contain_text("Round 1: entropy")
        privacy = page.get_by_role("region", name="Privacy spent")
        await expect(privacy).to_contain_text("All clients have spent the same")
        assert tab.complaints == []


async def test_stop_and_resume_buttons_ask_for_confirmation(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await tab.go(RUN_PATH)
        await page.get_by_role("button", name="Stop", exact=True).click()
        await page.get_by_role("button", name="Cancel").click()
        assert service.stopped == []
        await page.get_by_role("button", name="Stop", exact=True).click()
        await page.get_by_role("button", name="Stop the run").click()
        await expect(page.locator("#said")).to_have_text("The run is stopped.")
        assert service.stopped == [RUN_ID]
    async with opened_tab(browser, server.address) as tab:
        await tab.page.get_by_role("link", name="tea").click()
        await expect(tab.page.get_by_role("region", name="Round 3")).to_be_visible()
        assert service.watched == 1  # both tabs share one watch


async def test_stopped_run_can_be_resumed_and_started_again(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    stopped = status(RunState.RUN_STATE_STOPPED, committed=2, reason="by an operator")
    service.runs = [stopped.status]
    service.watches = [[*history(), stopped], [status(committed=2), under_way()]]
    service.started = [FIRST_DRAFT]
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await tab.go(RUN_PATH)
        await expect(page.locator("main")).to_contain_text("by an operator")
        await page.get_by_role("button", name="Resume").click()
        await page.get_by_role("button", name="Resume the run").click()
        await expect(page.get_by_role("region", name="Round 3")).to_be_visible()
        assert service.resumed == [RUN_ID]
        await page.get_by_role("link", name="Start again").click()
        await expect(page.get_by_role("textbox", name="Run file")).to_have_value(FIRST_DRAFT)
        assert tab.complaints == []


async def test_unknown_run_shows_an_error_and_is_not_polled_forever(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    service.missing = "zzz"
    async with opened_tab(browser, server.address) as tab:
        await tab.go("/runs/zzz")
        main = tab.page.get_by_role("main")
        await expect(main.get_by_role("heading", name="There is no such run")).to_be_visible()
        await expect(main).to_contain_text("no run begins with 'zzz'")
        await main.get_by_role("link", name="All runs").click()
        await expect(tab.page.get_by_role("link", name="tea")).to_be_visible()
        assert service.watched <= 3


async def test_form_starts_a_run_and_shows_errors_at_its_fields(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await page.get_by_role("link", name="Start a run").first.click()
        file = page.get_by_role("textbox", name="Run file")
        rounds, selector = (
            page.get_by_label("Rounds", exact=True),
            page.get_by_label("Selector", exact=True),
        )
        await rounds.fill("0")
        await expect(rounds).to_have_attribute("aria-invalid", "true")
        await expect(page.locator("#field-rounds-wrong")).to_contain_text("greater than or equal")
        await expect(page.locator("#file-problems")).to_contain_text("Line 2")
        await page.get_by_role("button", name="Line 2").click()
        await expect(file).to_be_focused()
        await page.get_by_role("button", name="Start the run").click()
        await expect(page.get_by_role("alert")).to_contain_text("The run was not started")
        await rounds.fill("4")
        await expect(rounds).not_to_have_attribute("aria-invalid", "true")
        await selector.fill("powr")
        await page.get_by_role("button", name="Start the run").click()
        await expect(page.locator("#field-selector-name-wrong")).to_have_text(
            "'powr' is not installed"
        )
        await expect(selector).to_be_focused()
        await selector.fill("uniform")
        await page.get_by_label("Name", exact=True).fill("green tea")
        await expect(file).to_have_value(
            FIRST_DRAFT.replace("rounds = 30", "rounds = 4").replace("first-look", "green tea")
        )
        await file.press("Control+Enter")
        await page.wait_for_url(f"**{RUN_PATH}")
        assert 'name = "green tea"' in service.started[0]
        await page.go_back()
        await page.get_by_role("button", name="Every setting, explained").click()
        await expect(file).to_have_value(re.compile("# Number of rounds after which the run ends."))
        # The browser itself logs the refusal, status 400, as an error.
        refused = [each for each in tab.complaints if "400" not in each]
        assert refused == []


async def test_hosts_can_be_searched_and_runs_compared(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    other = status(RunState.RUN_STATE_FINISHED, committed=2).status
    other.run_id, other.name = "77777777", "coffee"
    service.runs = [status(committed=2).status, other]
    service.started = [FIRST_DRAFT]
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await page.get_by_role("link", name="Hosts").click()
        await expect(page.get_by_role("row", name="host-0")).to_contain_text("NVIDIA H100")
        await expect(page.get_by_role("row", name="host-0")).to_contain_text(
            "coordinator has 0.1.0"
        )
        await page.get_by_label("Find a host").fill("client-5")
        await expect(page.get_by_role("row", name="host-0")).to_have_count(0)
        await page.get_by_text("3 clients", exact=True).click()
        await expect(page.get_by_role("row", name="client-5")).to_be_visible()
        await page.get_by_label("Find a host").fill("unknown")
        await expect(page.get_by_text("No host matches")).to_be_visible()

        await page.get_by_role("link", name="Runs", exact=True).click()
        compare = page.get_by_role("button", name="Compare")
        await expect(compare).to_be_disabled()
        await page.get_by_label(f"Compare tea {RUN_ID}").check()
        await page.get_by_label("Compare coffee 77777777").check()
        await compare.click()
        await expect(page.get_by_role("table", name="Runs side by side")).to_contain_text("80.0 %")
        alike = page.get_by_text("None: the run files differ only in their names")
        await expect(alike).to_be_visible()
        await page.get_by_role("link", name="Runs", exact=True).click()
        await page.get_by_label("Find a run").fill("cof")
        await expect(page.get_by_role("link", name="tea")).to_have_count(0)
        assert tab.complaints == []


async def test_connection_errors_are_shown_and_disappear_when_fixed(
    browser: Browser, service: FakeOperatorService, federation: TestFederation, tmp_path: Path
) -> None:
    mine = {name: tmp_path / name for name in ("certificate", "key")}
    async with AsyncExitStack() as stack:
        coordinator = AsyncExitStack()
        config = await coordinator.enter_async_context(
            running_operator_service(service, federation)
        )
        good = {name: getattr(config.tls, name).read_bytes() for name in mine}
        for name, path in mine.items():
            path.write_bytes(good[name])
        config = config.model_copy(update={"tls": config.tls.model_copy(update=mine)})
        server = await stack.enter_async_context(running_page(config))
        tab = await stack.enter_async_context(opened_tab(browser, server.address))
        await expect(tab.page.locator("#link-state")).to_contain_text("Potluck 0.1.0")
        await coordinator.aclose()
        alert = tab.page.locator("#connection-trouble")
        await expect(alert).to_contain_text("The coordinator does not answer")
        await expect(alert).to_contain_text(f"at {config.coordinator}")
        # The page still shows the runs of the coordinator's earlier answer.
        await expect(tab.page.get_by_role("link", name="tea")).to_be_visible()

        long_ago = datetime.now(UTC) - timedelta(days=30)
        old = tls_files(
            authority.issue(federation.folder, Role.OPERATOR, "old", days=1, now=long_ago)
        )
        for name, path in mine.items():
            path.write_bytes(getattr(old, name).read_bytes())
        await expect(alert).to_contain_text("A certificate can't be used")
        await expect(alert).to_contain_text("expired on")
        await expect(alert).to_contain_text("potluck pki renew")
    async with running_operator_service(service, federation) as config, AsyncExitStack() as stack:
        ending = AsyncExitStack()
        server = await ending.enter_async_context(running_page(config))
        tab = await stack.enter_async_context(opened_tab(browser, server.address))
        await expect(tab.page.get_by_role("link", name="tea")).to_be_visible()
        await ending.aclose()
        await expect(tab.page.locator("#connection-trouble")).to_contain_text(
            "Start `potluck page` again"
        )


async def test_plots_show_values_under_the_mouse_and_rounds_can_be_searched(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    many = [member(number, TRAINING) for number in range(50)]
    first, second = history(clients=50)
    covering(first, 20, 50, 800, partial=True)
    covering(second, 50, 50, 2000, partial=False)
    service.watches = [
        [status(committed=2), first, second, progress(3, "train", *many)],
        [status(committed=2), first, second],
    ]
    service.epsilons = {"client-3": 3.0}
    async with opened_tab(browser, server.address) as tab:
        page = tab.page
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")  # follow the link that skips to the content
        await expect(page.locator("#content")).to_be_focused()
        await tab.go(RUN_PATH)
        live = page.get_by_role("region", name="Round 3")
        await expect(live.get_by_role("img", name="50 clients: 50 training")).to_be_visible()
        await live.get_by_role("button", name="Show all 50 clients").click()
        await expect(live.get_by_role("row")).to_have_count(51)
        await live.get_by_role("button", name="Show the noteworthy only").click()
        await expect(live.get_by_role("row")).to_have_count(16)

        behind = "20 of 50 clients, 800 samples, partial"
        curve = page.get_by_role("img", name=f"accuracy from 55.0 % ({behind}) to 80.0 % in round")
        paper = await page.evaluate("getComputedStyle(document.body).getPropertyValue('--card')")
        # Points of both lines in round 1.
        assert [fill for fill, _ in await dots(curve)] == [paper] * 2
        await curve.focus()
        await page.keyboard.press("End")
        full = (await dots(curve))[2:]  # points of both lines in round 2
        assert [fill for fill, _ in full] == [stroke for _, stroke in full] != [paper] * 2
        await curve.hover(position={"x": 60, "y": 60})
        measures = page.get_by_role("region", name="Metrics")
        await expect(measures).to_contain_text(f"Round 1: accuracy 55.0 % ({behind})")
        traffic = page.get_by_role("region", name="Time and traffic")
        await traffic.get_by_role("img", name="down").focus()
        await page.keyboard.press("End")
        await expect(traffic).to_contain_text("Round 2: down 1.2 MB · up 800 kB")

        picks = page.get_by_role("region", name="Who was picked")
        await picks.get_by_role("img", name="Picks of 50 clients").click(
            position={"x": 300, "y": 30}
        )
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_role("row")).to_have_count(51)
        await dialog.get_by_label("Find a client or a reason").fill("client-49")
        await expect(dialog.get_by_role("row")).to_have_count(2)
        await page.mouse.click(5, 5)  # outside the dialog
        await expect(dialog).to_have_count(0)
        mix = page.get_by_role("region", name="Labels of the cohorts")
        await mix.get_by_role("img", name="Label mix of 2 cohorts").hover(
            position={"x": 9, "y": 30}
        )
        await expect(mix.get_by_role("status")).to_contain_text("Round 1: entropy")
        await mix.get_by_text("as a table").click()
        await expect(mix.get_by_role("row")).to_have_count(3)

        privacy = page.get_by_role("region", name="Privacy spent")
        strip = privacy.get_by_role("img", name="Privacy loss of clients, from 1.000 to 3.000")
        await expect(strip).to_be_visible()
        await privacy.get_by_text("Privacy by client, as a table").click()
        await expect(privacy.get_by_role("row").nth(1)).to_contain_text("client-3")
        for scheme, ground in (("dark", "rgb(19, 20, 18)"), ("light", "rgb(248, 247, 244)")):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of its words
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        assert tab.complaints == []


async def test_empty_and_failed_views_show_a_remedy(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    service.missing = RUN_ID
    async with opened_tab(browser, server.address, width=390) as tab:
        page = tab.page
        main = page.get_by_role("main")
        await tab.go("/elsewhere")
        await expect(main.get_by_role("heading", name="This page does not exist")).to_be_visible()
        await main.get_by_role("link", name="All runs").click()
        await expect(main.get_by_role("link", name="tea")).to_be_visible()
        await tab.go("/compare?run=a")
        await expect(main).to_contain_text("select from 2 to 6 runs to compare")
        await main.get_by_role("link", name="Choose runs").click()
        service.runs = []
        await expect(main.get_by_role("heading", name="No runs yet")).to_be_visible()
        await main.get_by_role("link", name="Start the first run").click()
        await expect(page.get_by_role("textbox", name="Run file")).to_be_visible()
        assert await fits(page)


async def test_server_fault_and_too_many_windows_show_a_banner_until_resolved(
    browser: Browser,
    server: OpenPage,
    service: FakeOperatorService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*values: object) -> None:
        raise ZeroDivisionError("no members")

    async with opened_tab(browser, server.address) as tab:
        page, followed = tab.page, "The web UI's server failed"
        with monkeypatch.context() as patched:
            patched.setattr(run_watch, "shown_live", wrong)
            patched.setattr(run_watch, "FAULT_SECONDS", 1.0)
            await tab.go(RUN_PATH)
            fault = page.get_by_role("main").get_by_role("alert")
            await expect(fault).to_contain_text("ZeroDivisionError: no members")
            await expect(fault).to_contain_text("what was known before")
            await expect(page.get_by_role("region", name="Metrics")).to_be_visible()
        await expect(page.get_by_role("region", name="Round 3")).to_be_visible()
        await expect(fault).to_have_count(0)

        banner = page.locator("#connection-trouble")
        with monkeypatch.context() as patched:
            patched.setattr(overview_watch, "shown_status", wrong)
            await expect(banner).to_contain_text(followed)
        await expect(banner).to_have_count(0)
        monkeypatch.setattr(event_stream, "FULL_SECONDS", 1)
        with monkeypatch.context() as patched:
            patched.setattr(page_guard.OpenStreams, "counted", lambda *_: nullcontext(False))
            await tab.go("/")
            await expect(banner).to_contain_text("until you close other windows")
        await expect(page.get_by_role("link", name="tea")).to_be_visible()
        await expect(banner).to_have_count(0)


async def test_hidden_tab_closes_its_event_streams(
    browser: Browser, server: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, streams = page_guard.OpenStreams.counted, list[str]()

    @contextmanager
    def noted(self: page_guard.OpenStreams, of: str) -> Iterator[bool]:
        with counted(self, of) as has_room:
            streams.append(of)
            try:
                yield has_room
            finally:
                streams.remove(of)

    monkeypatch.setattr(page_guard.OpenStreams, "counted", noted)
    async with opened_tab(browser, server.address) as tab:
        for path in ("/", RUN_PATH):
            await tab.go(path)
            await until(lambda: len(streams) == 1)
            await tab.page.evaluate(SEEN, False)
            await until(lambda: not streams)
            await tab.page.evaluate(SEEN, True)
            await until(lambda: len(streams) == 1)
        await expect(tab.page.get_by_role("region", name="Round 3")).to_be_visible()


async def test_thousand_clients_are_readable_on_a_phone_in_dark_mode(
    browser: Browser, server: OpenPage, service: FakeOperatorService
) -> None:
    many = [member(number, TRAINING, number / 1000) for number in range(1000)]
    service.watches = [
        [status(committed=30), *history(clients=1000, rounds=30), progress(31, "train", *many)]
    ]
    async with opened_tab(browser, server.address, width=390, scheme="dark") as tab:
        page = tab.page
        for path, seen in (("/", "tea"), ("/hosts", "host-1"), ("/start", "Run file")):
            await tab.go(path)
            await expect(page.locator("main")).to_contain_text(seen)
            assert await fits(page), path
            assert await page.locator("h1").count() == 1
        await tab.go(RUN_PATH)
        live = page.get_by_role("region", name="Round 31")
        await expect(live.get_by_role("row")).to_have_count(16)
        await live.get_by_role("button", name="Show all 1000 clients").click()
        await expect(live.get_by_role("row")).to_have_count(1001)
        assert await fits(page)
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(19, 20, 18)"
        unlabelled = await page.evaluate(
            "[...document.querySelectorAll('input,select,textarea,button,canvas,svg[role=img]')]"
            ".filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()))"
            ".length"
        )
        assert unlabelled == 0
        assert tab.complaints == []


async def test_numbers_are_formatted_as_in_the_terminal(browser: Browser, server: OpenPage) -> None:
    sizes = [0, 999, 1000, 1499, 9949, 9951, 23_400_000, 999_499_999, 7.2e15]
    durations = [0.0, 0.44, 9.94, 9.96, 59.4, 61, 3599, 3661, 86_399, 90_061]
    measures = [[0.931, "share"], [0.27123, ""], [3.4, "mm"], [12.0, ""], [123.456, "mm"]]
    async with opened_tab(browser, server.address) as tab:
        found = await tab.page.evaluate(
            "async ([sizes, durations, measures]) => {"
            " const is = await import('/static/format.js');"
            " return [sizes.map(is.bytes), durations.map(is.seconds),"
            " measures.map(([value, unit]) => is.measure(value, unit)),"
            " [0, 0.25, 100, 1000, 1500, 2.5e7].map(is.tick)]; }",
            [sizes, durations, measures],
        )
    assert json.loads(json.dumps(found)) == [
        [readable_bytes(each) for each in sizes],
        [readable_seconds(each) for each in durations],
        [readable_measure(value, unit) for value, unit in measures],  # type: ignore[arg-type]  # of pairs
        ["0", "0.25", "100", "1000", "1500", "2.5e+7"],
    ]
