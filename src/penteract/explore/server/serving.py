"""Run the server on a port of this machine, and open the browser on it."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from contextlib import closing
from threading import Thread

import uvicorn

from penteract.errors import BadInput
from penteract.explore.schemas.page_schema import Question
from penteract.explore.server.guard import Keys
from penteract.explore.server.routes import Given, application

HOST = "127.0.0.1"


def serve(opening: Question, *, port: int, browser: bool, tell: Callable[[str], object], given: Given) -> None:
    """Serve until Ctrl-C. `tell` is called with the address to open, once the port takes connections.

    port     0: any free one
    given    folders to show; no other one is read
    Raises BadInput if the port is taken.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise BadInput("PORT", f"cannot be used: {error.strerror}", where="--port", found=port,
                           fix="--port 0 takes a free one") from None  # fmt: skip
        listening.listen()
        keys, bound_port = Keys(), int(listening.getsockname()[1])
        address = f"http://{HOST}:{bound_port}/?token={keys.token}"
        app = application(opening, keys, bound_port, given)
        tell(address)
        if browser:
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            return
