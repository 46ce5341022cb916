"""Golden files: blocks of commands, each with its expected output.

    # Comments and blank lines stand between blocks.
    verb argument argument
    verb argument
    ----
    everything that the commands above print,
    up to the first blank line

A block that prints nothing expects ``ok``. ``pytest --rewrite`` replaces the expected texts by the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SEPARATOR = "----"


@dataclass(slots=True)
class Block:
    """Commands that are run one after the other, and what they print together."""

    line: int
    prelude: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    expected: str = ""


def parse(text: str) -> tuple[list[Block], list[str]]:
    """The blocks of a file, and the comments behind the last one."""
    blocks: list[Block] = []
    block = Block(1)
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if line == SEPARATOR:
            expected = []
            for _, output in lines:
                if not output:
                    break
                expected.append(output)
            block.expected = "\n".join(expected) + "\n"
            blocks.append(block)
            block = Block(number)
        elif block.commands:
            block.commands.append(line)
        elif not line or line.startswith("#"):
            block.prelude.append(line)
        else:
            block.line = number
            block.commands.append(line)
    if block.commands:
        raise ValueError(f"line {block.line}: commands without {SEPARATOR}")
    return blocks, block.prelude


def run(path: Path, execute: Callable[[str], str], rewrite: bool) -> None:
    """Run a file: ``execute`` gets a command line and returns what it prints."""
    blocks, rest = parse(path.read_text())
    out: list[str] = []
    for block in blocks:
        actual = "".join(execute(command) for command in block.commands) or "ok\n"
        if "\n\n" in actual:
            raise ValueError(f"{path.name}:{block.line}: output contains a blank line")
        if not rewrite:
            assert actual == block.expected, f"{path.name}:{block.line}: {'; '.join(block.commands)}\n{actual}"
        out += [*block.prelude, *block.commands, SEPARATOR, actual]
    if rewrite:
        path.write_text("\n".join([*out, *rest]).rstrip("\n") + "\n")
