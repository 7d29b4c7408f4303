"""/v1/indices: the document indices that answers are drafted from, changed while the server runs.

An index serves the requests of all clients or of one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from forerun.draft.corpus import LIST, Index
from forerun.draft.retrieval import Retrieval
from forerun.errors import LoadError
from forerun.llm import LLM
from forerun.server.auth import CALLER
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.protocol import Body
from forerun.types import RETRIEVAL

log = logging.getLogger("forerun.server")
NAME = re.compile(r"\w[\w.-]{0,63}(/\w[\w.-]{0,63}){0,3}", re.ASCII)
PATTERNS = ("*", "*/*", "*/*/*", "*/*/*/*")  # of the paths that match NAME


class IndexRequest(Body):
    """An index of the server's folder, and the client whose requests it serves."""

    name: Annotated[
        str, Field(max_length=260, description="Its directory, below the folder of --indices.")
    ]
    client: Annotated[
        str,
        Field(
            max_length=512,
            description="Only for requests with this client's key (a NAME in --api-keys).",
        ),
    ] = ""


class Indices:
    """The indices of a folder, some of which are loaded."""

    def __init__(self, service: EngineService, folder: Path, clients: Collection[str]) -> None:
        self.service = service
        self.folder = folder
        self.clients = clients
        self._lock = asyncio.Lock()

    @property
    def retrieval(self) -> Retrieval:
        """The proposer that drafts from the loaded indices."""
        proposer = self.service.llm.engine.proposers[RETRIEVAL]
        assert isinstance(proposer, Retrieval)
        return proposer

    def load_all(self) -> None:
        """Load all indices directly in the folder, for all clients. Raises LoadError."""
        if not self.folder.is_dir():
            advice = f"make it, and indices in it with forerun index --out {self.folder}/NAME"
            raise LoadError(f"there is no folder {self.folder}: {advice}")
        for path in sorted(path.parent for path in self.folder.glob(f"*/{LIST}")):
            self.retrieval.add(path.name, self.service.llm.index(path))

    async def cards(self) -> list[dict[str, Any]]:
        """Return the cards of all indices, loaded or not."""
        present = await asyncio.to_thread(self._names)
        loaded = self.retrieval.indices.copy()
        names = sorted(present | loaded.keys())
        return [_card(name, *loaded.get(name, (None, ""))) for name in names]

    def _names(self) -> set[str]:
        """Return the names of all indices below the folder."""
        paths = [path for depth in PATTERNS for path in self.folder.glob(f"{depth}/{LIST}")]
        return {str(path.parent.relative_to(self.folder)) for path in paths}

    async def load(self, name: str, client: str) -> dict[str, Any]:
        """Load an index, or read it again, and return its card. Raises ApiError."""
        if client and client not in self.clients:
            message = f"there is no client {client!r}: give a NAME of the file of --api-keys"
            raise ApiError(400, message, "client")
        async with self._lock:
            try:
                index = await asyncio.to_thread(_read, self.service.llm, self.folder, name)
            except LoadError as error:
                log.warning("an index was not loaded: %s", error)
                message = f"{name!r} holds no index that can be used; the server's log says why"
                raise ApiError(400, message, "name") from None
            await self.service.call(partial(self.retrieval.add, name, index, client))
        return _card(name, index, client)

    async def unload(self, name: str) -> None:
        """Stop drafting from an index. Raises ApiError."""
        async with self._lock:
            if name not in self.retrieval.indices:
                raise ApiError(404, f"no index {name!r} is in use", "name")
            await self.service.call(partial(self.retrieval.remove, name))


def _card(name: str, index: Index | None, client: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "index", "in_use": index is not None}
    if index is not None:
        num_files = sum(len(segment.files) for segment in index.segments)
        card |= {"client": client, "tokens": index.count, "files": num_files}
    return card


def _read(llm: LLM, folder: Path, name: str) -> Index:
    """Read an index for this model. Raises LoadError, and ApiError if it is not in the folder."""
    path = (folder / name).resolve() if NAME.fullmatch(name) else folder
    is_inside = path != folder and path.is_relative_to(folder.resolve())
    if not is_inside or not (path / LIST).is_file():
        raise ApiError(404, f"there is no index {name!r} in the folder of --indices", "name")
    return llm.index(path)


def mount(app: FastAPI, indices: Indices) -> None:
    """Add the endpoints, which are the operator's."""

    def check_operator() -> None:
        if not CALLER.get().operator:
            message = "indices are for all clients: this needs a key of the operator (--api-key)"
            raise ApiError(403, message)

    @app.get("/v1/indices")
    async def listing() -> dict[str, Any]:
        """The indices of the folder of --indices, and which of them are in use."""
        check_operator()
        return {"object": "list", "data": await indices.cards()}

    @app.post("/v1/indices")
    async def load(body: IndexRequest) -> dict[str, Any]:
        """Draft from an index, for all clients or for one. An index in use is read again."""
        check_operator()
        return await indices.load(body.name, body.client)

    @app.delete("/v1/indices/{name:path}")
    async def unload(name: str) -> dict[str, Any]:
        """Stop drafting from an index."""
        check_operator()
        await indices.unload(name)
        return {"id": name, "object": "index", "deleted": True}
