"""One record in etcdutl's output formats: simple, fields, json, table.

>>> cells = [Cell("hash", "Hash", "hash", 255, "ff"), Cell("revision", "Revision", "revision", 7)]
>>> print(rendered("simple", cells))
ff, 7
>>> print(rendered("json", cells))
{"hash":255,"revision":7}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raftkv.cli.exits import BAD_FEATURE, CommandError
from raftkv.cli.goflags.command import Invocation

FORMATS = ("simple", "fields", "json", "protobuf", "table")


@dataclass(frozen=True)
class Cell:
    """One value of a record: its name in JSON, as a field and as a column, and how eyes see it (empty: as it is)."""

    json_name: str
    field: str
    title: str
    value: int | str
    shown: str = ""

    @property
    def text(self) -> str:
        """The value in the simple format and in a table."""
        return self.shown or str(self.value)


def rendered(write_out: str, cells: Sequence[Cell]) -> str:
    """Return a record as text, without the last line end.

    Arguments:
        write_out: the format.
        cells: of the record, in order.

    Raises:
        CommandError: no such format, or none that can show it.
    """
    if write_out == "simple":
        return ", ".join(cell.text for cell in cells)
    if write_out == "fields":
        return "\n".join(f'"{cell.field}" : {cell.value}' for cell in cells)
    if write_out == "json":
        from raftkv.cli.output.json_format import encode

        return encode({cell.json_name: cell.value for cell in cells})
    if write_out == "table":
        from raftkv.cli.output.table import render

        return render([cell.title for cell in cells], [[cell.text for cell in cells]])
    check_format(write_out)
    raise CommandError(f"{write_out} not supported as output format", BAD_FEATURE)


def check_format(write_out: str) -> None:
    """Refuse a word that is no output format, before any work.

    Raises:
        CommandError: it is none.
    """
    if write_out not in FORMATS:
        raise CommandError("unsupported output format", BAD_FEATURE)


def show(invocation: Invocation, cells: Sequence[Cell]) -> None:
    """Print a record in the format that ``--write-out`` asks for."""
    print(rendered(invocation["write-out"], cells))
