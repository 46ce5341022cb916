"""The append checker: list-append transactions, checked for cycles of dependency (Adya's anomalies, Elle's method).

Each key holds a list of unique numbers; a transaction reads whole lists and appends numbers. Because a list shows its
whole history, the order of all versions of a key is known, and so are the dependencies:

    ww  B appended right after A        wr  B read what A appended last        rw  B appended right after A read
    rt  A returned before B was called

A cycle means that no order of the transactions explains their reads. The anomalies are:

    G0  writes only        G1c  writes and reads of them        G-single  one rw edge        G2  several rw edges
    ... -realtime          the cycle needs an rt edge (serializable, but not strictly)

and, without cycles: *aborted read* (G1a), *intermediate read* (G1b), *incompatible order*, *duplicate element*,
*phantom element*, *lost append* (acknowledged, and not in the last list).

Transactions of unknown fate count as committed if one of their elements was read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from jepsen.checkers import Violation
from jepsen.checkers.cycles import Graph, find_cycles
from jepsen.history import History, Operation
from jepsen.ops import Put, Range, RangeResult, is_serializable, may_write, puts, ran

Element = int | str


@dataclass(slots=True)
class Transaction:
    """The reads and appends of one transaction, by key."""

    id: int
    call: int
    returned: int | None
    reads: dict[str, list[Element]] = field(default_factory=dict)
    appends: dict[str, list[Element]] = field(default_factory=dict)
    aborted: bool = False


def check(history: History) -> list[Violation]:
    """Check the operations on list keys (values that are JSON lists) of a history."""
    return check_transactions([transaction_of(operation) for operation in history.operations if _counts(operation)])


def check_transactions(transactions: list[Transaction]) -> list[Violation]:
    """Return the violations among transactions."""
    book = _Book(transactions)
    if book.violations:  # without an order of versions there are no edges
        return book.violations
    graph = Graph(len(transactions))
    for kind, first, then in book.edges():
        graph.add(first, then, kind)
    _add_real_time(graph, transactions)
    found = []
    for name, cycle in find_cycles(graph):
        ids = tuple(transactions[node].id for node in cycle)
        found.append(Violation(name, f"a cycle of {len(cycle)} transactions", ids))
    return found


def transaction_of(operation: Operation) -> Transaction:
    """Return the lists that an operation read and the elements that it appended."""
    answered = operation.result is not None
    transaction = Transaction(operation.id, operation.call, operation.returned if answered else None)
    transaction.aborted = operation.kind == "fail"
    done: Iterable[Put] = puts(operation.request)
    if operation.result is not None:
        pairs = list(ran(operation.request, operation.result))
        done = [part for part, _ in pairs if isinstance(part, Put)]
        for part, answer in pairs:
            if isinstance(part, Range) and isinstance(answer, RangeResult):
                value = answer.kvs[0].value if answer.kvs else "[]"
                transaction.reads[part.key] = json.loads(value)
    for put in done:
        transaction.appends.setdefault(put.key, []).append(json.loads(put.value)[-1])
    return transaction


def _counts(operation: Operation) -> bool:
    if operation.kind != "ok":
        return may_write(operation.request)
    return not is_serializable(operation.request)


class _Book:
    """The transaction that appended each element, and the order of each key's elements."""

    def __init__(self, transactions: list[Transaction]) -> None:
        self.violations: list[Violation] = []
        self._transactions = transactions
        self._author: dict[tuple[str, Element], int] = {}
        self._lists: dict[str, list[Element]] = {}
        self._file_appends()
        self._file_reads()
        self._find_lost()

    def edges(self) -> Iterator[tuple[str, int, int]]:
        """Yield dependencies (kind, from, to) as positions in the list of transactions."""
        for key, elements in self._lists.items():
            authors = [self._author[key, element] for element in elements]
            yield from (("ww", first, then) for first, then in pairwise(authors))
        for node, transaction in enumerate(self._transactions):
            for key, seen in transaction.reads.items():
                yield from self._read_edges(node, key, seen)

    def _read_edges(self, node: int, key: str, seen: list[Element]) -> Iterator[tuple[str, int, int]]:
        if seen:
            yield "wr", self._author[key, seen[-1]], node
        elements = self._lists.get(key, [])
        if len(seen) < len(elements):
            yield "rw", node, self._author[key, elements[len(seen)]]

    def _file_appends(self) -> None:
        for node, transaction in enumerate(self._transactions):
            for key, elements in transaction.appends.items():
                for element in elements:
                    other = self._author.setdefault((key, element), node)
                    if other != node:
                        self._report("duplicate element", f"{element} appended to {key} by two", other, node)

    def _file_reads(self) -> None:
        for node, transaction in enumerate(self._transactions):
            for key, seen in transaction.reads.items():
                self._check_elements(node, key, seen)
                longest = self._lists.setdefault(key, [])
                if len(seen) > len(longest):
                    self._lists[key], longest, seen = seen, seen, longest
                if longest[: len(seen)] != seen:
                    self._report("incompatible order", f"{key}: {seen[-5:]} is no prefix of {longest[-5:]}", node)

    def _check_elements(self, node: int, key: str, seen: list[Element]) -> None:
        if len(set(map(str, seen))) != len(seen):
            self._report("duplicate element", f"{key} read with an element twice", node)
        for element in seen:
            author = self._author.get((key, element))
            if author is None:
                self._report("phantom element", f"{key} holds {element}, which no client appended", node)
            elif self._transactions[author].aborted:
                self._report("aborted read", f"{key} holds {element}, refused for certain", author, node)
        if seen:
            self._check_last(node, key, seen[-1])

    def _check_last(self, node: int, key: str, last: Element) -> None:
        author = self._author.get((key, last))
        if author is not None and author != node and self._transactions[author].appends[key][-1] != last:
            self._report("intermediate read", f"{key} read up to {last}, half of a transaction", author, node)

    def _find_lost(self) -> None:
        """Report acknowledged appends that are missing in the latest reads.

        Only reads called after the append returned must contain it; the longest list is the one that all reads agree
        on.
        """
        shown = {key: set(map(str, elements)) for key, elements in self._lists.items()}
        last_read: dict[str, int] = defaultdict(int)
        for transaction in self._transactions:
            for key in transaction.reads:
                last_read[key] = max(last_read[key], transaction.call)
        for node, transaction in enumerate(self._transactions):
            if transaction.returned is None or transaction.aborted:
                continue
            for key, elements in transaction.appends.items():
                missing = [element for element in elements if str(element) not in shown.get(key, set())]
                if missing and last_read[key] > transaction.returned:
                    self._report("lost append", f"{missing} acknowledged, not in {key}", node)

    def _report(self, rule: str, text: str, *nodes: int) -> None:
        ids = tuple(self._transactions[node].id for node in nodes)
        self.violations.append(Violation(rule, text, ids))


def _add_real_time(graph: Graph, transactions: list[Transaction]) -> None:
    """Add rt edges that the others do not imply: from the frontier of the latest returned transactions."""
    # At equal times, calls come before returns: such transactions were concurrent.
    marks = [(t.call, 0, node) for node, t in enumerate(transactions) if not t.aborted]
    marks += [(t.returned, 1, node) for node, t in enumerate(transactions) if t.returned is not None and not t.aborted]
    frontier: set[int] = set()
    behind: dict[int, set[int]] = {}
    for _, is_return, node in sorted(marks):
        if is_return:
            frontier -= behind.pop(node)
            frontier.add(node)
        else:
            behind[node] = set(frontier)
            for earlier in frontier:
                graph.add(earlier, node, "rt")
