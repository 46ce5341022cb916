"""Plays the same HTTP requests to etcd 3.5.1 and to one member of raftkv, and compares the answers. Also a command:

    python -m tests.compat.gateway.requests --count 5000 --seed 3             # all paths but those that stream
    python -m tests.compat.gateway.requests --count 5000 --seed 3 --users     # as root, as carol, without a user
    python -m tests.compat.gateway.requests --count 5000 --seed 3 --members   # learners come and go
    python -m tests.compat.gateway.requests --count 5000 --seed 3 --tls       # encrypted

It prints every difference with its request and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.gateway.compare import ALLOWED, Answer, allowed, difference, path_of
from tests.compat.gateway.generator import NOBODY, USERS, Generator, Request
from tests.procs import ETCD_FAST, RAFTKV, Cluster
from tests.secure import Files, secured

TIMEOUT_S = 90.0
OPEN = ("--cors=*", "--host-whitelist=*")
"""etcd's defaults."""

FAST = ("--bcrypt-cost=4",)
DIFFERENCES_MAX = 20


class Side:
    """One server: a connection that stays, tokens of its users, and the ids that it made up."""

    def __init__(self, endpoint: str, context: ssl.SSLContext | None = None) -> None:
        self.host, _, port = endpoint.rpartition(":")
        self.port = int(port)
        if context is None:
            self._connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=context)
        self.tokens: dict[str, str] = {"": "", "stranger": "nonsense"}
        self.learner = 77
        self.ids: tuple[int, ...] = ()
        status = json.loads(self.ask("POST", "/v3/maintenance/status", b"{}").body)
        self.ids = (int(status["header"]["member_id"]),)

    def ask(self, method: str, path: str, body: bytes, token: str = "", **headers: str) -> Answer:
        """Send one request and read the whole answer."""
        given = {"Content-Type": "application/json", **({"Authorization": token} if token else {}), **headers}
        self._connection.request(method, path, body, given)
        response = self._connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read(), self.ids)

    def play(self, request: Request) -> Answer:
        """Send a request of the stream, with this server's ids and tokens in it."""
        body = request.body.replace(b'"@self"', b'"%d"' % self.ids[0]).replace(b'"@learner"', b'"%d"' % self.learner)
        answer = self.ask(request.method, request.path, body, self.tokens[request.user], **dict(request.headers))
        if path_of(request) == "cluster/member/add" and (request.method, answer.status) == ("POST", 200):
            self.learner = int(json.loads(answer.body)["member"]["ID"])
            answer = Answer(answer.status, answer.headers, answer.body, (self.ids[0], self.learner))
        return answer

    def must(self, path: str, **message: Any) -> None:
        """Send a request that must succeed."""
        answer = self.ask("POST", f"/v3/{path}", json.dumps(message).encode())
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.describe()}")

    def revision(self) -> int:
        """The revision of the store."""
        answer = self.ask("POST", "/v3/kv/range", b'{"key":"YQ==","count_only":true}')
        return int(json.loads(answer.body)["header"]["revision"])

    def log_in(self, name: str, password: str) -> None:
        """Get a token for a user."""
        body = json.dumps({"name": name, "password": password}).encode()
        self.tokens[name] = json.loads(self.ask("POST", "/v3/auth/authenticate", body).body)["token"]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass
class Report:
    """What was played, and what differed."""

    seed: int
    played: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the counts, and every difference."""
        count = sum(self.played.values())
        lines = [
            f"seed {self.seed}: {count} requests to {len(self.played)} paths, answers {dict(self.statuses)}",
            *(f"allowed, {count} times: {name}: {ALLOWED[name][0]}" for name, count in self.explained.items()),
            f"{len(self.differences)} differences",
        ]
        return "\n".join([*lines, *self.differences])


class Player:
    """Leads both servers through one stream of requests."""

    def __init__(self, oracle: Side, tested: Side, generator: Generator) -> None:
        self._oracle = oracle
        self._tested = tested
        self.generator = generator
        self.report = Report(generator.seed)

    def run(self, count: int) -> Report:
        """Play so many requests, fewer if too much differs."""
        for _ in range(count):
            self.step(self.generator.next_request())
            if len(self.report.differences) >= DIFFERENCES_MAX:
                break
        return self.report

    def step(self, request: Request) -> None:
        """Play one request."""
        expected, found = self._oracle.play(request), self._tested.play(request)
        self.generator.observe(request, expected.status, expected.message)
        self.report.played[path_of(request)] += 1
        self.report.statuses[expected.status] += 1
        what = difference(request, expected, found)
        if what is None:
            return
        name = allowed(request, expected, found)
        if name is not None:
            self.report.explained[name] += 1
            return
        self.report.differences.append(
            f"\n{what}: {request.describe()}\n  etcd   {expected.describe()}\n  raftkv {found.describe()}"
        )


# -- servers -------------------------------------------------------------------------------------------------------


def add_users(side: Side) -> None:
    """Make root, and carol who may read and write below ``a``, and ask for users."""
    for role in ("root", "reader"):
        side.must("auth/role/add", name=role)
    permission = {"permType": "READWRITE", "key": "YQ==", "range_end": "Yg=="}
    side.must("auth/role/grant", name="reader", perm=permission)
    for user, role in (("root", "root"), ("carol", "reader")):
        side.must("auth/user/add", name=user, password="secret")
        side.must("auth/user/grant", user=user, role=role)
    side.must("auth/enable")
    for user in ("root", "carol"):
        side.log_in(user, "secret")


@contextlib.contextmanager
def sides(files: Files | None = None) -> Iterator[tuple[Side, Side]]:
    """Start both servers, one member each, and connect to them; under TLS, if there are files for it."""
    # No certificates of clients: where users are on, etcd refuses all that comes with one to its gateway.
    asking = ("--client-cert-auth", "--trusted-ca-file=")
    flags = [] if files is None else [flag for flag in files.server_flags if not flag.startswith(asking)]
    clusters = (Cluster(ETCD_FAST, flags=[*FAST, *flags]), Cluster(RAFTKV, flags=[*FAST, *OPEN, *flags]))
    context = None
    if files is not None:
        context = ssl.create_default_context(cafile=files.folder / "ca.crt")
    with contextlib.ExitStack() as stack:
        for cluster in clusters:
            stack.enter_context(cluster if files is None else secured(cluster))
        found = [Side(cluster.endpoints[0], context) for cluster in clusters]
        for side in found:
            stack.callback(side.close)
        yield found[0], found[1]


def main(words: Sequence[str]) -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--members", action="store_true")
    asked = parser.parse_args(words)
    with (
        tempfile.TemporaryDirectory() as folder,
        sides(Files.make(Path(folder)) if asked.tls else None) as (first, second),
    ):
        for side in (first, second) if asked.users else ():
            add_users(side)
        generator = Generator(asked.seed, USERS if asked.users else NOBODY, asked.members)
        report = Player(first, second, generator).run(asked.count)
    print(report.describe())
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
