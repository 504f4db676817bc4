"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MILLISECONDS = 60_000
expect.set_options(timeout=PATIENCE_MILLISECONDS)


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, chromium_sandbox=False
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """A tab of a new browser profile. complaints: the errors in its console."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)

    async def go(self, path: str) -> None:
        await self.page.goto(f"{self.origin}{path}")


@contextlib.asynccontextmanager
async def opened_tab(
    browser: Browser,
    address: str,
    *,
    width: int = 1280,
    scheme: Literal["light", "dark"] = "light",
    scale: float = 1,
) -> AsyncIterator[Tab]:
    """Open a tab with the address that `potluck page` prints."""
    context = await browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        device_scale_factor=scale,
        locale="en-GB",
        reduced_motion="reduce",
    )
    try:
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        tab = Tab(page, address.partition("/?")[0])
        page.on(
            "console",
            lambda said: tab.complaints.append(said.text) if said.type == "error" else None,
        )
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        await page.goto(address)
        await page.wait_for_url(f"{tab.origin}/")
        await page.wait_for_selector("main h1")
        yield tab
    finally:
        await context.close()
