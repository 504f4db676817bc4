"""Web application of the web UI's server: serves the page, JSON, and events as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from potluck.common.errors import (
    ConfigurationError,
    IdentityError,
    NotFoundError,
    PotluckError,
    RunError,
    UnreachableError,
)
from potluck.common.run_file.runfile import example_run_file
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.page.coordinator_link import CoordinatorLink, PageFaultError, SharedAnswers, trouble_of
from potluck.page.disclosed_shown import shown_disclosures
from potluck.page.event_stream import Listener, too_many
from potluck.page.hosts_shown import shown_hosts
from potluck.page.overview_watch import OverviewWatch
from potluck.page.page_access import PageAccess
from potluck.page.page_guard import MOST_STREAMS, SESSION, OpenStreams, PageGuard
from potluck.page.page_shapes import (
    DraftSent,
    FormShown,
    Problem,
    Refused,
    RunFileShown,
    Started,
)
from potluck.page.run_draft import FIRST_DRAFT, drafted, form_fields, refused
from potluck.page.run_shown import MOST_ROUNDS, MOST_RUNS, compared, shown_details
from potluck.page.run_watch import RunWatch, RunWatches

STATIC = Path(__file__).parent / "static"
SHARED_SECONDS = 4.0
"""Maximum age in seconds of an answer that pages share; a single page asks less often than this."""
_STATUSES = {
    NotFoundError: 404,
    UnreachableError: 502,
    IdentityError: 502,
    RunError: 409,
    PageFaultError: 500,
}
_VIEWS = ("/", "/runs/{run}", "/hosts", "/start", "/compare")


class RunRefusedError(ConfigurationError):
    """The coordinator refused a run file; the error holds the file's problems by field."""

    def __init__(self, message: str, problems: Sequence[Problem]) -> None:
        super().__init__(message)
        self.problems = list(problems)


class PageServer:
    """The request handlers and their shared state. Used on one event loop."""

    def __init__(self, config: OperatorConfig, access: PageAccess) -> None:
        self._link = CoordinatorLink(config)
        self._watches = RunWatches(self._link)
        self._overview = OverviewWatch(self._link, self._watches)
        self._shared = SharedAnswers[BaseModel](SHARED_SECONDS)
        self._access = access
        self._streams = OpenStreams(MOST_STREAMS)

    def app(self) -> PageGuard:
        """Return the application behind its guard."""
        starlette = Starlette(
            routes=[
                *(Route(path, self._page) for path in _VIEWS),
                Mount(
                    "/api",
                    routes=[
                        Route("/events", self._events),
                        Route("/overview", _answered(self._overview_now)),
                        Route("/hosts", _answered(self._hosts)),
                        Route("/form", _answered(self._form)),
                        Route("/compare", _answered(self._compare)),
                        Route("/draft", _answered(self._draft), methods=["POST"]),
                        Route("/runs", _answered(self._start), methods=["POST"]),
                        Route("/runs/{run}", _answered(self._run)),
                        Route("/runs/{run}/rounds/{round:int}", _answered(self._round)),
                        Route("/runs/{run}/disclosed", _answered(self._disclosed)),
                        Route("/runs/{run}/file", _answered(self._file)),
                        Route("/runs/{run}/stop", _answered(self._stop), methods=["POST"]),
                        Route("/runs/{run}/resume", _answered(self._resume), methods=["POST"]),
                    ],
                ),
                Mount("/static", StaticFiles(directory=STATIC)),
                Route("/{path:path}", self._no_such_page),
            ],
            lifespan=self._lifespan,
        )
        return PageGuard(starlette, self._access)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._link:
            polling = asyncio.create_task(self._overview.poll())
            try:
                yield
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await self._watches.close()

    async def end_streams(self) -> None:
        """End the event streams of all pages, so that the server can stop."""
        await self._overview.close()
        await self._watches.close()

    # The page and its events ------------------------------------------------------------------

    async def _page(self, _: Request) -> Response:
        return FileResponse(STATIC / "page.html", media_type="text/html")

    async def _no_such_page(self, _: Request) -> Response:
        """Return the web UI's document, which shows that the address is unknown and links back."""
        return FileResponse(STATIC / "page.html", status_code=404, media_type="text/html")

    async def _events(self, request: Request) -> Response:
        run_id = request.query_params.get("run")
        watch = self._watches.of(run_id) if run_id else None

        def all_anew() -> list[bytes]:
            return [*self._overview.all_anew(), *(watch.all_anew() if watch else ())]

        async def events() -> AsyncIterator[bytes]:
            listener = Listener(all_anew)
            with contextlib.ExitStack() as listening:
                if not listening.enter_context(self._streams.counted(request.scope[SESSION])):
                    yield too_many()
                    return
                listening.enter_context(self._overview.listening(listener))
                if watch is not None:
                    listening.enter_context(watch.listening(listener))
                async for event in listener.events():
                    yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    # Answers as JSON --------------------------------------------------------------------------

    async def _overview_now(self, _: Request) -> BaseModel:
        return await self._overview.now()

    async def _hosts(self, _: Request) -> BaseModel:
        return await self._shared.of("hosts", self._hosts_now)

    async def _hosts_now(self) -> BaseModel:
        return shown_hosts(await self._link.call(lambda client: client.list_clients()))

    async def _run(self, request: Request) -> BaseModel:
        return await self._watches.of(request.path_params["run"]).shown()

    async def _round(self, request: Request) -> BaseModel:
        watch, number = self._watches.of(request.path_params["run"]), request.path_params["round"]
        await watch.shown()
        if number not in watch.view.committed:
            raise NotFoundError(
                f"round {number} of run {watch.run_id} is not committed, or not one of the newest "
                f"{MOST_ROUNDS} rounds"
            )
        return shown_details(watch.view.committed[number])

    async def _disclosed(self, request: Request) -> BaseModel:
        watch = self._watches.of(request.path_params["run"])
        await watch.shown()
        newest = max(watch.view.committed, default=0)
        return await self._shared.of(
            f"disclosed {watch.run_id} {newest}", lambda: self._disclosed_now(watch)
        )

    async def _disclosed_now(self, watch: RunWatch) -> BaseModel:
        classes, profiles = await self._link.call(lambda each: each.fetch_profiles(watch.run_id))
        audits = await self._link.call(lambda each: each.audit_disclosures(watch.run_id))
        run_file = await self._run_file(watch.run_id)
        return shown_disclosures(watch.view.rounds, classes, profiles, audits, run_file)

    async def _file(self, request: Request) -> BaseModel:
        run_id = request.path_params["run"]
        return RunFileShown(run=run_id, run_file=await self._run_file(run_id))

    async def _run_file(self, run_id: str) -> str:
        return await self._link.call(lambda client: client.fetch_run_file(run_id))

    async def _compare(self, request: Request) -> BaseModel:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MOST_RUNS:
            raise ConfigurationError(f"select from 2 to {MOST_RUNS} runs to compare")
        runs = [await self._watches.of(name).shown() for name in names]
        return compared(runs, [await self._run_file(name) for name in names])

    # Starting, stopping -----------------------------------------------------------------------

    async def _form(self, request: Request) -> BaseModel:
        again = request.query_params.get("again")
        if again:
            text = await self._run_file(again)
        else:
            text = example_run_file() if "example" in request.query_params else FIRST_DRAFT
        return FormShown(fields=form_fields(), draft=drafted(text, {}))

    async def _draft(self, request: Request) -> BaseModel:
        sent = await _sent(request)
        return drafted(sent.run_file, sent.changes)

    async def _start(self, request: Request) -> BaseModel:
        sent = await _sent(request)
        try:
            run_id = await self._link.call(lambda client: client.start_run(sent.run_file))
        except (UnreachableError, IdentityError):
            raise
        except PotluckError as error:
            raise RunRefusedError(error.message, refused(sent.run_file, error.message)) from None
        self._overview.hurry()
        return Started(run=run_id)

    async def _stop(self, request: Request) -> BaseModel:
        run_id = request.path_params["run"]
        await self._link.call(lambda client: client.stop_run(run_id))
        self._overview.hurry()
        return Started(run=run_id)

    async def _resume(self, request: Request) -> BaseModel:
        run_id = request.path_params["run"]
        await self._link.call(lambda client: client.resume_run(run_id))
        self._watches.of(run_id).again()
        self._overview.hurry()
        return Started(run=run_id)


async def _sent(request: Request) -> DraftSent:
    """Return the draft in a request. Raises ConfigurationError."""
    try:
        return DraftSent.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["msg"]
        raise ConfigurationError(f"the request is not valid: {first}") from None


def _answered(
    answer: Callable[[Request], Awaitable[BaseModel]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that sends the result of `answer`, or its error as text, in JSON."""

    async def handle(request: Request) -> Response:
        try:
            return _json(await answer(request))
        except PotluckError as error:
            status = next(
                (code for kind, code in _STATUSES.items() if isinstance(error, kind)), 400
            )
            return _json(_refusal(error), status)

    return handle


def _refusal(error: PotluckError) -> Refused:
    problems = error.problems if isinstance(error, RunRefusedError) else []
    if isinstance(error, NotFoundError):
        return Refused(error=error.message, trouble="missing")
    trouble = trouble_of(error)
    return Refused(
        error=error.message,
        trouble="refused" if trouble == "other" else trouble,
        problems=problems,
    )


def _json(value: BaseModel, status: int = 200) -> Response:
    return Response(value.model_dump_json(), status_code=status, media_type="application/json")
