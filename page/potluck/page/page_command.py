"""`potluck page`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import typer
import uvicorn

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.deploy.commands.connection import configured_command
from potluck.deploy.local.interruption import run_interruptibly
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.page.page_access import PageAccess
from potluck.page.page_app import PageServer
from potluck.page.page_guard import MOST_CONNECTIONS, PageGuard, bounded_http

LOOPBACK = "127.0.0.1"
_END_SECONDS = 2


class _Server(uvicorn.Server):
    """A web server that leaves signals to `run_interruptibly`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing while the block runs: `run_interruptibly` handles the signals."""
        yield


def _page(
    config: OperatorConfig,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Local port of the web UI; 0 for any free port."),
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the web UI in the browser.")
    ] = True,
) -> None:
    """Show runs, hosts and clients in the browser.

    A small web server on this machine sends requests to the coordinator with your certificate. The
    coordinator opens no port for it, and other machines can't reach it. The printed address works
    once; after its use, the command prints a new one. On a machine without a browser, forward the
    port: `ssh -L 8800:127.0.0.1:8800 MACHINE`, and run `potluck page --port 8800 --no-open` there.
    Ctrl-C ends the web server; runs continue.

    ```console
    potluck page
    potluck page --port 8800 --no-open
    ```
    """
    config.tls.load(Role.OPERATOR)  # report a wrong certificate before anything starts
    with contextlib.closing(_listening(port)) as listening:
        run_interruptibly(serve_page(config, listening, browser=browser))


def _listening(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"can't serve on port {port} of this machine: {error.strerror}; name another port "
            "with --port",
            port=port,
        ) from None
    listening.listen(128)  # a browser that connects before the server accepts must wait
    return listening


async def serve_page(config: OperatorConfig, listening: socket.socket, *, browser: bool) -> None:
    """Serve the web UI until cancelled. listening: a bound socket."""
    address = f"http://{LOOPBACK}:{listening.getsockname()[1]}"

    def announce(what: str) -> None:
        typer.echo(f"{what}: {address}/?token={access.token}")

    access = PageAccess(on_redeemed=lambda: announce("opened; address for another browser"))
    announce(f"the federation of {config.coordinator} in your browser")
    opened = f"{address}/?token={access.token}"
    pages = PageServer(config, access)
    async with serving_page(pages, pages.app(), listening):
        if browser:  # opening may block: a browser in the terminal until it ends
            threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()
        await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def serving_page(
    pages: PageServer, app: PageGuard, listening: socket.socket
) -> AsyncIterator[None]:
    """Serve the web UI while the block runs."""
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded_http(),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # any user can send invalid HTTP; warnings would fill the terminal
            access_log=False,
            server_header=False,
            proxy_headers=False,  # identify browsers by their connection, not by headers
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=_END_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        await pages.end_streams()
        server.should_exit = True
        await serving


page = configured_command(_page)
