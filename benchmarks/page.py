"""Cost of the web UI: its first paint with many clients, and a round while many pages are open.

python benchmarks/page.py --clients 1000 --clients-per-round 100 --rounds 60 --pages 50

There is one federation and one run. Blocks of rounds with `--pages` open pages alternate with
blocks without pages, so that other load on the machine slows both alike. The cost is the median
over the blocks with pages, each compared with its neighbours. If the machine is too busy for that,
compare the processor seconds of the coordinator and of the web UI's server, as a share of a round's
time. The first round of a block is not counted. A page is simulated by the requests a browser sends
to that server, in another process; drawing takes the browser's time, not the coordinator's. The
first paint is that of the run's page in Chromium, from the navigation until everything is drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

BLOCK = 3
"""Number of measured rounds per block."""
_REFRESH_SECONDS = 5.0
CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
DRAWN = """() => {
    const [mark] = performance.getEntriesByName('run drawn');
    const [paint] = performance.getEntriesByName('first-contentful-paint');
    return mark && paint ? [paint.startTime, Math.max(paint.startTime, mark.startTime)] : null;
}"""


@contextlib.asynccontextmanager
async def page_process(files: DemoFiles) -> AsyncIterator[tuple[int, str, str]]:
    """Run `potluck page` in a process; yield the process id, the address and a browser's cookie."""
    operator = files.operator
    arguments = {
        "--coordinator": operator.coordinator,
        "--certificate": operator.tls.certificate,
        "--key": operator.tls.key,
        "--authority": operator.tls.authority,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy", "page", "--no-open"),
        *(str(part) for pair in arguments.items() for part in pair),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode()
        [(origin, token)] = re.findall(r"(http://\S+)/\?token=(\S+)", said)
        reader, writer = await request(origin, f"/?token={token}", "")
        head = (await reader.read()).decode()
        writer.close()
        [cookie] = re.findall(r"set-cookie: ([^;]+)", head, re.IGNORECASE)
        yield process.pid, origin, cookie
    finally:
        process.terminate()
        await process.wait()


async def request(
    origin: str, path: str, cookie: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host = origin.removeprefix("http://")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", f"Cookie: {cookie}", "Connection: close"]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    return reader, writer


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class OpenPages:
    """Simulated pages of a run: send a browser's requests, and read and count the answers."""

    def __init__(self, origin: str, cookie: str, run_id: str) -> None:
        self._origin, self._cookie, self._run_id = origin, cookie, run_id
        self._reading: list[asyncio.Task[None]] = []
        self.received = 0

    async def open(self, many: int) -> None:
        for _ in range(many):
            self._reading.append(asyncio.create_task(self._listen()))
            self._reading.append(asyncio.create_task(self._ask()))

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._reading = []

    async def _listen(self) -> None:
        await self._read(f"/api/events?run={self._run_id}")

    async def _ask(self) -> None:
        """Request the disclosed label counts in a loop, at the interval of `refresh.js`."""
        while True:
            await self._read(f"/api/runs/{self._run_id}/disclosed")
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _read(self, path: str) -> None:
        reader, writer = await request(self._origin, path, self._cookie)
        try:
            while data := await reader.read(1 << 16):
                self.received += len(data)
        finally:
            writer.close()


async def first_paint(origin: str, cookie: str, run_id: str) -> tuple[float, float]:
    """Return the seconds until the first paint of the run's page, and until it is complete."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        name, _, value = cookie.partition("=")
        await context.add_cookies([{"name": name, "value": value, "url": origin}])
        page = await context.new_page()
        await page.goto(f"{origin}/runs/{run_id}")
        await page.wait_for_selector("#picks canvas")
        while (found := await page.evaluate(DRAWN)) is None:  # noqa: ASYNC110  # as a person waits
            await asyncio.sleep(0.05)
        await browser.close()
    return found[0] / 1000, found[1] / 1000


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=arguments.clients,
        hosts=2,
        count=arguments.clients_per_round,
        rounds=arguments.rounds,
        seed=1,
        device="cpu",
    )
    with reserved_port() as port:
        files = write_demo_files(folder, options, port)
    async with AsyncExitStack() as stack:
        federation = await stack.enter_async_context(LocalFederation(files))
        await federation.start()
        coordinator = await federation.until_ready()
        client = await stack.enter_async_context(federation.operator())
        server, origin, cookie = await stack.enter_async_context(page_process(files))
        run_id = await client.start_run(files.run_file)
        pages = OpenPages(origin, cookie, run_id)
        blocks: list[list[float]] = []
        computed: list[tuple[float, float]] = []
        before = 0.0, 0.0
        async with aclosing(client.watch_run(run_id)) as events:
            async for event in events:
                if event.WhichOneof("event") != "committed":
                    continue
                block, place = divmod(event.committed.round - 1, BLOCK + 1)
                if place == 0:
                    blocks.append([])
                    before = processor_seconds(coordinator), processor_seconds(server)
                else:
                    blocks[-1].append(event.committed.seconds)
                if place == BLOCK:
                    after = processor_seconds(coordinator), processor_seconds(server)
                    computed.append((after[0] - before[0], after[1] - before[1]))
                    # Alternate: the next block is with pages if this one was without.
                    await (pages.open(arguments.pages) if block % 2 == 0 else pages.close())
        await pages.close()
        painted, drawn = await first_paint(origin, cookie, run_id)
    whole = [block for block in blocks if len(block) == BLOCK]
    ratio, low, high = cost(whole)
    usual = BLOCK * statistics.median(each for block in whole[::2] for each in block)
    coordinators = [each for each, _ in computed]
    more = statistics.fmean(coordinators[1::2]) - statistics.fmean(coordinators[::2])
    return {
        "coordinator_share": more / usual,
        "server_share": statistics.fmean(each for _, each in computed[1::2]) / usual,
        "first_paint_seconds": painted,
        "drawn_seconds": drawn,
        "round_with_pages": ratio,
        "lower_quartile": low,
        "upper_quartile": high,
        "megabytes_to_pages": pages.received / 1e6,
    }


def cost(blocks: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the ratio of a round's seconds with pages to those without: median and quartiles.

    Blocks alternate, starting without pages. Each block with pages is compared with the mean of its
    neighbours without.
    """
    medians = [statistics.median(block) for block in blocks]
    ratios = [
        medians[place] / statistics.fmean([medians[place - 1], medians[place + 1]])
        for place in range(1, len(medians) - 1, 2)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the first paint, and rounds with and without open pages."
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--clients-per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="potluck-page-") as folder:
        found = asyncio.run(measure(arguments, Path(folder) / "federation"))
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table(
        title=f"{arguments.clients} clients, {arguments.clients_per_round} a round", box=None
    )
    for title in ("", "measured", "budget"):
        table.add_column(title, justify="left" if not title else "right")
    table.add_row("first paint", f"{found['first_paint_seconds']:.2f} s", "1 s")
    table.add_row("all drawn", f"{found['drawn_seconds']:.2f} s", "")
    table.add_row(
        f"a round with {arguments.pages} pages open, by one without",
        f"{found['round_with_pages']:.3f} "
        f"({found['lower_quartile']:.3f} to {found['upper_quartile']:.3f})",
        "1.02",
    )
    table.add_row(
        "the coordinator computes more",
        f"{found['coordinator_share']:.2%}",
        "2 %",
    )
    table.add_row("the page's server computes", f"{found['server_share']:.2%}", "")
    table.add_row("sent to pages", f"{found['megabytes_to_pages']:.1f} MB", "")
    Console().print(table)


if __name__ == "__main__":
    main()
