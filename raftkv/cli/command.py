"""Commands with Go's flag rules, on click.

A ``Leaf`` is a click command whose words are parsed by ``pflag``; ``dispatch`` finds the leaf and runs it. click
provides the command tree, the help pages and the shell completion. The command word is found as in etcdctl: flags may
precede it, and an unambiguous prefix is enough (``raftkvctl endp st``).

A leaf names its function as ``module:function``, which is imported when the command runs: ``raftkvctl version`` must
not load the code that talks to a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from raftkv.cli import pflag
from raftkv.cli.pflag import BOOL, KINDS, Flag, quote
from raftkv.cli.program import BAD_ARGUMENTS, COMMANDS, ERROR, SUCCESS, CommandError, imported, refused


@dataclass
class Invocation(pflag.Parsed):
    """A parsed command line: its words, the known flags, and the commands of the program."""

    flags: dict[str, Flag] = field(default_factory=dict)
    program: click.Command = field(default_factory=lambda: click.Command(""))
    usage: str = "..."
    command: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def argument(self, complaint: str, code: int = BAD_ARGUMENTS) -> str:
        """Return the only argument.

        Raises:
            CommandError: with this text and code, if there is no argument or more than one.
        """
        if len(self.arguments) != 1:
            raise CommandError(complaint, code)
        return self.arguments[0]

    def given(self) -> list[str]:
        """Return an argument for each word of the usage line; empty for a missing one in brackets.

        Raises:
            CommandError: too few or too many arguments.
        """
        words = self.usage.split()
        least = sum(not word.startswith("[") for word in words)
        if not least <= len(self.arguments) <= len(words):
            raise CommandError(f"{self.command} needs {self.usage or 'no arguments'}", BAD_ARGUMENTS)
        return [*self.arguments, *[""] * (len(words) - len(self.arguments))]

    def refuse_arguments(self, complaint: str) -> None:
        """Raise CommandError with this text if there is an argument."""
        if self.arguments:
            raise CommandError(complaint, BAD_ARGUMENTS)

    def refuse_surplus(self) -> None:
        """Raise CommandError if there are more arguments than the usage line shows; etcdctl often ignores them."""
        if "..." not in self.usage and (surplus := self.arguments[len(self.usage.split()) :]):
            takes = f"takes {self.usage}; quote a text that has spaces" if self.usage else "takes no arguments"
            raise CommandError(f"unexpected argument {quote(surplus[0])}: the command {takes}", BAD_ARGUMENTS)


Run = Callable[[Invocation], None]


class _FlagOption(click.Option):
    """A flag for click's completion; click does not parse it or show it in help pages."""

    def __init__(self, flag: Flag) -> None:
        names = [f"--{flag.name}", *([f"-{flag.short}"] if flag.short else [])]
        kind = click.Choice(flag.choices) if flag.choices else None
        super().__init__(names, help=flag.usage, is_flag=flag.kind == BOOL, type=kind)


def _options(command: click.Command, flags: Sequence[Flag], ctx: click.Context) -> list[click.Parameter]:
    help_option = command.get_help_option(ctx)
    return [*map(_FlagOption, flags), *([help_option] if help_option else [])]


class Page(click.HelpFormatter):
    """A help page that keeps every flag on one line, because click also breaks lines after hyphens."""

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", NO_BREAK_HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write rows of two columns.

        Arguments:
            rows, col_max, col_spacing: as for click.
        """
        super().write_dl([(name, text.replace("-", NO_BREAK_HYPHEN)) for name, text in rows], col_max, col_spacing)

    def write(self, string: str) -> None:
        """Write text that is already wrapped."""
        super().write(string.replace(NO_BREAK_HYPHEN, "-").replace(NO_BREAK_SPACE, " "))


NO_BREAK_HYPHEN = "\N{NON-BREAKING HYPHEN}"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
HELP_ROW = ("-h, --help", "print this page")


def flag_row(flag: Flag) -> tuple[str, str]:
    """Return a flag and its line on help pages: values, purpose, default, environment variable."""
    values = "|".join(flag.choices) if len("|".join(flag.choices)) < CHOICES_WIDTH else "WORD"
    names = f"-{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
    notes = [", ".join(flag.choices)] if flag.choices and values == "WORD" else []
    notes += [f"default: {flag.shown_default}"] if flag.shown_default else []
    notes += [f"environment: {flag.variable}"] if flag.variable else []
    shown = "" if flag.kind == BOOL else f" {values or KINDS[flag.kind].metavar}"
    return f"{names}{shown}", f"{flag.usage} [{'; '.join(notes)}]" if notes else flag.usage


CHOICES_WIDTH = 16


def _write_globals(formatter: click.HelpFormatter, root: str, flags: Sequence[Flag]) -> None:
    """Write only the names of the global flags if there are many, because a page is about its command."""
    with formatter.section("Global options"):
        inherited = [flag for flag in flags if flag.variable]
        if not inherited:
            formatter.write_dl(list(map(flag_row, flags)))
            return
        names = (
            f"-{flag.short},{NO_BREAK_SPACE}--{flag.name}" if flag.short else f"--{flag.name}" for flag in inherited
        )
        formatter.write_text("  ".join(names))
        formatter.write_paragraph()
        first = inherited[0]
        variable = f"Each is also an environment variable: --{first.name} is {first.variable}."
        formatter.write_text(f"{variable} `{root} options` describes them and tells their defaults.")


class Leaf(click.Command):
    """A command that runs a function.

    Arguments:
        path: words that call the command, without the program's name.
        target: ``module:function`` to run; the function takes an ``Invocation``.
        usage: rest of the usage line after the name.
        short: one line of help.
        flags: flags of this command; ``shared`` are the flags of every command.
        details: more help.
    """

    def __init__(
        self,
        path: Sequence[str],
        target: str,
        usage: str,
        short: str,
        flags: Sequence[Flag],
        shared: Sequence[Flag],
        details: str,
    ) -> None:
        self.flags = [*flags, *shared]
        self.own, self.shared, self.target = flags, shared, target
        self.words = " ".join(path)
        self.examples = [self.words]
        text = f"{short}.\n\n{details}" if details else f"{short}."
        super().__init__(path[-1], help=text, short_help=short)
        self.usage = usage

    def like(self, *examples: str) -> None:
        """Add examples for the help page: the words that follow the command's."""
        self.examples = [f"{self.words} {given}".rstrip() for given in examples]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the flags for help and completion, created on demand: creating hundreds of flags takes 10 ms."""
        return _options(self, self.flags, ctx)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the rest of the usage line after the command."""
        return [piece for piece in (self.usage, "[options]") if piece]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's flags, then examples, then the names of the flags of all commands."""
        root = ctx.find_root().info_name or ""
        with formatter.section("Options"):
            formatter.write_dl([*map(flag_row, self.own), HELP_ROW])
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for example in self.examples:
                    formatter.write(f"  {root} {example}\n")
        _write_globals(formatter, root, self.shared)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words with ``pflag``; during completion, errors are ignored."""
        try:
            parsed = pflag.parse(self.flags, args)
        except pflag.HelpRequested:
            if ctx.resilient_parsing:
                return []
            click.echo(ctx.get_help())
            ctx.exit(SUCCESS)
        except pflag.FlagError as error:
            if ctx.resilient_parsing:
                return []
            raise CommandError(str(error), ERROR) from None
        flags = {flag.name: flag for flag in self.flags}
        ctx.obj = Invocation(**vars(parsed), flags=flags, program=ctx.find_root().command)
        ctx.obj.usage, ctx.obj.command = self.usage, self.words
        return []

    def invoke(self, ctx: click.Context) -> None:
        """Import the function and run it."""
        run: Run = imported(self.target)
        run(ctx.obj)


class Branch(click.Group):
    """A word with subcommands; without a subcommand it prints its help.

    Arguments:
        name: the word.
        short: one line of help.
        module: module and name prefix of its commands' functions: ``ctl.maintenance:user_``.
        flags: flags of all its commands; ``shared`` are the flags of all commands of the program.
        path: words that lead to it, after the program's name.
    """

    def __init__(
        self,
        name: str,
        short: str,
        module: str = "",
        flags: Sequence[Flag] = (),
        shared: Sequence[Flag] = (),
        path: tuple[str, ...] = (),
    ) -> None:
        self.flags = [*flags, *shared]
        self.own, self.shared, self.module, self.path = flags, shared, module, path
        super().__init__(name, help=f"{short}.", short_help=short)

    def branch(self, name: str, short: str, module: str, flags: Sequence[Flag] = ()) -> Branch:
        """Add a word with subcommands, and return it; see ``Branch``."""
        made = Branch(name, short, module, flags, self.shared, (*self.path, name))
        self.add_command(made)
        return made

    def leaf(
        self,
        name: str,
        usage: str,
        short: str,
        flags: Sequence[Flag] = (),
        details: str = "",
        *,
        run: str = "",
        is_alike: bool = True,
    ) -> Leaf:
        """Add a command and return it; ``Leaf.like`` adds examples to it.

        Arguments:
            name, usage, short, flags, details: as for ``Leaf``.
            run: function in the module of this branch, or ``module:function``; empty: same name as the command.
            is_alike: whether the command has the flags of all commands of this branch.
        """
        target = run if ":" in run else f"{self.module}{run or name.replace('-', '_')}"
        own = (*flags, *self.own) if is_alike else flags
        made = Leaf((*self.path, name), f"raftkv.cli.{target}", usage, short, own, self.shared, details)
        self.add_command(made)
        return made

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return no flags: see ``Leaf``."""
        return _options(self, self.flags, ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return names in the order of declaration."""
        return list(self.commands)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the rest of the usage line after the command."""
        return ["COMMAND [options]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and the flags of all commands."""
        root = ctx.find_root().info_name or ""
        shown = self.commands.values()
        with formatter.section("Commands"):
            formatter.write_dl([(child.name or "", child.get_short_help_str(limit=100)) for child in shown])
        way = " ".join(word for word in (ctx.command_path, "COMMAND --help") if word)
        _write_globals(formatter, root, self.flags)
        formatter.write_paragraph()
        formatter.write_text(f"`{way}` describes a command and gives examples.")

    def find(self, word: str) -> click.Command | None:
        """Return the command with this name, or the only one whose name begins with it."""
        if word in self.commands:
            return self.commands[word]
        found = [command for name, command in self.commands.items() if name.startswith(word)]
        return found[0] if len(found) == 1 else None


def resolve(root: Branch, words: Sequence[str]) -> tuple[list[click.Command], list[str]]:
    """Find the command for the words of a command line.

    Arguments:
        root: root of the command tree.
        words: words of the command line.

    Returns:
        The path to the command from the root, and the words without the command's names.
    """
    path: list[click.Command] = [root]
    rest = list(words)
    while isinstance(branch := path[-1], Branch):
        position = _first_argument(rest, branch)
        child = None if position is None else branch.find(rest[position])
        if position is None or child is None:
            break
        path.append(child)
        del rest[position]
    return path, rest


def _first_argument(words: Sequence[str], branch: Branch) -> int | None:
    """Return the position of the first word that is neither a flag nor the value of one."""
    switches = {f"--{flag.name}" for flag in branch.flags if flag.kind == BOOL} | {"--help", "-h"}
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return None
        if not word.startswith("-") or word == "-":
            return position if word else None
        takes_next = "=" not in word and word not in switches and (word.startswith("--") or len(word) == 2)
        position += 2 if takes_next else 1
    return None


def dispatch(root: Branch, words: Sequence[str]) -> int:
    """Run the command for the words of a command line.

    Arguments:
        root: root of the command tree.
        words: words of the command line.

    Returns:
        The exit code.

    Raises:
        CommandError: the command failed or does not exist.
    """
    path, rest = resolve(root, ["version"] if list(words) == ["--version"] else words)
    if path[-1] is root and (position := _first_argument(rest, root)) is not None:
        if rest[position] == "help":
            path, rest = resolve(root, rest[:position] + rest[position + 1 :])
            if path[-1] is root and (topic := _first_argument(rest, root)) is not None:
                raise CommandError(_unknown(root, rest[topic], root.name or ""), ERROR)
            return _show_help(path)
        raise CommandError(_unknown(root, rest[position], root.name or ""), ERROR)
    leaf = path[-1]
    if not isinstance(leaf, Leaf):
        assert isinstance(leaf, Branch)
        _refuse_unknown_flags(leaf, rest)
        if (position := _first_argument(rest, leaf)) is not None:
            raise CommandError(_unknown(leaf, rest[position], " ".join(one.name or "" for one in path)), ERROR)
        return _show_help(path)
    context = _context(path)
    try:
        leaf.parse_args(context, rest)
        leaf.invoke(context)
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    return SUCCESS


def _refuse_unknown_flags(branch: Branch, words: Sequence[str]) -> None:
    with refused(pflag.FlagError), suppress(pflag.HelpRequested):
        pflag.parse(branch.flags, words)


def _context(path: Sequence[click.Command]) -> click.Context:
    context: click.Context | None = None
    for command in path:
        context = click.Context(command, parent=context, info_name=command.name)
        context.formatter_class = Page
    assert context is not None
    return context


def _show_help(path: Sequence[click.Command]) -> int:
    click.echo(path[-1].get_help(_context(path)))
    return SUCCESS


def _unknown(branch: Branch, word: str, path: str) -> str:
    is_server_s = word in COMMANDS and " " not in path
    hint = ": it is a command of raftkv" if is_server_s else pflag.did_you_mean(word, branch.commands)
    hint = hint or f"; see {path} --help"
    return f'unknown command "{word}" for "{path}"' + hint
