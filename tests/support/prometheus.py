"""A real Prometheus for tests, with Potluck's own rules and dashboards, at a faster pace.

Rules are as shipped, except that windows of minutes become seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from potluck.deploy.local.demo_files import reserved_port
from potluck.deploy.local.processes import TetheredProcess

Found = TypeVar("Found")

ASSETS = Path(__file__).parents[2] / "deploy" / "assets"
PATIENCE_SECONDS = 240.0
WINDOW = "20s"
_LOOK_SECONDS = 0.3
_HURRY = (
    (r"\[(5m|10m|15m)\]", f"[{WINDOW}]"),
    (r"\[(1h|1d)\]", "[60s]"),
    (r"> 900\b", "> 6"),
    (r"< 600\b", "< 20"),
)


def why_not() -> str:
    """Return why no Prometheus can be started here; empty if one can."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        return "prometheus and promtool are not installed (Debian: apt-get install prometheus)"
    return ""


@dataclass(frozen=True)
class Shown:
    """A query of a dashboard's panel."""

    dashboard: str
    panel: str
    expression: str


def shipped_queries() -> list[Shown]:
    """Return all queries of all panels, with their variables filled in."""
    found = []
    for path in sorted((ASSETS / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$__rate_interval", WINDOW)
                found.append(Shown(path.stem, panel["title"], expression.replace("$run", ".*")))
    return found


def shipped_rules() -> Iterator[Mapping[str, Any]]:
    """Yield all recording rules and alerts that come with Potluck."""
    for path in sorted((ASSETS / "prometheus").glob("*.rules.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def hurried_rules(folder: Path) -> Path:
    """Write the shipped rules with short times into `folder`; return the pattern of their paths."""
    folder.mkdir(exist_ok=True)
    for path in sorted((ASSETS / "prometheus").glob("*.rules.yml")):
        text = path.read_text()
        for pattern, short in _HURRY:
            text = re.sub(pattern, short, text)
        (folder / path.name).write_text(re.sub(r"for: \d+m", "for: 1s", text))
    return folder / "*.rules.yml"


def hurried_config(
    folder: Path, scrape_configs: Sequence[Mapping[str, Any]], *, rules: str = ""
) -> Path:
    """Write the configuration of a Prometheus that scrapes every second, with the hurried rules.

    rules: path at which Prometheus finds the folder `rules`, if it differs from `folder`/rules.
    """
    path = folder / "prometheus.yml"
    hurried = hurried_rules(folder / "rules")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [f"{rules}/{hurried.name}" if rules else str(hurried)],
        "scrape_configs": list(scrape_configs),
    }
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current samples of an expression, without NaN."""
        data = await self._get("query", query=expression)
        return [sample for sample in data["result"] if sample["value"][1] != "NaN"]

    async def value(self, expression: str) -> float:
        """Wait until an expression has one sample, and return it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := await self._values(expression)) != 1:  # noqa: ASYNC110  # no signal
                await asyncio.sleep(_LOOK_SECONDS)
        return found[0]

    async def alerts(self, *, instance: str = "") -> set[str]:
        """Return the names of the alerts that fire; if `instance` is given, only for this
        instance."""
        labels = [
            alert["labels"]
            for alert in (await self._get("alerts"))["alerts"]
            if alert["state"] == "firing"
        ]
        return {
            each["alertname"] for each in labels if not instance or each.get("instance") == instance
        }

    async def _values(self, expression: str) -> list[float]:
        return [float(sample["value"][1]) for sample in await self.query(expression)]

    async def _summaries(self, name: str) -> list[str]:
        """Return the summaries of an alert that fires, one per series."""
        alerts = (await self._get("alerts"))["alerts"]
        return [
            alert["annotations"]["summary"]
            for alert in alerts
            if alert["labels"]["alertname"] == name and alert["state"] == "firing"
        ]

    async def broken_rules(self) -> list[str]:
        """Return the rules that could not be evaluated, with the errors."""
        groups = (await self._get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == len(list(shipped_rules()))
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]

    async def _targets_up(self) -> dict[str, int]:
        """Return the number of targets scraped successfully last, by job."""
        found = await self.query("sum by (job) (up)")
        return {sample["metric"]["job"]: int(sample["value"][1]) for sample in found}

    async def until_up(self, targets: dict[str, int]) -> None:
        """Wait until these numbers of targets, by job, and no others are scraped successfully."""
        await self._until(self._targets_up, lambda found: found == targets)

    async def until_value(self, expression: str, expected: Any) -> None:
        """Wait until the only sample of an expression equals this number."""
        await self._until(lambda: self._values(expression), lambda found: found == [expected])

    async def until_summary(self, name: str, part: str) -> None:
        """Wait until an alert fires for one series, and its summary contains this text."""
        await self._until(
            lambda: self._summaries(name), lambda found: len(found) == 1 and part in found[0]
        )

    async def _until(
        self, read: Callable[[], Awaitable[Found]], wanted: Callable[[Found], bool]
    ) -> None:
        """Wait until what is read is wanted. It lags behind, and on a busy machine scrapes fail."""
        found = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not wanted(found := await read()):  # noqa: ASYNC110  # no signal
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE_SECONDS:g} s, but: {found}") from None

    async def until(self, expression: str) -> None:
        """Wait until an expression has samples."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self._try(expression):  # noqa: ASYNC110  # it gives no signal
                await asyncio.sleep(_LOOK_SECONDS)

    async def until_firing(self, *names: str, instance: str = "") -> None:
        """Wait until all of these alerts fire; if `instance` is given, for this instance."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not set(names) <= await self.alerts(instance=instance):  # noqa: ASYNC110  # no signal
                await asyncio.sleep(_LOOK_SECONDS)

    async def until_resolved(self, *names: str, instance: str = "") -> None:
        """Wait until none of these alerts fires; if `instance` is given, for this instance."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while set(names) & await self.alerts(instance=instance):  # noqa: ASYNC110  # no signal
                await asyncio.sleep(_LOOK_SECONDS)

    async def _try(self, expression: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):  # Prometheus may not listen yet
            return await self.query(expression)
        return []

    async def _get(self, what: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urlencode(parameters)}"

        def get() -> Any:
            with urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]

        return await asyncio.to_thread(get)


async def check_shown(prometheus: Prometheus, *, excused: Mapping[str, str]) -> None:
    """Check that every panel's query and every rule works and has data. excused: exceptions, each a
    part of the expression, with the condition that it waits for."""
    assert await prometheus.broken_rules() == []
    waiting = [
        (query.expression, f"{query.dashboard}: {query.panel}") for query in shipped_queries()
    ]
    waiting += [
        (rule["record"], "a recording rule") for rule in shipped_rules() if "record" in rule
    ]
    waiting = [
        (expression, where)
        for expression, where in waiting
        if not any(part in expression for part in excused)
    ]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while waiting:
                waiting = [each for each in waiting if not await prometheus.query(each[0])]
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"no data: {waiting}") from None


@contextlib.asynccontextmanager
async def prometheus_running(folder: Path, config: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with this configuration; its data are in `folder`."""
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        process = await TetheredProcess.start(
            "prometheus",
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            log=folder / "prometheus.log",
        )
        try:
            prometheus = Prometheus(address)
            await prometheus.until("vector(1)")
            yield prometheus
        finally:
            await process.stop()
