"""Build the bundled models: all stages in order, each left out where its result is there.

    python -m scripts.bundled.build --size base --work build/bundled
    python -m scripts.bundled.build --size tiny --work build/tiny --target-minutes 1     # everything, in minutes

Stages: corpus, tokens, target (grown from a smaller one, its seed, where there is a size for that), start (the draft
model before it learns from the target), draft, eagle3, medusa (by `forerun train`), measure (accepted lengths on
held-out files), bundle (WORK/bundle, as the package holds them). A stage that was stopped goes on where it was. A
drafter that fails is told and left out; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ConfigError, ForerunError, nearest
from forerun.train.card import by_task, speed_table
from forerun.train.evaluate import Measured
from forerun.train.prune import prune
from forerun.train.speed import Pace, Speed
from scripts.bundled import corpus
from scripts.bundled.common import folder_written_whole, run, tell, written_whole
from scripts.bundled.export import TOKENIZER
from scripts.bundled.model import SEED, SIZES, size_of

MOST = 64_000_000  # bytes of all bundled models
KINDS = {"draft": "model", "eagle3": "eagle3", "medusa": "medusa"}  # directory to what --draft calls it
# Of `forerun train`. On a GPU a text that the target continues costs as much as a hundred that are only read.
EFFORTS: dict[str, dict[str, Any]] = {
    "tiny": dict(steps=20, rows=4, tokens=64, prompt_tokens=16, evaluate_rows=4, evaluate_every=10),
    "small": dict(steps=4000, rows=4, tokens=256, on_policy=0.25, evaluate_every=200, patience=0),
    "base": dict(
        steps=800, rows=64, tokens=256, on_policy=0.02, evaluate_rows=16, evaluate_every=200, checkpoint_every=400,
        patience=0,
    ),
}  # fmt: skip
QUICK = dict(tasks="none", speed_rounds=0)  # what else is measured takes longer than the training on a GPU
EAGLE: dict[str, dict[str, Any]] = {  # a CPU has time for more texts, or for more steps of each
    "tiny": dict(intermediate=96),
    "small": dict(intermediate=768, unroll=2),
    "base": dict(intermediate=1024),
}
HEADS = 3  # of Medusa; `model.py` has the arithmetic


@dataclass(frozen=True, slots=True)
class Build:
    """What is built, and where."""

    size: str
    work: Path
    seed_minutes: float
    target_minutes: float
    draft_minutes: float
    drafter_minutes: float
    device: str
    folders: tuple[Path, ...]
    offline: bool

    @property
    def seed(self) -> Path:
        return self.work / (self.size + SEED)

    @property
    def target(self) -> Path:
        return self.work / self.size

    @property
    def start(self) -> Path:
        return self.work / f"{self.size}-draft"


def make_corpus(build: Build) -> None:
    names = corpus.read_names(corpus.NAMES)
    places = corpus.Places(build.folders, build.work / "wheels", build.offline)
    corpus.build(names, places, build.work, corpus.MEGABYTES * 1_000_000)


def make_tokens(build: Build) -> None:
    from scripts.bundled.tokens import prepare

    size = size_of(build.size)
    prepare(build.work / corpus.CORPUS, build.work, size.vocab, size.context)


def make_target(build: Build) -> None:
    if build.seed.name not in SIZES:
        _train_decoder(build, build.size, build.target_minutes)
        return
    if not build.seed.exists():
        _train_decoder(build, build.seed.name, build.seed_minutes)
    _train_decoder(build, build.size, build.target_minutes, grown=build.seed)


def make_start(build: Build) -> None:
    """Some layers of the seed, or where there is none a decoder that learns for itself."""
    if not build.seed.exists():
        _train_decoder(build, build.start.name, build.draft_minutes)
        return
    with folder_written_whole(build.start) as make:
        pruned = prune(build.seed, size_of(build.start.name).layers)
        pruned.config.update({"max_position_embeddings": size_of(build.size).context})
        pruned.to(torch.bfloat16).save_pretrained(make)
        for name in TOKENIZER:
            shutil.copyfile(build.seed / name, make / name)


def make_draft(build: Build) -> None:
    _train_drafter(build, "draft", "small-lm", init=build.start)


def make_eagle3(build: Build) -> None:
    _train_drafter(build, "eagle3", "eagle3", **EAGLE[build.size])


def make_medusa(build: Build) -> None:
    _train_drafter(build, "medusa", "medusa", heads=HEADS)


def measure(build: Build) -> None:
    """Accepted lengths on files that neither the target nor a drafter has learnt from and on tasks, and the speed."""
    found = {}
    effort = {k: v for k, v in EFFORTS[build.size].items() if k in ("tokens", "prompt_tokens", "evaluate_rows")}
    for name, kind in KINDS.items():
        if (build.work / name).is_dir():
            options = _options(
                eval=f"{kind}:{build.work / name}", target=build.target, data=build.work / "held_out.jsonl",
                held_out=0.99, device=build.device, **effort,
            )  # fmt: skip
            found[name] = json.loads(_forerun("train", *options, "--json"))
    with written_whole(build.work / "measured.json") as work:
        work.write_text(json.dumps(found, indent=1))


def bundle(build: Build) -> None:
    """All models as the package holds them. Raises ForerunError if they are too large."""
    out = build.work / "bundle"
    measured = json.loads((build.work / "measured.json").read_text())
    with folder_written_whole(out) as make:
        shutil.copytree(build.target, make / "target")
        for name in measured:
            shutil.copytree(build.work / name, make / name)
            card = make / name / "README.md"
            own = f"Drafter for {build.target}"
            text = card.read_text(encoding="utf-8").replace(own, "Drafter for the bundled model")
            card.write_text(text + _of_the_bundle(measured[name]), encoding="utf-8")
        size = sum(path.stat().st_size for path in make.rglob("*") if path.is_file())
        if size > MOST:
            raise ForerunError(f"the models for {out} have {size} bytes, over {MOST}: give Medusa fewer heads")
    tell(f"{out}: {size / 1e6:.1f} MB; look at it, then copy it over forerun/bundled")


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the build: what it makes, how, of which other stages' results, and whether the rest can do without."""

    made: Callable[[Build], Path]
    make: Callable[[Build], None]
    of: tuple[str, ...] = ()
    needed: bool = True


STAGES = {
    "corpus": Stage(lambda b: b.work / corpus.MANIFEST, make_corpus),
    "tokens": Stage(lambda b: b.work / "tokens.json", make_tokens, ("corpus",)),
    "target": Stage(lambda b: b.target, make_target, ("tokens",)),
    "start": Stage(lambda b: b.start, make_start, ("tokens", "target")),
    "draft": Stage(lambda b: b.work / "draft", make_draft, ("tokens", "target", "start"), needed=False),
    "eagle3": Stage(lambda b: b.work / "eagle3", make_eagle3, ("tokens", "target"), needed=False),
    "medusa": Stage(lambda b: b.work / "medusa", make_medusa, ("tokens", "target"), needed=False),
    "measure": Stage(lambda b: b.work / "measured.json", measure, ("tokens", "target")),
    "bundle": Stage(lambda b: b.work / "bundle", bundle, ("target", "measure")),
}
LAST = ("measure", "bundle")  # of whatever models there are: made anew when another one is


def build_all(build: Build, names: list[str]) -> list[str]:
    """Do the stages of these names that have not been done, in order; the drafters that failed."""
    failed = []
    for name, stage in STAGES.items():
        if name not in names:
            continue
        if stage.made(build).exists():
            tell(f"{name}: {stage.made(build)} is there")
            continue
        for before in stage.of:
            if not (path := STAGES[before].made(build)).exists():
                raise ConfigError(f"the stage {name} needs {path}: do the stage {before} first")
        tell(f"{name}: making {stage.made(build)}")
        try:
            stage.make(build)
        except ForerunError as error:
            if stage.needed:
                raise
            tell(f"{name}: failed: {error}")
            failed.append(name)
        else:
            if name not in LAST:
                _forget(build)
    return failed


def _forget(build: Build) -> None:
    """Remove what the last stages made of other models."""
    for name in LAST:
        made = STAGES[name].made(build)
        if made.is_dir():
            shutil.rmtree(made)
        else:
            made.unlink(missing_ok=True)


def _train_decoder(build: Build, size: str, minutes: float, **more: Any) -> None:
    """In a process of its own: what it had on the device is free when it ends."""
    options = _options(size=size, work=build.work, minutes=minutes, device=build.device, **more)
    _call([sys.executable, "-m", "scripts.bundled.target", *options])


def _train_drafter(build: Build, name: str, recipe: str, **options: Any) -> None:
    out = build.work / name
    given = dict(
        recipe=recipe, target=build.target, data=build.work / "train.jsonl", out=out, device=build.device,
        max_minutes=build.drafter_minutes, seed=1, **EFFORTS[build.size], **QUICK, **options,
    )  # fmt: skip
    resume = ["--resume"] if out.with_name(f"{name}.training").exists() else []
    _forerun("train", *_options(**given), *resume)


def _options(**given: Any) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _forerun(*arguments: str) -> str:
    """The standard output of a verb of forerun."""
    return _call([sys.executable, "-m", "forerun", *arguments])


def _call(command: list[str]) -> str:
    """The standard output of a program; the rest of what it says goes where ours does. Raises ForerunError."""
    tell(shlex.join(command))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()  # the terminal has told it too: let it write its checkpoint
        raise
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode:
        raise ForerunError(f"{shlex.join(command[:4])} ended with {process.returncode}; what it said is above")
    print(said, end="", file=sys.stderr)
    return said


def _of_the_bundle(findings: dict[str, Any]) -> str:
    """The end of a card."""
    measured, speed = [Measured(**entry) for entry in findings["measured"]], findings["speed"]
    paces = tuple(Pace(**pace) for pace in speed["paces"])
    return "\n".join(
        [
            "\n## In the bundle\n",
            "Made for the bundled target by `scripts/bundled/build.py` (`make bundled`, or `scripts/bundled/README.md`"
            " for a GPU machine), on some of the files that the target has learnt from: the target's card names their"
            " packages, versions and licences. *held-out* are files held out from both, tasks those of forerun; in"
            " brackets what arithmetic expects along the same texts. The learnt weights are under Apache-2.0.\n",
            *by_task(measured, sorted({entry.depth for entry in measured})),
            *speed_table(Speed(paces, *(speed[name] for name in ("prompts", "tokens", "rounds", "machine")))),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", help=", ".join(EFFORTS))
    parser.add_argument("--work", type=Path, default=Path("build/bundled"), help="the folder to work in")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), metavar="STAGE", help="only these")
    parser.add_argument("--seed-minutes", type=float, default=1.0, help="of the model that the target is grown from")
    parser.add_argument("--target-minutes", type=float, default=6.0)
    parser.add_argument("--draft-minutes", type=float, default=1.0, help="of the stage start")
    parser.add_argument("--drafter-minutes", type=float, default=2.0, help="of each drafter, at most")
    parser.add_argument("--device", default="auto", help="auto takes CUDA where there is one")
    parser.add_argument("--from", type=Path, action="append", default=[], dest="folders", metavar="FOLDER",
                        help="a site-packages or a folder of wheels for the corpus; may be repeated")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="do not ask the package index")
    args = parser.parse_args()
    if args.size not in EFFORTS:
        raise ConfigError(f"there is no size {args.size!r}: {nearest(args.size, EFFORTS)}")
    for name in args.stages:
        if name not in STAGES:
            raise ConfigError(f"there is no stage {name!r}: {nearest(name, STAGES)}")
    if min(args.seed_minutes, args.target_minutes, args.draft_minutes, args.drafter_minutes) <= 0:
        raise ConfigError("the minutes must be numbers over 0")
    build = Build(
        args.size, args.work, args.seed_minutes, args.target_minutes, args.draft_minutes, args.drafter_minutes,
        args.device, tuple(args.folders), args.offline,
    )  # fmt: skip
    args.work.mkdir(parents=True, exist_ok=True)
    failed = build_all(build, args.stages)
    if failed:
        raise ForerunError(f"not made: {', '.join(failed)}; run the same command again to try them once more")


if __name__ == "__main__":
    run(main)
