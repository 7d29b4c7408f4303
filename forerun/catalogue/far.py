"""What is read of a repository on the Hub before anything large is: its list of files, small files,
headers of tensors.

Whatever answers is a stranger: names, sizes and types are checked, and no more is read than was
asked for, whatever is sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forerun.draft.registry import Json
from forerun.errors import LoadError, one_line
from forerun.models.config import is_integer
from forerun.models.files import parse_header
from forerun.utils import decoded

SAFE = re.compile(
    r"[A-Za-z0-9_][\w.+=-]{0,199}", re.ASCII
)  # names of files that are read and written: no folders
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
MOST_JSON = 4 << 20  # bytes of a configuration, a card or an index
MOST_HEADER = 25 << 20  # bytes of a header of tensors, as huggingface_hub has it
MOST_AXES, LARGEST = 8, 1 << 48  # of a tensor; of an axis, and bytes of a file
MOST_FILES = 8  # files of tensors whose headers are read
SECONDS = 20.0  # for an answer to begin, and between its pieces

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the Hub lists it: its safe file names with bytes and digests, its commit,
    tags and card."""

    name: str
    commit: str = "main"
    files: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    card: Json = field(default_factory=dict)
    downloads: int = 0


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Whatever goes wrong with the Hub, as one line: LoadError."""
    from huggingface_hub import errors

    client: type[Exception] = errors.HfHubHTTPError.__mro__[
        1
    ]  # the HTTP client's own, whichever client it is
    try:
        yield
        return
    except LoadError:
        raise
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, unset it to ask the Hub"
    except errors.GatedRepoError:
        reason = "its authors must let you in: ask on its page, then hf auth login"
    except errors.RepositoryNotFoundError:
        reason = (
            "the Hub has no such repository, or it is private: see to the name, or hf auth login"
        )
    except errors.HFValidationError:
        reason = "that is no valid Hub id: give ORG/NAME"
    except errors.HfHubHTTPError as error:
        refused = getattr(error.response, "status_code", 0) in (401, 403)
        reason = f"{one_line(str(error).strip())}{', hf auth login may help' if refused else ''}"
    except client as error:
        reason = f"the Hub cannot be reached: {one_line(str(error)) or 'no network'}"
    except errors.LocalEntryNotFoundError:
        reason = "the Hub cannot be reached"
    except OSError as error:
        reason = one_line(str(error))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = f"the Hub's answer makes no sense: {one_line(repr(error))}"
    raise LoadError(f"{what}: {reason}")


def reach() -> None:
    """See once that the Hub answers: huggingface_hub would try each of many questions for minutes.
    Raises LoadError."""
    from huggingface_hub import constants, get_session, hf_raise_for_status

    with asking("there is no answer"):
        hf_raise_for_status(
            get_session().get(f"{constants.ENDPOINT}/api/models?limit=1", timeout=SECONDS)
        )


def look_up(repository: str) -> Repository:
    """What the Hub lists of a repository. Raises LoadError."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository:
        raise LoadError(
            f"{one_line(repository)} is no Hub id: give ORG/NAME, or a directory that is here"
        )
    from huggingface_hub import HfApi

    with asking(f"{repository} cannot be looked at"):
        info = HfApi().model_info(repository, files_metadata=True, timeout=SECONDS)
        return listed(repository, info)


def listed(repository: str, info: Any) -> Repository:
    """The checked values of what huggingface_hub made of an answer."""
    files, digests = {}, {}
    for entry in info.siblings or []:
        name, size = entry.rfilename, entry.size or 0
        if (
            not isinstance(name, str)
            or not SAFE.fullmatch(name)
            or not is_integer(size)
            or not 0 <= size <= LARGEST
        ):
            continue  # of folders nothing is read, and nothing of what leads out of them
        files[name] = size
        digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
        digests[name] = digest if isinstance(digest, str) else ""
    card = info.card_data.to_dict() if hasattr(info.card_data, "to_dict") else {}
    tags = (
        tuple(tag for tag in info.tags or [] if isinstance(tag, str))
        if isinstance(info.tags, list)
        else ()
    )
    commit = (
        info.sha
        if isinstance(info.sha, str) and re.fullmatch(r"[0-9a-f]{40}", info.sha)
        else "main"
    )
    downloads = info.downloads if is_integer(info.downloads) else 0
    return Repository(
        repository, commit, files, digests, tags, card if isinstance(card, dict) else {}, downloads
    )


def read(
    repository: str, file: str, commit: str = "main", most: int = MOST_JSON, begin: int = 0
) -> bytes:
    """At most `most` bytes of a file from `begin` on, however much is sent. Raises LoadError."""
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url, taken = hf_hub_url(repository, file, revision=commit), bytearray()
    headers = build_hf_headers() | {
        "Range": f"bytes={begin}-{begin + most - 1}",
        "Accept-Encoding": "identity",
    }
    with asking(f"{file} of {repository} cannot be read"):
        with get_session().stream("GET", url, headers=headers, timeout=SECONDS) as answer:
            hf_raise_for_status(answer)
            skip = 0 if answer.status_code == 206 else begin  # a server may send all of it
            for piece in answer.iter_bytes(1 << 16):
                taken += piece
                if len(taken) >= skip + most:
                    break
        return bytes(taken[skip : skip + most])
    raise AssertionError


def read_object(repository: str, file: str, commit: str = "main") -> Json:
    """A JSON object of a file. Raises LoadError."""
    content = read(repository, file, commit, MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise LoadError(
            f"{file} of {repository} has over {MOST_JSON >> 20} MB, which no such file has"
        )
    try:
        raw = json.loads(decoded(content))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} of {repository} cannot be read: {one_line(str(error))}") from None
    if not isinstance(raw, dict):
        raise LoadError(f"{file} of {repository} does not hold an object")
    return raw


def read_shapes(at: Repository) -> Shapes:
    """Names and shapes of the tensors of a repository, from the headers of its first files. Raises
    LoadError."""
    names = sorted(name for name in at.files if name.endswith(".safetensors"))[:MOST_FILES]
    return {name: shape for file in names for name, shape in _header(at, file).items()}


def _header(at: Repository, file: str) -> Shapes:
    first = read(at.name, file, at.commit, 1 << 17)
    (length,) = struct.unpack("<Q", first[:8]) if len(first) >= 8 else (MOST_HEADER + 1,)
    if length > MOST_HEADER:
        raise LoadError(
            f"{file} of {at.name} is no safetensors file: its header would have {length} bytes"
        )
    text = (
        first[8 : 8 + length]
        if length <= len(first) - 8
        else read(at.name, file, at.commit, length, 8)
    )
    return shapes_of(parse_header(text, f"{file} of {at.name}"), f"{file} of {at.name}")


def shapes_of(header: dict[str, Json], file: str) -> Shapes:
    """Names and shapes in the header of a safetensors file. Raises LoadError."""
    try:
        found = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (TypeError, LookupError) as error:
        raise LoadError(
            f"{file} is no safetensors file or not whole: {one_line(repr(error))}"
        ) from None
    if any(
        len(shape) > MOST_AXES or not all(is_integer(n) and 0 <= n <= LARGEST for n in shape)
        for shape in found.values()
    ):
        raise LoadError(f"{file} is no safetensors file: it has tensors of no size that there is")
    return found
