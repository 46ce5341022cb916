"""The reference of the command lines, made from the programs themselves while the site is built.

A page has a line ``<!-- commands: raftkvctl -->``; ``filled`` puts every command there, with its flags, defaults and
environment variables. So no page can name what the program does not have. ``python -m docsite.commands raftkvctl``
prints it, ``python -m docsite.commands man build/man/man1`` writes manual pages.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from raftkv import __version__
from raftkv.cli.command import Branch, Leaf, Page, flag_row
from raftkv.cli.ctl.__main__ import main as run_ctl
from raftkv.cli.main import USAGE, main
from raftkv.cli.pflag import Flag

MARK = re.compile(r"^<!-- commands: (\w+) -->$", re.MULTILINE)


def filled(text: str) -> str:
    """Return a page with its marks replaced."""
    return MARK.sub(lambda found: PAGES[found[1]](), text)


def _cell(text: str) -> str:
    """Return a text for a cell of a table: nothing in it is Markdown."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("*", "&#42;")
    return escaped.replace("`", "&#96;").replace("_", "&#95;").replace("${", "&#36;{").replace("\n", " ")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def server() -> str:
    """Return the flags of a member, then the help of the other commands of ``raftkv``."""
    from raftkv.cli.server_options import _ALIASES, FLAGS, IDLE, REFUSED, SETTING

    aliases = {name: alias for alias, name in _ALIASES.items()}
    settings = [flag for name, flag in FLAGS.items() if flag.fate == SETTING and name not in _ALIASES]
    parts = ["## raftkv serve\n", f"Run a member; `raftkv` alone does the same.\n{_commas(USED_AS)}\n"]
    for group in dict.fromkeys(flag.group for flag in settings):
        rows = []
        for flag in (flag for flag in settings if flag.group == group):
            older = f" Also <code>--{aliases[flag.name]}</code>." if flag.name in aliases else ""
            rows.append((_named(f"--{flag.name}", _variable(flag.name)), _cell(flag.help) + older))
        parts.append(f"### {group}\n\n" + _table(("flag and environment", "what it sets (default)"), rows))
    for title, fate, words in (
        (
            "Flags without effect",
            IDLE,
            "A member takes these flags of etcd, and says in one line that they do nothing.",
        ),
        ("Flags that are refused", REFUSED, "A member does not start with one of these, unless it asks for nothing."),
    ):
        names = [f"`--{name}`" for name, flag in FLAGS.items() if flag.fate == fate]
        parts.append(f"### {title}\n\n{words}\n\n{', '.join(names)}\n")
    others = dict.fromkeys(re.findall(r"^  raftkv ([a-z][\w-]+)", USAGE, re.MULTILINE))
    parts.extend(f"## raftkv {name}\n\n{_fenced(_help_of(name))}" for name in others)
    return "\n".join(parts)


USED_AS = (
    "Flags may have one dash or two",
    "each is an environment variable too",
    "`--config-file FILE` reads a YAML file, whose keys are the names of the flags, instead of both",
)


def _commas(parts: tuple[str, ...]) -> str:
    return "; ".join(parts) + "."


def _variable(flag: str) -> str:
    return "ETCD_" + flag.upper().replace("-", "_")


def _help_of(command: str) -> str:
    """Return what ``raftkv COMMAND --help`` prints."""
    return _printed(lambda: main([command] if command == "version" else [command, "--help"]))


def _printed(run: Callable[[], int]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run()
    return printed.getvalue()


def ctl() -> str:
    """Return all commands of ``raftkvctl``."""
    from raftkv.cli.ctl.tree import GLOBAL_FLAGS, make_tree

    return _tree(make_tree(), GLOBAL_FLAGS)


def utl() -> str:
    """Return all commands of ``raftkvutl``."""
    from raftkv.cli.utl.tree import make_tree

    root = make_tree()
    return _tree(root, tuple(root.flags))


def _tree(root: Branch, shared: tuple[Flag, ...]) -> str:
    program = root.name or ""
    parts = []
    if shared:
        parts.append("## Flags of every command\n\n" + _flags(shared))
    for command, path in _walk(root, (program,)):
        words = " ".join(path)
        level = "#" * min(len(path), 3)
        if isinstance(command, Leaf):
            usage = " ".join(filter(None, (words, command.usage, "[flags]" if command.flags else "")))
            own = [flag for flag in command.own if flag not in shared]
            parts.append(f"{level} {words}\n\n{_prose(command.help or '')}\n\n{_fenced(usage)}")
            if own:
                parts.append(_flags(own))
            if command.examples:
                parts.append(_fenced("\n".join(f"{program} {example}" for example in command.examples)))
        else:
            parts.append(f"{level} {words}\n\n{_prose(command.help or '')}\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Return paragraphs, and as a block of code what keeps its lines: it follows ``\\b``, click's mark, at the end."""
    prose, *code = text.split("\b\n")
    shown = "\n\n".join(map(_cell, prose.strip().split("\n\n")))
    return f"{shown}\n\n{_fenced(''.join(code)).rstrip()}" if code else shown


def _flags(flags: tuple[Flag, ...] | list[Flag]) -> str:
    rows = []
    for flag in flags:
        name, _ = flag_row(flag)
        choices = f" ({', '.join(flag.choices)})" if name.endswith(" WORD") else ""
        default = f"`{flag.shown_default}`" if flag.shown_default else ""
        rows.append((_named(name, flag.variable), default, _cell(flag.usage + choices)))
    return _table(("flag and environment" if any(flag.variable for flag in flags) else "flag", *HEAD), rows)


HEAD = ("default", "what it does")


def _named(flag: str, variable: str) -> str:
    """Return the cell of a flag, with its environment variable below it."""
    shown = f"`{flag}`".replace("|", "\\|")
    return f"{shown}<br>`{variable}`" if variable else shown


def _walk(root: click.Group, path: tuple[str, ...]) -> Iterator[tuple[click.Command, tuple[str, ...]]]:
    """Go through the commands below `root`, in the order of its help page; each with the words that call it."""
    for name, command in root.commands.items():
        words = (*path, name)
        yield command, words
        if isinstance(command, click.Group):
            yield from _walk(command, words)


def known_words() -> dict[str, set[str]]:
    """Return the flags of each program, for tests of what pages name: ``{"raftkvctl": {"--endpoints", ...}, ...}``."""
    found = re.compile(r"(?<![\w-])--[a-z][\w-]*")
    return {page: {"--help", "--version", *found.findall(make())} for page, make in PAGES.items()}


PAGES: dict[str, Callable[[], str]] = {"raftkv": server, "raftkvctl": ctl, "raftkvutl": utl}
"""Program to what makes its reference."""


def manual(program: str) -> str:
    """Return the manual page of a program, as roff: what its own help says, command by command."""
    if program == "raftkv":
        summary, sections = "run a member of a raftkv cluster, and work on this machine", {"USAGE": _help_of("serve")}
        names = dict.fromkeys(re.findall(r"^  raftkv ([a-z][\w-]+)", USAGE, re.MULTILINE))
        sections |= {f"raftkv {name}": _help_of(name) for name in names if name != "version"}
    else:
        root = importlib.import_module(f"raftkv.cli.{program.removeprefix('raftkv')}.tree").make_tree()
        summary, sections = (root.get_short_help_str(limit=200).rstrip("."), {})
        for command, path in _walk(root, (program,)):
            sections[" ".join(path)] = command.get_help(_context(root, path))
            if path == ("raftkvctl", "options"):
                sections[" ".join(path)] = _printed(lambda: run_ctl(["options"]))
    lines = [f'.TH {program.upper()} 1 "" "raftkv {__version__}"', ".SH NAME", f"{program} \\- {_roff(summary)}"]
    for title, text in sections.items():
        lines += [f'.SH "{title}"', ".nf", _roff(text.strip()), ".fi"]
    return "\n".join([*lines, ""])


def _context(root: click.Group, path: tuple[str, ...]) -> click.Context:
    """Return the context of a command, below those of its groups: examples begin with the name of the program."""
    command: click.Command = root
    context = click.Context(root, info_name=path[0])
    for word in path[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[word]
        context = click.Context(command, parent=context, info_name=word, max_content_width=80)
        context.formatter_class = Page
    return context


def _roff(text: str) -> str:
    return re.sub(r"^(?=[.'])", r"\\&", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)


def write_manuals(folder: Path) -> None:
    """Write the manual page of each program to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for program in PAGES:
        (folder / f"{program}.1").write_text(manual(program), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "man":
        write_manuals(Path(sys.argv[2]))
    else:
        print(PAGES[sys.argv[1]]())
