"""The choice of an output format; a format is imported when it is chosen."""

from __future__ import annotations

from raftkv.cli import exits
from raftkv.cli.output.printer import Printer, ProtobufPrinter, TablePrinter


def make_printer(name: str, *, hexadecimal: bool = False, value_only: bool = False) -> Printer:
    """Return the printer for ``--write-out NAME``.

    Arguments:
        name: of the format.
        hexadecimal: keys and values in hexadecimal.
        value_only: values without their keys.

    Raises:
        CommandError: there is no such format.
    """
    kinds: dict[str, type[Printer]] = {"protobuf": ProtobufPrinter, "table": TablePrinter}
    if name == "simple":
        from raftkv.cli.output.simple import SimplePrinter

        kinds[name] = SimplePrinter
    elif name == "fields":
        from raftkv.cli.output.fields import FieldsPrinter

        kinds[name] = FieldsPrinter
    elif name == "json":
        from raftkv.cli.output.json_format import JSONPrinter

        kinds[name] = JSONPrinter
    if name not in kinds:
        raise exits.CommandError("unsupported output format", exits.BAD_FEATURE)
    return kinds[name](hexadecimal=hexadecimal, value_only=value_only)
