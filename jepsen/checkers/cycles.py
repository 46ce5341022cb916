"""Cycles in a graph with kinds of edges, and their classification as anomalies.

The search is Tarjan's algorithm for strongly connected components, without recursion, on growing sets of kinds; from
each component a shortest cycle is the witness. The anomalies are listed in ``append.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

REAL_TIME = "rt"
ANTI = "rw"


class Graph:
    """Nodes 0..size-1 and edges with kinds; an edge may have several kinds, a node has no edge to itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._edges: list[dict[int, set[str]]] = [{} for _ in range(size)]

    def add(self, first: int, then: int, kind: str) -> None:
        """Add an edge.

        Arguments:
            first, then: nodes of the edge.
            kind: kind of the edge.
        """
        if first != then:
            self._edges[first].setdefault(then, set()).add(kind)

    def after(self, node: int, kinds: Collection[str]) -> list[int]:
        """Return the nodes reached by one edge of the given kinds.

        Arguments:
            node: start of the edges.
            kinds: kinds of edges to follow.
        """
        return [then for then, have in self._edges[node].items() if not have.isdisjoint(kinds)]

    def kinds(self, first: int, then: int) -> set[str]:
        """Return the kinds of one edge.

        Arguments:
            first, then: nodes of the edge.
        """
        return self._edges[first].get(then, set())

    def of_kind(self, kind: str) -> Iterator[tuple[int, int]]:
        """Iterate over all edges of one kind."""
        for node, edges in enumerate(self._edges):
            yield from ((node, then) for then, kinds in edges.items() if kind in kinds)


def find_cycles(graph: Graph) -> list[tuple[str, list[int]]]:
    """Return classified cycles, the most severe first; each component is reported once, by its most severe anomaly."""
    found: list[tuple[str, list[int]]] = []
    for suffix, extra in (("", frozenset[str]()), ("-realtime", frozenset({REAL_TIME}))):
        found += _components_as("G0" + suffix, graph, {"ww"} | extra, found)
        found += _components_as("G1c" + suffix, graph, {"ww", "wr"} | extra, found)
        found += _single_anti(graph, suffix, {"ww", "wr"} | extra, found)
        found += _components_as("G2" + suffix, graph, {"ww", "wr", ANTI} | extra, found)
    return found


def _components_as(
    name: str, graph: Graph, kinds: set[str], known: list[tuple[str, list[int]]]
) -> list[tuple[str, list[int]]]:
    seen = {node for _, cycle in known for node in cycle}
    found = []
    for component in components(graph, kinds):
        if seen.isdisjoint(component):
            start = min(component)
            found.append((name, shortest_path(graph, start, start, kinds, set(component))))
    return found


def _single_anti(
    graph: Graph, suffix: str, kinds: set[str], known: list[tuple[str, list[int]]]
) -> list[tuple[str, list[int]]]:
    seen = {node for _, cycle in known for node in cycle}
    found = []
    for component in components(graph, kinds | {ANTI}):
        inside = set(component)
        if not seen.isdisjoint(inside):
            continue
        for first, then in graph.of_kind(ANTI):
            if first in inside and then in inside:
                back = shortest_path(graph, then, first, kinds, inside)
                if back:
                    found.append(("G-single" + suffix, [first, *back]))
                    break
    return found


def shortest_path(graph: Graph, start: int, goal: int, kinds: set[str], inside: set[int]) -> list[int]:
    """Return the nodes of a shortest path without the goal; empty if there is none.

    Arguments:
        graph: the graph.
        start, goal: nodes.
        kinds: kinds of edges to follow.
        inside: nodes that may be visited.
    """
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for then in graph.after(node, kinds):
            if then == goal:
                return _walk_back(came_from, start, node)
            if then in inside and then not in came_from and then != start:
                came_from[then] = node
                queue.append(then)
    return []


def _walk_back(came_from: dict[int, int], start: int, node: int) -> list[int]:
    path = [node]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def components(graph: Graph, kinds: Collection[str]) -> list[list[int]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm).

    Arguments:
        graph: the graph.
        kinds: kinds of edges that count.
    """
    search = _Tarjan(graph, kinds)
    for node in range(graph.size):
        search.visit(node)
    return [component for component in search.components if len(component) > 1]


class _Tarjan:
    def __init__(self, graph: Graph, kinds: Collection[str]) -> None:
        self.components: list[list[int]] = []
        self._graph, self._kinds = graph, kinds
        self._number: dict[int, int] = {}
        self._low: dict[int, int] = {}
        self._stack: list[int] = []
        self._on_stack: set[int] = set()

    def visit(self, root: int) -> None:
        """Search depth-first from one node, with an explicit stack."""
        if root in self._number:
            return
        work = [(root, iter(self._enter(root)))]
        while work:
            node, edges = work[-1]
            then = next(edges, None)
            if then is None:
                work.pop()
                self._leave(node)
                if work:
                    parent = work[-1][0]
                    self._low[parent] = min(self._low[parent], self._low[node])
            elif then not in self._number:
                work.append((then, iter(self._enter(then))))
            elif then in self._on_stack:
                self._low[node] = min(self._low[node], self._number[then])

    def _enter(self, node: int) -> list[int]:
        self._number[node] = self._low[node] = len(self._number)
        self._stack.append(node)
        self._on_stack.add(node)
        return self._graph.after(node, self._kinds)

    def _leave(self, node: int) -> None:
        if self._low[node] != self._number[node]:
            return
        component: list[int] = []
        while not component or component[-1] != node:
            component.append(self._stack.pop())
            self._on_stack.discard(component[-1])
        self.components.append(component)
