"""The pages of the documentation that are made from something else: the command line's reference,
and the changelog.

    python scripts/cli_reference.py     # the reference, on stdout

MkDocs calls `on_files` when it builds the site (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import html
from itertools import groupby
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from forerun.cli.main import app

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
BEGINNING = """# Command line

On this page you can look up every verb of `forerun` and every flag it takes, as `forerun VERB --help` prints them.

Exit codes: 0 done, 1 a failure while running, 2 bad input, 130 interrupted. Text goes to stdout, all else to stderr.
`forerun --install-completion` lets the shell complete verbs, flags and the names of models.
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are in no file of docs/ (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "cli.md", content=reference()))
    changes = CHANGELOG.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    return files


def reference() -> str:
    """The whole page, in Markdown."""
    root = typer.main.get_command(app)
    return "\n".join([BEGINNING, *_sections(root, "forerun", 2)])


def _sections(group: Any, path: str, level: int) -> list[str]:
    """A section for each verb of a group, one level deeper for those of a group within it."""
    lines = []
    for name in sorted(group.commands):
        command = group.commands[name]
        lines += [f"{'#' * level} {path} {name}", "", *_section(command, f"{path} {name}"), ""]
        if hasattr(command, "commands"):
            lines += _sections(command, f"{path} {name}", level + 1)
    return lines


def _section(command: Any, path: str) -> list[str]:
    """Usage, help, examples and flags of one verb."""
    context = command.context_class(command, info_name=path)
    usage = command.get_usage(context).removeprefix("Usage: ").strip()
    examples = [line for line in _plain(command.epilog or "").splitlines()[1:] if line]
    lines = ["```", usage, "```", "", _escaped(command.help or ""), ""]
    if examples:
        lines += ["For example:", "", "```", *examples, "```", ""]
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    for panel, parameters in groupby(shown, key=_panel):
        lines += _flags(panel, [parameter.get_help_record(context) for parameter in parameters])
    return lines


def _panel(parameter: Any) -> str:
    own = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return getattr(parameter, "rich_help_panel", None) or own


def _flags(panel: str, records: list[tuple[str, str]]) -> list[str]:
    """The flags of one panel of the help; what many verbs share is folded away."""
    entries = [
        f"<dt><code>{html.escape(names)}</code></dt><dd>{_escaped(text)}</dd>"
        for names, text in records
    ]
    flags = ["<dl>", *entries, "</dl>"]
    if panel in ("Arguments", "Options"):
        return [f"**{panel}**", "", *flags, ""]
    return [
        f'<details class="note"><summary>{panel}: {len(records)} flags</summary>',
        *flags,
        "</details>",
        "",
    ]


def _plain(text: str) -> str:
    """Without rich's markup; what typer itself adds in brackets, behind two spaces, is none."""
    return Text.from_markup(text.replace("  [", "  \\[")).plain


def _escaped(text: str) -> str:
    return html.escape(_plain(text), quote=False)


if __name__ == "__main__":
    print(reference())
