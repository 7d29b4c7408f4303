"""Drafters from and to the Hub.

`download` follows all checks that need only headers, so nothing large is downloaded in vain.
`prepare` writes a card by which a drafter is found, in a directory of its own: the drafter's stays
as it is. `upload` sends both.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.catalog import hub
from forerun.catalog.facts import CARD, Facts, card_of, facts_at, facts_of
from forerun.catalog.fit import FitCheck, checks, draft_argument, fits, refusal, sizes_of
from forerun.catalog.search import training_measurements
from forerun.draft.kinds import Json, inner
from forerun.errors import ConfigError, LoadError, one_line
from forerun.models.files import read_text
from forerun.models.hub import DEFAULT, DEFAULT_REPOSITORY, hub_errors, is_pickled

DOWNLOADED = (".json", ".jinja", ".txt", ".md", "tokenizer.model")
UPLOADED = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "training.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
DOMAIN = re.compile(r"[\w][\w .+-]{0,60}")


# Download.


def target_of(drafter: Facts, name: str | None) -> tuple[Facts | None, str]:
    """Return the target to check a drafter against: `name`, else the one that it was made for.

    Returns None and a note if there is no target that can be read.

    Raises:
        LoadError: the target `name` cannot be read.
    """
    if name is not None:
        return facts_of(name, tensors=False), ""
    if not drafter.made_for:
        return None, "it names no target: give --for TARGET to check it against one"
    try:
        return facts_of(drafter.made_for, tensors=False), ""
    except LoadError as error:
        return None, f"it is not checked against {drafter.made_for} ({error}): give --for TARGET"


def examine(drafter: Facts, target: Facts | None) -> list[FitCheck]:
    """Return all checks; compares the tokens of draft model and target if both are local."""
    found = checks(drafter, sizes_of(target) if target else None)
    if not (target and drafter.path and target.path and drafter.kind.draft == "model"):
        return found
    for index, check in enumerate(found):
        if check.name == "vocabulary" and check.ok is None:
            found[index] = _compare_tokens(drafter.path, target.path, sizes_of(target).vocab_size)
    return found


def _compare_tokens(drafter: Path, target: Path, vocab_size: int) -> FitCheck:
    from forerun.load import check_vocabulary, load_tokenizer

    try:
        check_vocabulary(load_tokenizer(target), drafter, vocab_size)
    except LoadError as error:
        return FitCheck("vocabulary", False, str(error))
    except ConfigError:
        text = "another vocabulary: it drafts through text, so fewer tokens are accepted"
        return FitCheck("vocabulary", None, text)
    return FitCheck("vocabulary", True, "every token means the same to both")


def describe(
    drafter: Facts, target: Facts | None, found: Sequence[FitCheck], note: str
) -> dict[str, Any]:
    """Return facts and checks as plain values, for JSON."""
    return drafter.summary() | {
        "path": str(drafter.path) if drafter.path else None,
        "made_for": drafter.made_for,
        "target": target.name if target else None,
        "fits": fits(found),
        "checks": [asdict(check) for check in found],
        "draft": draft_argument(drafter),
        "notes": [note] if note else [],
    }


def files_to_download(repository: hub.Repository) -> dict[str, int]:
    """Return the files of a drafter and their bytes; pickled weights only without safetensors."""
    files = repository.files
    texts = {name: size for name, size in files.items() if name.endswith(DOWNLOADED)}
    weights = {name: size for name, size in files.items() if name.endswith(".safetensors")}
    pickled = {name: size for name, size in files.items() if is_pickled(name)}
    return texts | (weights or pickled)


def download(drafter: Facts) -> Path:
    """Download a drafter into the Hub's cache and return its directory. Raises LoadError."""
    from huggingface_hub import constants, snapshot_download

    assert drafter.repository is not None
    files = files_to_download(drafter.repository)
    needed = sum(files.values())
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise LoadError(
            f"{drafter.name} has {needed / 1e9:.1f} GB, but {cache} has room for"
            f" {free / 1e9:.1f} GB: make room, or set HF_HUB_CACHE to another disk"
        )
    with hub_errors(f"{drafter.name} cannot be downloaded"):
        return Path(snapshot_download(drafter.name, allow_patterns=sorted(files)))


# Upload.


@dataclass(frozen=True, slots=True)
class Upload:
    """Files and metadata of one upload to the Hub.

    Attributes:
        directory: the drafter's directory.
        repository: ORG/NAME on the Hub.
        files: names and bytes of the files of the directory.
        texts: names and contents of files written for the Hub, which replace those of `files`.
        metadata: metadata of the card.
        notes: what the user should know before the upload.
    """

    directory: Path
    repository: str
    files: dict[str, int]
    texts: dict[str, str]
    metadata: Json
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "repository": self.repository,
            "files": sorted({*self.files, *self.texts}),
            "metadata": self.metadata,
            "notes": list(self.notes),
        }


def prepare(
    directory: Path,
    repository: str,
    target: str | None,
    license_: str | None,
    domains: Sequence[str],
) -> Upload:
    """FitCheck that a directory holds a drafter, and prepare its upload. Nothing is sent.

    Args:
        directory: what `forerun train` wrote.
        repository: ORG/NAME on the Hub.
        target: the target's Hub id; by default the one that the drafter names.
        license_: such as mit or apache-2.0; by default the one on its card.
        domains: kinds of text, besides those on its card.

    Raises:
        ConfigError: something is missing or invalid.
        LoadError: the directory cannot be read.
    """
    if not hub.is_repository(repository):
        raise ConfigError(f"{one_line(repository)} is no Hub id: give ORG/NAME")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no drafter: it has no config.json")
    facts = facts_at(directory, str(directory))
    if reason := refusal(facts):
        raise ConfigError(f"{directory} holds no drafter that forerun can use: {reason}")
    paths = [path for pattern in UPLOADED for path in directory.glob(pattern) if path.is_file()]
    files = {path.name: path.stat().st_size for path in paths}
    if not any(name.endswith(".safetensors") for name in files):
        raise ConfigError(f"{directory} holds no *.safetensors, the only weights that are uploaded")
    base = _target_id(facts, target)
    metadata = _metadata(facts, base, _license(facts, license_), domains)
    texts = {CARD: _card(facts, metadata), **_config(facts, base)}
    return Upload(directory, repository, files, texts, metadata, _notes(directory, files, texts))


def upload(prepared: Upload, private: bool = True) -> str:
    """Upload to a new repository, or as a new commit to an existing one; return its address.

    Raises:
        LoadError: the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory(prefix="forerun-push-") as folder:
        for name in prepared.files.keys() - prepared.texts.keys():
            Path(folder, name).symlink_to((prepared.directory / name).resolve())
        for name, text in prepared.texts.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        with hub_errors(f"{prepared.repository} cannot be uploaded"):
            api = HfApi()
            address = api.create_repo(prepared.repository, private=private, exist_ok=True)
            message = f"Drafter for {prepared.metadata['base_model']}"
            api.upload_folder(
                repo_id=prepared.repository, folder_path=folder, commit_message=message
            )
    return str(address)


def _target_id(facts: Facts, target: str | None) -> str:
    """Return the Hub id of the target."""
    name = target or facts.made_for
    name = DEFAULT_REPOSITORY if name == DEFAULT else name
    if not hub.REPOSITORY.fullmatch(name) or (target is None and Path(name).exists()):
        why = f"it was made for {name}, which is no Hub id" if name else "it names no target"
        raise ConfigError(f"{facts.name}: {why}; give --for ORG/MODEL")
    return name


def _license(facts: Facts, given: str | None) -> str:
    name = given or facts.card.get("license")
    if not isinstance(name, str) or not LICENSE.fullmatch(name.lower()):
        raise ConfigError(
            "the Hub needs a licence: give --license, such as apache-2.0; the target's licence may"
            " restrict the choice"
        )
    return name.lower()


def _metadata(facts: Facts, base: str, license_: str, domains: Sequence[str]) -> Json:
    """Return the existing metadata of the card, updated with the known facts."""
    for domain in domains:
        if not DOMAIN.fullmatch(domain):
            raise ConfigError(f"{one_line(domain)!r} is no kind of text: give a word such as code")
    all_domains = list(dict.fromkeys([*facts.domains, *(d.lower() for d in domains)]))
    old_tags = facts.card.get("tags")
    tags = [t for t in old_tags if isinstance(t, str)] if isinstance(old_tags, list) else []
    tags += ["speculative-decoding", "draft-model", "forerun", facts.kind.family]
    tags += ["speculators"] if facts.kind.format == "speculators" else []
    tags += [f"domain:{domain}" for domain in all_domains]
    measured = []
    for m in training_measurements(facts):
        figure: Json = {"text": m.category, "accepted_length": round(m.accepted_length, 3)}
        figure |= {"depth": m.depth, "temperature": m.temperature}
        figure |= {"times_plain": round(m.times_plain, 3)} if m.times_plain else {}
        measured.append(figure)
    metadata = {name: value for name, value in facts.card.items() if isinstance(name, str)}
    metadata |= {
        "base_model": base,
        "base_model_relation": "adapter",
        "library_name": "forerun",
        "license": license_,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }
    metadata |= {"domains": all_domains} if all_domains else {}
    return metadata | {"forerun": {"draft": facts.kind.draft, "measured": measured}}


def _card(facts: Facts, metadata: Json) -> str:
    import yaml

    text = f"# Drafter for {metadata['base_model']}\n"
    if facts.path and (facts.path / CARD).is_file():
        text = card_of(read_text(facts.path / CARD, hub.MAX_JSON_BYTES))[1].lstrip("\n")
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front_matter}---\n\n{text}"


def _config(facts: Facts, base: str) -> dict[str, str]:
    """Return config.json with the verifier's Hub id, by which other programs load the verifier."""
    own = inner(facts.raw, "speculators_config")
    if not isinstance(own.get("verifier"), dict) or own["verifier"].get("name_or_path") == base:
        return {}
    own = own | {"verifier": own["verifier"] | {"name_or_path": base}}
    return {"config.json": json.dumps(facts.raw | {"speculators_config": own}, indent=2) + "\n"}


def _notes(directory: Path, files: dict[str, int], texts: dict[str, str]) -> tuple[str, ...]:
    """Return notes on files that contain the path of the user's home directory."""
    read = dict(texts)
    if "training.json" in files:
        with suppress(LoadError):
            read["training.json"] = read_text(directory / "training.json")
    home = str(Path.home())
    return tuple(
        f"{name} contains {home}: everyone who can read the repository sees it"
        for name, text in read.items()
        if home in text
    )
