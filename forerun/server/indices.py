"""/v1/indices: which documents answers are drafted from, for all clients or for one, while the
server runs."""

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


class IndexRequest(Body):
    """An index of the server's folder, and whose requests it serves."""

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
    """The indices of a folder, of which some are in use."""

    def __init__(self, service: EngineService, folder: Path, clients: Collection[str]) -> None:
        self.service, self.folder, self.clients = service, folder, clients
        self._turn = asyncio.Lock()  # changes come one after the other

    @property
    def shelf(self) -> Retrieval:
        """The proposer that drafts from those in use."""
        found = self.service.llm.engine.proposers[RETRIEVAL]
        assert isinstance(found, Retrieval)
        return found

    def load_all(self) -> None:
        """Draft from all that lie in the folder, but not below, for all clients. Raises
        LoadError."""
        if not self.folder.is_dir():
            advice = f"make it, and indices in it with forerun index --out {self.folder}/NAME"
            raise LoadError(f"there is no folder {self.folder}: {advice}")
        for place in sorted(path.parent for path in self.folder.glob(f"*/{LIST}")):
            self.shelf.add(place.name, self.service.llm.index(place))

    async def found(self) -> list[dict[str, Any]]:
        """All of the folder, and what is known of those in use."""
        there = await asyncio.to_thread(
            lambda: {str(p.parent.relative_to(self.folder)) for p in _lists(self.folder)}
        )
        used = self.shelf.indices.copy()
        return [
            self._card(name, *used.get(name, (None, ""))) for name in sorted(there | used.keys())
        ]

    async def load(self, name: str, client: str) -> dict[str, Any]:
        """Draft from this one from now on; one that is in use is read again."""
        if client and client not in self.clients:
            raise ApiError(
                400,
                f"there is no client {client!r}: give a NAME of the file of --api-keys",
                "client",
            )
        async with self._turn:
            try:
                index = await asyncio.to_thread(read, self.service.llm, self.folder, name)
            except LoadError as error:
                log.warning("an index was not loaded: %s", error)
                why = f"{name!r} holds no index that can be used; the server's log says why"
                raise ApiError(400, why, "name") from None
            await self.service.call(partial(self.shelf.add, name, index, client))
        return self._card(name, index, client)

    async def drop(self, name: str) -> None:
        """Draft from it no more."""
        async with self._turn:
            if name not in self.shelf.indices:
                raise ApiError(404, f"no index {name!r} is in use", "name")
            await self.service.call(partial(self.shelf.remove, name))

    def _card(self, name: str, index: Index | None, client: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "index", "in_use": index is not None}
        if index is not None:
            card |= {
                "client": client,
                "tokens": index.count,
                "files": sum(len(s.files) for s in index.segments),
            }
        return card


def read(llm: LLM, folder: Path, name: str) -> Index:
    """An index below a folder, for this model. Raises LoadError, and ApiError where it is not in
    the folder."""
    place = (folder / name).resolve() if NAME.fullmatch(name) else folder
    if (
        place == folder
        or not place.is_relative_to(folder.resolve())
        or not (place / LIST).is_file()
    ):
        raise ApiError(404, f"there is no index {name!r} in the folder of --indices", "name")
    return llm.index(place)


def _lists(folder: Path) -> list[Path]:
    return [
        path
        for depth in ("*", "*/*", "*/*/*", "*/*/*/*")
        for path in folder.glob(f"{depth}/{LIST}")
    ]


def mount(app: FastAPI, indices: Indices) -> None:
    """The operator's endpoints."""

    def check() -> None:
        if not CALLER.get().operator:
            raise ApiError(
                403, "indices are for all clients: this needs a key of the operator (--api-key)"
            )

    @app.get("/v1/indices")
    async def listing() -> dict[str, Any]:
        """The indices of the folder of --indices, and which of them are in use."""
        check()
        return {"object": "list", "data": await indices.found()}

    @app.post("/v1/indices")
    async def load(body: IndexRequest) -> dict[str, Any]:
        """Draft from an index, for all or for one client; one that is in use is read again, with
        what was added."""
        check()
        return await indices.load(body.name, body.client)

    @app.delete("/v1/indices/{name:path}")
    async def drop(name: str) -> dict[str, Any]:
        """Draft from an index no more."""
        check()
        await indices.drop(name)
        return {"id": name, "object": "index", "deleted": True}
