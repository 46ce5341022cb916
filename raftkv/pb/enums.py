"""Names of open enums: a number that this version does not know is its own name, as Go prints it."""

from __future__ import annotations

from raftkv.pb import rpc_pb2


def alarm_name(number: int) -> str:
    """Name of an alarm; ``7`` for one without."""
    known = rpc_pb2.AlarmType.DESCRIPTOR.values_by_number.get(number)
    return str(number) if known is None else known.name


def alarm_number(name: str) -> int:
    """Return the alarm that ``alarm_name`` calls so."""
    known = rpc_pb2.AlarmType.DESCRIPTOR.values_by_name.get(name)
    return int(name) if known is None else known.number
