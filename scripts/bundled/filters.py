"""Which packages and which files the bundled models may learn from, and which of these are held out.

All of it is a function of names and texts alone: the same files are taken whatever the machine.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable, Sequence
from email.message import Message
from pathlib import PurePosixPath

PERMISSIVE = frozenset(
    "MIT MIT-0 BSD-2-Clause BSD-3-Clause Apache-2.0 PSF-2.0 Python-2.0 ISC 0BSD Zlib".casefold().split()
)  # SPDX
CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "Zero-Clause BSD (0BSD)": "0BSD",
    "zlib/libpng License": "Zlib",
}  # of the package index, behind "License :: OSI Approved :: "; it does not tell BSD licences apart
LICENCE_FIELDS = {
    "mit": "MIT", "mit license": "MIT", "bsd": "BSD-3-Clause", "bsd-3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause", "bsd-2-clause": "BSD-2-Clause", "apache-2.0": "Apache-2.0",
    "apache 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0", "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0", "isc": "ISC", "isc license": "ISC", "psf-2.0": "PSF-2.0",
    "zlib": "Zlib", "0bsd": "0BSD",
}  # fmt: skip  # the free-text field of older packages
APPROVED = "License :: OSI Approved"

SUFFIXES = (".py", ".pyi")
COPIES = frozenset(
    (
        "_vendor", "vendor", "vendored", "_vendored", "_vendored_packages", "third_party", "thirdparty", "extern",
        "externals", "_externals", "site-packages", "node_modules",
    )
)  # fmt: skip  # folders of other people's code
FEWEST, MOST = 200, 200_000  # characters of a file
LONGEST_LINE = 400
LETTERS = 0.45  # least share of letters: a table of numbers has fewer
DIGITS = 0.2  # most
GENERATED = re.compile(
    r"do not edit|auto-?generated|automatically generated|generated automatically|generated (by|from|using|with)\b"
    r"|machine.generated",
    re.IGNORECASE,
)
GENERATED_NAMES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_version.py", "parsetab.py", "lextab.py")
HEAD = 1500  # characters in which a file says what it is
COPYLEFT = re.compile(r"GNU (Lesser |Library |Affero )?General Public|Mozilla Public License", re.IGNORECASE)
SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n\"']+)")

HELD_OUT = 50  # one file in so many
HELD_OUT_OF_THE_LIBRARY = 20
LIBRARY = "python"  # the standard library's name among packages
LONG_LINE = 25  # characters that make a line worth comparing
REPEATED = 0.7  # share of such lines that stood in other files


def licence_of(metadata: Message, also: Iterable[str] = ()) -> tuple[str, bool]:
    """(what a package's METADATA says of its licence, whether it may be used). `also` are further SPDX names to take.

    The expression counts where there is one, else the classifiers, else the free text; whatever is not known is no.
    """
    allowed = PERMISSIVE | {name.casefold() for name in also}
    expression = str(metadata.get("License-Expression") or "").strip()
    if expression:
        return expression, is_permissive(expression, allowed)
    classifiers = [str(value).strip() for value in metadata.get_all("Classifier") or ()]
    said = [value for value in classifiers if value.startswith("License ::") and value != APPROVED]
    if said:
        names = [CLASSIFIERS.get(value.removeprefix(f"{APPROVED} :: "), "") for value in said]
        text = " AND ".join(name or value for name, value in zip(names, said, strict=True))
        return text, all(name.casefold() in allowed for name in names)
    text = str(metadata.get("License") or "").strip().split("\n")[0]
    name = LICENCE_FIELDS.get(text.casefold(), text)
    return (name or "none named"), is_permissive(name, allowed)


def is_permissive(expression: str, allowed: Iterable[str] = PERMISSIVE) -> bool:
    """Whether an SPDX expression asks for nothing but licences in `allowed` (case does not count).

    Of `A OR B` one is enough; with brackets, or an exception behind WITH that is not allowed by its name, all count.
    """
    allowed, plain = set(allowed), "(" not in expression
    choices = re.split(r"\s+OR\s+", expression, flags=re.IGNORECASE) if plain else [expression]
    split = r"\s+AND\s+" if plain else r"\s+(?:AND|OR|WITH)\s+|[()]"
    parts = [[p.strip().casefold() for p in re.split(split, c, flags=re.IGNORECASE) if p.strip()] for c in choices]
    return any(names and all(name in allowed for name in names) for names in parts)


def why_not(path: str, text: str) -> str | None:
    """Why a source file is not learnt from; None if it is."""
    parts, name = PurePosixPath(path).parts, PurePosixPath(path).name
    if COPIES & set(parts[:-1]):
        return "a copy of another package"
    if not FEWEST <= len(text) <= MOST:
        return "too short, or not UTF-8" if len(text) < FEWEST else "too long"
    if name.endswith(GENERATED_NAMES) or GENERATED.search(text[:HEAD]):
        return "generated"
    if COPYLEFT.search(text) or not all(is_permissive(said.strip(" */#-")) for said in SPDX.findall(text[:HEAD])):
        return "another licence"
    visible = len(text) - sum(map(text.count, " \n\t\r"))
    letters, digits = sum(map(str.isalpha, text)), sum(map(str.isdigit, text))
    longest = max(map(len, text.split("\n")))
    if letters < LETTERS * visible or digits > DIGITS * visible or longest > LONGEST_LINE:
        return "a table"
    return None if is_python(text) else "not Python 3"


def is_python(text: str) -> bool:
    """Whether the running Python can parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def digest_of(text: str) -> str:
    """The SHA-256 of a text: what it is known by."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(package: str, path: str, text: str) -> bool:
    """Whether a file is kept for measuring. Of the standard library the hash of the path decides, as it did for the
    first bundled model, which others are grown from; of packages that of the text alone."""
    if package == LIBRARY:
        return int(digest_of(path), 16) % HELD_OUT_OF_THE_LIBRARY == 0
    return int(digest_of(text)[:12], 16) % HELD_OUT == 0


class Seen:
    """The texts that were taken so far, to find those that say the same again."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._lines: set[int] = set()

    def repeats(self, text: str) -> str | None:
        """Why it would be a repetition; None if it is new, and then it counts as taken.

        A near-copy is a file most of whose longer lines, without what stands around them, stood in others.
        """
        digest = digest_of(text)
        if digest in self._digests:
            return "the same text again"
        lines = {hash(line) for line in map(str.strip, text.split("\n")) if len(line) >= LONG_LINE}
        if lines and len(lines & self._lines) > REPEATED * len(lines):
            return "nearly the same again"
        self._digests.add(digest)
        self._lines |= lines
        return None


def in_order(names: Sequence[str]) -> list[str]:
    """Paths so that the same are kept wherever a package is cut: by a hash, not by the alphabet."""
    return sorted(names, key=digest_of)
