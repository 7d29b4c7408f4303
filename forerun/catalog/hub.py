"""Reads a Hub repository before a download: file list, small files, tensor headers.

Answers are untrusted: names, sizes and types are checked, and no more is read than was asked for,
whatever is sent.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from forerun.draft.kinds import Json
from forerun.errors import LoadError, one_line
from forerun.models.families import is_integer
from forerun.models.files import parse_header
from forerun.models.hub import hub_errors
from forerun.utils import decoded

FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]{0,199}", re.ASCII)  # no folders
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
MAX_JSON_BYTES = 4 << 20  # of a configuration, a card or an index
MAX_HEADER_BYTES = 25 << 20  # of a safetensors header, as in huggingface_hub
FIRST_READ_BYTES = 1 << 17
MAX_AXES = 8
MAX_SIZE = 1 << 48  # of a tensor's axis, and bytes of a file
MAX_HEADERS = 8  # safetensors files whose headers are read
TIMEOUT = 20.0  # seconds until an answer begins, and between its chunks

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the Hub lists it, with names, sizes and types checked.

    Attributes:
        name: ORG/NAME.
        commit: its current commit.
        files: bytes of each file that is not in a folder.
        digests: SHA-256 of large files, Git's blob id of others.
        tags: its tags.
        card: the metadata of its card.
        downloads: how often it was downloaded lately.
    """

    name: str
    commit: str = "main"
    files: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    card: Json = field(default_factory=dict)
    downloads: int = 0


def is_repository(name: str) -> bool:
    """Return True if a name is a valid Hub id."""
    return bool(REPOSITORY.fullmatch(name)) and ".." not in name


def check_reachable() -> None:
    """Send one short request: huggingface_hub would retry each of many requests for minutes.

    Raises:
        LoadError: the Hub does not answer.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status

    with hub_errors("there is no answer"):
        url = f"{constants.ENDPOINT}/api/models?limit=1"
        hf_raise_for_status(get_session().get(url, timeout=TIMEOUT))


def look_up(name: str) -> Repository:
    """Return the Hub's listing of a repository. Raises LoadError."""
    if not is_repository(name):
        raise LoadError(f"{one_line(name)} is no Hub id: give ORG/NAME, or a local directory")
    from huggingface_hub import HfApi

    with hub_errors(f"{name} cannot be read"):
        info = HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT)
        return checked(name, info)


def checked(name: str, info: Any) -> Repository:
    """Return the valid values of huggingface_hub's ModelInfo."""
    files = {}
    digests = {}
    for entry in info.siblings or []:
        file = entry.rfilename
        size = entry.size or 0
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            continue  # in a folder, or leading out of the repository
        if not is_integer(size) or not 0 <= size <= MAX_SIZE:
            continue
        files[file] = size
        digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
        digests[file] = digest if isinstance(digest, str) else ""
    card = info.card_data.to_dict() if hasattr(info.card_data, "to_dict") else {}
    tags = info.tags if isinstance(info.tags, list) else []
    is_commit = isinstance(info.sha, str) and re.fullmatch(r"[0-9a-f]{40}", info.sha)
    return Repository(
        name,
        info.sha if is_commit else "main",
        files,
        digests,
        tuple(tag for tag in tags if isinstance(tag, str)),
        card if isinstance(card, dict) else {},
        info.downloads if is_integer(info.downloads) else 0,
    )


def read_bytes(
    name: str, file: str, commit: str = "main", size: int = MAX_JSON_BYTES, start: int = 0
) -> bytes:
    """Return at most `size` bytes of a file from offset `start`. Raises LoadError."""
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(name, file, revision=commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={start}-{start + size - 1}"
    content = bytearray()
    with hub_errors(f"{file} of {name} cannot be read"):
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as answer:
            hf_raise_for_status(answer)
            skip = 0 if answer.status_code == 206 else start  # a server may ignore the range
            for chunk in answer.iter_bytes(1 << 16):
                content += chunk
                if len(content) >= skip + size:
                    break
        return bytes(content[skip : skip + size])


def read_object(name: str, file: str, commit: str = "main") -> Json:
    """Return the JSON object in a file. Raises LoadError."""
    content = read_bytes(name, file, commit, MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise LoadError(f"{file} of {name} has over {MAX_JSON_BYTES >> 20} MB, which is too much")
    try:
        raw = json.loads(decoded(content))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} of {name} cannot be read: {one_line(str(error))}") from None
    if not isinstance(raw, dict):
        raise LoadError(f"{file} of {name} does not hold an object")
    return raw


def read_shapes(repository: Repository) -> Shapes:
    """Return tensor names and shapes from the headers of a repository's first safetensors files.

    Raises:
        LoadError: a header cannot be read.
    """
    names = sorted(name for name in repository.files if name.endswith(".safetensors"))
    shapes: Shapes = {}
    for file in names[:MAX_HEADERS]:
        shapes |= _read_header(repository, file)
    return shapes


def _read_header(repository: Repository, file: str) -> Shapes:
    where = f"{file} of {repository.name}"
    first = read_bytes(repository.name, file, repository.commit, FIRST_READ_BYTES)
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else MAX_HEADER_BYTES + 1
    if length > MAX_HEADER_BYTES:
        raise LoadError(f"{where} is no safetensors file: its header would have {length} bytes")
    text = first[8 : 8 + length]
    if length > len(text):
        text = read_bytes(repository.name, file, repository.commit, length, 8)
    return shapes_of(parse_header(text, where), where)


def shapes_of(header: dict[str, Json], file: str) -> Shapes:
    """Return tensor names and shapes in the header of a safetensors file. Raises LoadError."""
    try:
        found = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (TypeError, LookupError) as error:
        why = one_line(repr(error))
        raise LoadError(f"{file} is no safetensors file or not whole: {why}") from None
    for shape in found.values():
        sizes_valid = all(is_integer(n) and 0 <= n <= MAX_SIZE for n in shape)
        if len(shape) > MAX_AXES or not sizes_valid:
            raise LoadError(f"{file} is no safetensors file: it has tensors of impossible sizes")
    return found
