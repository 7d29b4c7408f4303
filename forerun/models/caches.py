"""What was downloaded from the Hub before: by huggingface_hub, or by llama.cpp, which once had a
cache of its own.

The layout of the first, which llama.cpp shares today, is
`models--org--name/snapshots/<commit>/<file>`; the older one of llama.cpp is flat,
`org_name_file.gguf` beside `manifest=org=name=tag.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forerun.models.names import choose, is_gguf, parts_of
from forerun.utils import decoded


def hub_roots() -> list[Path]:
    """The folders of the Hub's layout, huggingface_hub's own first."""
    from huggingface_hub import constants

    said = [
        os.environ.get(name) for name in ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    ]
    return _folders([constants.HF_HUB_CACHE, *said])


def flat_roots() -> list[Path]:
    """The folders of llama.cpp's older layout."""
    usual = Path.home() / ".cache/llama.cpp"
    if sys.platform == "darwin":
        usual = Path.home() / "Library/Caches/llama.cpp"
    elif sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA", Path.home())) / "llama.cpp"
    return _folders([os.environ.get("LLAMA_CACHE"), str(usual)])


def _folders(paths: list[str | None]) -> list[Path]:
    """Those that are there, each once."""
    found = {
        path.resolve(): path
        for path in (Path(p).expanduser() for p in reversed(paths) if p)
        if path.is_dir()
    }
    return list(reversed(found.values()))


def repositories() -> Iterator[tuple[str, Path]]:
    """Every repository of a model, `org/name`, with the folder of its current snapshot."""
    for root in hub_roots():
        for folder in sorted(root.glob("models--*--*")):
            repository = "/".join(folder.name.split("--", 2)[1:])
            for snapshot in snapshots(folder)[:1]:
                yield repository, snapshot


def snapshots(folder: Path) -> list[Path]:
    """The snapshots of a repository's folder: what its main branch was when last looked at, then
    the newest."""
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    current = ""
    with suppress(OSError, ValueError):
        current = decoded((folder / "refs/main").read_bytes()).strip()
    return sorted(
        found, key=lambda path: (path.name == current, path.stat().st_mtime), reverse=True
    )


def files_of(snapshot: Path) -> list[str]:
    """The files of a snapshot, as the repository names them; what is not there whole is left
    out."""
    found = []
    for folder, _, files in os.walk(snapshot):
        found += [(Path(folder) / file).relative_to(snapshot).as_posix() for file in files]
    return sorted(file for file in found if (snapshot / file).is_file())


def flat_files(root: Path) -> dict[str, str]:
    """What the manifests of llama.cpp's older layout say: `org/name:tag` to the name of a file
    beside them."""
    found = {}
    for manifest in sorted(root.glob("manifest=*=*=*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            _, organisation, name, tag = manifest.name.removesuffix(".json").split("=", 3)
            file = str(json.loads(decoded(manifest.read_bytes()))["ggufFile"]["rfilename"])
            found[f"{organisation}/{name}:{tag}"] = f"{organisation}_{name}_{file}".replace(
                "/", "_"
            )
    return found


def find(repository: str, tag: str | None) -> Path | None:
    """The GGUF file of a repository that is here, whole, and is what `tag` means; None if there is
    none.

    Without a tag a repository that has safetensors is none of GGUF files.
    """
    for root in hub_roots():
        for snapshot in snapshots(root / f"models--{repository.replace('/', '--')}"):
            files = files_of(snapshot)
            if tag is None and any(file.endswith(".safetensors") for file in files):
                return None
            chosen = choose(files, tag)
            if chosen and set(parts_of(chosen)) <= set(files):
                return snapshot / chosen
    return _find_flat(repository, tag)


def _find_flat(repository: str, tag: str | None) -> Path | None:
    prefix = repository.replace("/", "_") + "_"
    for root in flat_roots():
        told = flat_files(root)
        others = {file for name, file in told.items() if name.partition(":")[0] != repository}
        files = [p.name for p in root.iterdir() if is_gguf(p.name) and p.name.startswith(prefix)]
        own = {file.removeprefix(prefix): file for file in files if file not in others}
        asked = told.get(f"{repository}:{tag or 'latest'}")
        chosen = asked if asked in files else own.get(choose(own, tag) or "")
        if chosen and set(parts_of(chosen)) <= set(files):
            return root / chosen
    return None
