"""The models that LM Studio has on this machine: `<publisher>/<model>/<file>.gguf` below its folder
of models."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import LoadError
from forerun.models.names import choose, first_part, is_gguf, listed, models_of, tag_of
from forerun.utils import decoded


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one model; `files` are the GGUF models in it, none where it holds
    safetensors."""

    path: Path
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """PUBLISHER/MODEL."""
        return f"{self.path.parent.name}/{self.path.name}"

    def names(self) -> dict[str, Path]:
        """What to type for each of its models, without the scheme."""
        if len(self.files) < 2:
            return {self.name: self.path.joinpath(*self.files)}
        tags = {file: tag_of(file, self.files) for file in self.files}
        return {
            f"{self.name}:{tag}" if tag else f"{self.name}/{file}": self.path / file
            for file, tag in tags.items()
        }


def roots() -> list[Path]:
    """The folders where LM Studio may keep models; it writes down where they were moved to."""
    home = Path.home() / ".lmstudio"
    with suppress(OSError, ValueError):
        home = Path(
            decoded((Path.home() / ".lmstudio-home-pointer").read_bytes()).strip()
        ).expanduser()
    folders = [home / "models", Path.home() / ".cache/lm-studio/models"]
    with suppress(OSError, ValueError):
        settings = json.loads(decoded((home / "settings.json").read_bytes()))
        moved = settings.get("downloadsFolder") if isinstance(settings, dict) else None
        if isinstance(moved, str) and moved:
            folders.insert(0, Path(moved).expanduser())
    return list(dict.fromkeys(folders))


def installed() -> list[Folder]:
    """Every folder of a model."""
    found = []
    for root in roots():
        for path in sorted(path for path in root.glob("*/*") if path.is_dir()):
            files = tuple(models_of(file.name for file in path.iterdir()))
            if files or (path / "config.json").is_file():
                found.append(Folder(path, files))
    return found


def find(name: str) -> Path:
    """The GGUF file, or the directory, of PUBLISHER/MODEL or MODEL, with /FILE or :QUANT where
    there are several.

    Raises LoadError.
    """
    folders = installed()
    parts, quant = name.split("/"), None
    if ":" in parts[-1]:
        parts[-1], _, quant = parts[-1].partition(":")
    file = parts.pop() if len(parts) == 3 else None
    wanted = [part.casefold() for part in parts]
    matches = [f for f in folders if f.name.casefold().split("/")[-len(wanted) :] == wanted]
    if not matches:
        known = listed(f"lmstudio:{known}" for folder in folders for known in folder.names())
        what = f"it has {known}" if folders else f"looked in {listed(map(str, roots()))}"
        raise LoadError(f"LM Studio has no model {name!r} here; {what}")
    if len({folder.name for folder in matches}) > 1:
        raise LoadError(
            f"LM Studio has several models {name!r}: give {listed(f'lmstudio:{f.name}' for f in matches)}"
        )
    return _file_of(matches[0], file, quant)


def _file_of(folder: Folder, file: str | None, quant: str | None) -> Path:
    if file is None and quant is None and len(folder.files) < 2:
        return first_part(folder.path / folder.files[0]) if folder.files else folder.path
    chosen = choose(folder.files, quant) if quant else None
    if file is not None:
        wanted = file if is_gguf(file) else f"{file}.gguf"
        chosen = next(
            (known for known in folder.files if known.casefold() == wanted.casefold()), None
        )
    if chosen is None:
        known = listed(f"lmstudio:{name}" for name in folder.names())
        what = f"no file {file or quant} of" if file or quant else "several files of"
        raise LoadError(f"LM Studio has {what} {folder.name}: give {known}")
    return first_part(folder.path / chosen)
