"""A run that never was: its records, as nodes and arbiter would have written them, with times that tests know."""

from __future__ import annotations

from raftkv.client.records import Record
from raftkv.training.records import BROKEN, GATHERING, RUNNING, Fault, GenerationRecord, Member, Node, RunKeys, State

KEYS = RunKeys("jobs/a")
LIMITS = {"min_nodes": 2, "max_nodes": 4}
A, B, C = (Node(f"{host}-1", host, f"10.0.0.{number}", **LIMITS, time=100.0) for number, host in enumerate("abc"))
KILLED = Fault(1, B.id, "b", rank=1, cause="signal", signal="SIGKILL", time=109.0)
COLLATERAL = Fault(1, A.id, "a", rank=0, cause="exit", exit_code=1, time=109.1)

Script = list[tuple[str, Record | str | None]]


def members(*nodes: Node) -> tuple[Member, ...]:
    return tuple(node.member for node in nodes)


def state(generation: int, phase: str, time: float, reason: str = "", cause: str = "", node: str = "") -> State:
    return State(generation, phase, reason, cause, node, **LIMITS, time=time)


SCRIPT: Script = [
    ("node/a-1", A),
    ("arbiter", "a-1"),
    ("state", state(0, GATHERING, 100.0)),
    ("node/b-1", B),
    ("round", GenerationRecord(1, members(A, B), 101.0)),
    ("state", state(1, RUNNING, 101.0)),
    ("boot/1", "10.0.0.0:29500"),
    ("fault/1/000000", COLLATERAL),
    ("fault/1/000001", KILLED),
    ("state", state(1, BROKEN, 109.25, str(KILLED), "signal", B.id)),
    ("node/b-1", None),
    ("node/c-1", C),
    ("round", GenerationRecord(2, members(A, C), 109.75)),
    ("state", state(2, RUNNING, 109.75)),
    ("node/a-1", None),
    ("arbiter", "c-1"),
    ("state", state(2, BROKEN, 120.0, "lost 1 of 2: a", "heartbeat lost", A.id)),
    ("fault/1/000000", None),
    ("fault/1/000001", None),
]
"""b's worker is killed, c takes b's place, and then the arbiter dies."""

GENERATION_2_RUNS = 14
"""So many steps of the script lead to the second generation."""


def encoded(content: Record | str | None) -> bytes | None:
    """What a key holds; None: it is deleted."""
    if content is None:
        return None
    return content.encode()
