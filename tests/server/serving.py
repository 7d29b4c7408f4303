"""A real server in a thread, on a free port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from forerun import LLM
from forerun.server.app import make_app
from forerun.server.settings import Settings


@contextmanager
def serving(llm: LLM, settings: Settings) -> Iterator[str]:
    """The base URL of a server with this model; it is shut down behind the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(llm, settings), log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
