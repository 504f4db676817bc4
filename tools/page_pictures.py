"""Takes the docs' pictures of the web UI in Debian's Chromium, from a federation it starts here.

    .venv/bin/python tools/page_pictures.py docs/images

The pictures show the two finished runs of `potluck demo`, and a third run that continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright

from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override
from potluck.page.page_access import PageAccess
from potluck.page.page_app import PageServer
from potluck.page.page_command import serving_page
from potluck.rpc.v1.operator_pb2 import RunState

CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
WIDE, PHONE = 1180, 390
ROUNDS = 40
SEED = 7
UNDER_WAY = ("name=under-way", "selector.name=fedentopt", "rounds=12", "training.epochs=400")


async def finished(client: OperatorClient, run_id: str) -> None:
    """Wait until a run is finished."""
    async for event in client.watch_run(run_id):
        if event.status.state == RunState.RUN_STATE_FINISHED:
            return


@contextlib.asynccontextmanager
async def tab(
    browser: Browser, access: PageAccess, origin: str, scheme: Literal["light", "dark"], width: int
) -> AsyncIterator[Page]:
    """Yield a tab of a new browser profile, with the web UI open."""
    context = await browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme=scheme, locale="en-GB"
    )
    page = await context.new_page()
    await page.goto(f"{origin}/?token={access.token}")
    await page.wait_for_selector("td a.name")
    yield page
    await context.close()


def write_texts(path: Path, texts: Mapping[str, list[str]]) -> None:
    """Write the texts that a picture shows; a test compares them with the code."""
    path.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")


async def take(folder: Path) -> None:
    """Write all pictures into `folder`."""
    options = DemoOptions(
        task="digits",
        task_options={"alpha": 0.1, "digit_groups": True, "seed": SEED},
        selector="uniform",
        strategy="fedavg",
        clients=24,
        hosts=4,
        count=6,
        rounds=ROUNDS,
        seed=SEED,
        device="cpu",
        disclosure={"simulation_seed": SEED},
        root=True,
    )
    with tempfile.TemporaryDirectory(prefix="potluck-pictures-") as place:
        with reserved_port() as port:
            files = write_demo_files(Path(place) / "federation", options, port)
        async with LocalFederation(files) as federation:
            await federation.start()
            async with federation.operator() as client:
                await pictures(client, PageServer(files.operator, access := PageAccess()),
                               access, files.run_file, folder)  # fmt: skip


async def pictures(
    client: OperatorClient, pages: PageServer, access: PageAccess, run_file: str, folder: Path
) -> None:
    """Start runs and take their pictures."""
    named = {"by-chance": "uniform", "even-labels": "dc-balanced"}
    runs = []
    for name, selector in named.items():
        text = override(run_file, [f"name={name}", f"selector.name={selector}"], source="runs")
        runs.append(await client.start_run(text))
        await finished(client, runs[-1])
    under_way = await client.start_run(override(run_file, UNDER_WAY, source="runs"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with (
            serving_page(pages, pages.app(), listening),
            async_playwright() as playwright,
        ):
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            async with tab(browser, access, origin, "light", WIDE) as page:
                await page.goto(f"{origin}/runs/{under_way}")
                await page.wait_for_selector("#live .members tr:nth-child(6)")
                await page.wait_for_function(
                    "() => [...document.querySelectorAll('#live .bar')]"
                    ".filter((each) => each.ariaValueNow > 20).length > 2"
                )
                await page.screenshot(path=folder / "page-round.png")
                texts = {
                    "headers": await page.locator("#live .members th").all_inner_texts(),
                    "cells": await page.locator("#live .members tr td").all_inner_texts(),
                }
                write_texts(folder / "page-round.json", texts)
                await client.stop_run(under_way)
                await page.goto(f"{origin}/runs/{runs[1]}")
                await page.wait_for_selector("#mix canvas")
                await page.screenshot(path=folder / "page-run.png", full_page=True)
                await page.goto(f"{origin}/start")
                await page.fill("#field-clients_per_round", "0")
                await page.wait_for_selector("[aria-invalid=true]")
                await page.screenshot(path=folder / "page-start.png")
                await page.goto(f"{origin}/compare?run={runs[0]}&run={runs[1]}")
                await page.wait_for_selector("#measures path")
                await page.screenshot(path=folder / "page-compare.png")
            async with tab(browser, access, origin, "dark", WIDE) as page:
                await page.goto(f"{origin}/runs/{runs[1]}")
                await page.wait_for_selector("#picks canvas")
                await page.wait_for_selector("#mix canvas")
                await page.screenshot(path=folder / "page-dark.png")
            async with tab(browser, access, origin, "light", PHONE) as page:
                await page.goto(f"{origin}/runs/{runs[0]}")
                await page.wait_for_selector("#picks canvas")
                await page.screenshot(path=folder / "page-phone.png")
            await browser.close()


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
