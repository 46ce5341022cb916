"""Two users of one cluster: what one does changes no answer to the other, and shows nothing of the other.

Alice plays a fixed story. Mallory, who has all rights to keys of her own and none to Alice's, makes the requests of a
long table in between. Alice hears what she hears without Mallory, apart from revisions and times. And what Mallory
hears does not depend on Alice's secrets: it is the same in two plays with other values and names.

Left out, as in etcd: ids of leases belong to no user, so each user sees leases without keys, and may keep them alive.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest

from raftkv.pb import admin_pb2, election_pb2, lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.proposals import PROPOSAL_BYTES
from raftkv.server.auth import simple_tokens
from tests.server.auth.cases import cases
from tests.server.auth.members import Members
from tests.server.auth.test_lost_rights import OF_ROOT
from tests.server.auth.world import Call

Operation = rpc_pb2.RequestOp
Ask = tuple[str, Any]
KV, LEASE, WATCH = "etcdserverpb.KV", "etcdserverpb.Lease", "etcdserverpb.Watch/Watch"
LOCK, ELECTION = "v3lockpb.Lock", "v3electionpb.Election"
START_S = 10.0
GAP_S = 1.1
"""Virtual time in which Mallory plays, and Alice's step ends."""
NUMBERS = frozenset(
    (
        *("revision", "create_revision", "mod_revision", "rev", "compact_revision", "raft_term", "TTL"),
        *("dbSize", "dbSizeInUse", "raftIndex", "raftAppliedIndex", "raftTerm"),
    )
)
"""Fields that show every user how much has happened in the cluster."""


@dataclass(frozen=True)
class Secrets:
    """What Alice has, and Mallory must not hear of."""

    value: bytes
    name: bytes
    more: int


SECRETS = Secrets(b"swordfish", b"m2", 1), Secrets(b"tigerlily, a longer one", b"m3333", 3)


def txn(*success: Operation, failure: tuple[Operation, ...] = (), compare: Any = ()) -> Ask:
    return f"{KV}/Txn", rpc_pb2.TxnRequest(compare=compare, success=success, failure=failure)


def put(key: bytes, value: bytes = b"", **more: Any) -> Ask:
    return f"{KV}/Put", rpc_pb2.PutRequest(key=key, value=value, **more)


def get(key: bytes, range_end: bytes = b"", **more: Any) -> Ask:
    return f"{KV}/Range", rpc_pb2.RangeRequest(key=key, range_end=range_end, **more)


def watch(key: bytes, range_end: bytes = b"", **more: Any) -> Ask:
    return WATCH, rpc_pb2.WatchRequest(create_request={"key": key, "range_end": range_end, **more})


def lock(name: bytes, lease: int) -> Ask:
    return f"{LOCK}/Lock", lock_pb2.LockRequest(name=name, lease=lease)


def campaign(name: bytes, lease: int, value: bytes) -> Ask:
    return f"{ELECTION}/Campaign", election_pb2.CampaignRequest(name=name, lease=lease, value=value)


def keep_alive(lease: int, **more: int) -> Ask:
    return f"{LEASE}/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveRequest(ID=lease, **more)


class Party:
    """A user of the member, and all its calls."""

    def __init__(self, world: Members, name: str, at: int = 0) -> None:
        self.world = world
        self.at = at
        self.token = world.token(name)
        self.calls: list[tuple[Ask, Call]] = []

    def ask(self, method: str, request: Any) -> Call:
        """Begin a call."""
        call = self.world.start(method, request, self.token, at=self.at)
        self.calls.append(((method, request), call))
        return call

    def heard(self) -> list[Any]:
        """Return what each call has heard, without numbers."""
        return [[call.status, *_answers(method, call)] for (method, _), call in self.calls]


def _answers(method: str, call: Call) -> Iterator[Any]:
    service, _, name = method.partition("/")
    for data in call.answers:
        message = SERVICES[service][name].response.FromString(data)
        _blank(message)
        if method == WATCH:  # how many events come in one response is a matter of time
            if not message.events:
                yield message
            for event in message.events:
                yield message.watch_id, event
        else:
            yield message


def _blank(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name in NUMBERS:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for one in [value] if hasattr(value, "ListFields") else value:
                _blank(one)


# -- Alice ----------------------------------------------------------------------------------------------------------

LEASES = {201: 3600, 202: 3600, 203: 10, 204: 3600}
"""Alice's leases, as in ``cases``, one that ends, and one that has no keys until the end; TTLs in seconds."""


def story(alice: Party, secrets: Secrets) -> Iterator[None]:
    """Play; others may play at each pause."""
    for part in (_keys, _txns, _queues, _shared, _ends):
        yield from part(alice, secrets)


def _keys(alice: Party, secrets: Secrets) -> Iterator[None]:
    for lease, ttl_s in LEASES.items():
        alice.ask(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=ttl_s))
    hidden = 500 + secrets.more
    alice.ask(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=hidden, TTL=3600))
    # At once: a lease without keys is kept alive by any user.
    for key, lease in ((b"m1", 201), (secrets.name, 201), (b"m1x", 202), (b"m/brief", 203), (b"m/hidden", hidden)):
        alice.ask(*put(key, b"first", lease=lease))
    yield
    watching = alice.ask(*watch(b"m", b"n", prev_kv=True, progress_notify=True))
    alice.ask(*watch(b"m1", filters=["NOPUT"]))
    yield
    alice.ask(*put(b"m1", secrets.value, prev_kv=True, ignore_lease=True))
    for number in range(secrets.more):
        alice.ask(*put(b"%s%d" % (secrets.name, number), secrets.value, prev_kv=True))
    alice.world.ask(watching, rpc_pb2.WatchRequest(progress_request={}))
    yield
    for target in ("KEY", "VERSION", "CREATE", "MOD", "VALUE"):
        for order in ("ASCEND", "DESCEND"):
            alice.ask(*get(b"m", b"n", sort_target=target, sort_order=order, limit=2))
    alice.ask(*get(b"m", b"n", keys_only=True))
    alice.ask(*get(b"m", b"n", count_only=True, serializable=True))
    alice.ask(f"{KV}/RangeStream", rpc_pb2.RangeRequest(key=b"m", range_end=b"n"))
    yield


def _txns(alice: Party, secrets: Secrets) -> Iterator[None]:
    read = Operation(request_range={"key": b"m", "range_end": b"n"})
    write = Operation(request_put={"key": b"m/txn", "value": secrets.value, "prev_kv": True})
    delete = Operation(request_delete_range={"key": b"m/txn", "prev_kv": True})
    for more in (
        {"target": "VALUE", "value": secrets.value},
        {"target": "VERSION", "version": 2},
        {"target": "LEASE", "lease": 201},
        {"target": "VALUE", "value": secrets.value, "result": "GREATER", "range_end": b"n"},
    ):
        compare = [rpc_pb2.Compare(**{"key": b"m1", **more})]
        alice.ask(*txn(write, read, failure=(read, delete), compare=compare))
    nested = rpc_pb2.TxnRequest(success=[read, delete])
    alice.ask(*txn(Operation(request_txn=nested)))
    yield


def _queues(alice: Party, secrets: Secrets) -> Iterator[None]:
    alice.ask(*lock(b"m/lock", 201))
    held = alice.ask(*campaign(b"m/election", 201, secrets.value))
    alice.ask(f"{ELECTION}/Observe", election_pb2.LeaderRequest(name=b"m/election"))
    yield
    alice.ask(*lock(b"m/lock", 202))
    alice.ask(*campaign(b"m/election", 202, secrets.value))
    yield
    leader = election_pb2.CampaignResponse.FromString(held.answers[0]).leader
    alice.ask(f"{ELECTION}/Proclaim", election_pb2.ProclaimRequest(leader=leader, value=secrets.name))
    alice.ask(f"{ELECTION}/Leader", election_pb2.LeaderRequest(name=b"m/election"))
    yield
    alice.ask(f"{LOCK}/Unlock", lock_pb2.UnlockRequest(key=b"m/lock/c9"))
    alice.ask(f"{ELECTION}/Resign", election_pb2.ResignRequest(leader=leader))
    yield


def _shared(alice: Party, secrets: Secrets) -> Iterator[None]:
    """Ask for what limits, quotas and lists show."""
    for number in range(4):
        alice.ask(*put(b"m/quota%d" % number, secrets.value))
        alice.ask(*get(b"m/limit%d" % number))
    for lease in LEASES:
        alice.ask(f"{LEASE}/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True))
    kept = alice.ask(*keep_alive(201))
    alice.world.ask(kept, rpc_pb2.LeaseKeepAliveRequest(ID=202, disconnect_grace_ms=60_000))
    yield
    alice.ask("etcdserverpb.Auth/UserGet", rpc_pb2.AuthUserGetRequest(name="alice"))
    alice.ask("etcdserverpb.Auth/RoleGet", rpc_pb2.AuthRoleGetRequest(role="role-alice"))
    alice.ask("etcdserverpb.Auth/AuthStatus", rpc_pb2.AuthStatusRequest())
    alice.ask("etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmRequest())
    alice.ask("etcdserverpb.Maintenance/Status", rpc_pb2.StatusRequest())
    alice.ask("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest(linearizable=True))
    yield


def _ends(alice: Party, secrets: Secrets) -> Iterator[None]:
    alice.ask(*get(b"m/brief"))
    alice.ask(f"{KV}/DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"m3", range_end=b"n", prev_kv=True))
    alice.ask(*put(b"m/late", lease=204))
    kept = alice.ask(*keep_alive(204, disconnect_grace_ms=200))
    yield
    alice.world.leave(kept, severed=True)
    alice.ask(f"{LEASE}/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=201))
    yield
    alice.ask(*get(b"m/late"))
    alice.ask(*get(b"m", b"n"))
    began = rpc_pb2.PutResponse.FromString(alice.calls[len(LEASES) + 1][1].answers[0])
    alice.ask(*get(b"m", b"n", revision=began.header.revision))
    yield


# -- Mallory --------------------------------------------------------------------------------------------------------


def _of_all_methods() -> Iterator[Ask]:
    for case in cases():
        if not case.is_open:
            yield case.method, case.request
    yield from OF_ROOT


def _aimed() -> Iterator[Ask]:
    """Requests for what belongs to Mallory, by what belongs to Alice."""
    for lease in (*LEASES, 999):
        yield put(b"z/own", lease=lease)
        yield txn(Operation(request_put={"key": b"z/own", "lease": lease}))
        yield lock(b"z/lock", lease)
        yield campaign(b"z/election", lease, b"mine")
        yield keep_alive(lease)
        yield keep_alive(lease, disconnect_grace_ms=60_000)
        yield f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease if lease != 999 else 300, TTL=60)
        yield f"{LEASE}/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease)
        yield f"{LEASE}/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
        for key in (b"z/election/%x" % lease, b"m/election/%x" % lease):
            leader = election_pb2.LeaderKey(name=b"z/election", key=key, rev=7, lease=lease)
            yield f"{ELECTION}/Proclaim", election_pb2.ProclaimRequest(leader=leader, value=b"mine")
            yield f"{ELECTION}/Resign", election_pb2.ResignRequest(leader=leader)
        yield f"{LOCK}/Unlock", lock_pb2.UnlockRequest(key=b"m/lock/%x" % lease)
    for name in (b"m/lock", b"m/election", b"m", b"", b"z"):
        yield f"{ELECTION}/Leader", election_pb2.LeaderRequest(name=name)
        yield f"{ELECTION}/Observe", election_pb2.LeaderRequest(name=name)
    for name in (b"m/lock", b"m", b""):
        yield lock(name, 0)
    for number in range(4):
        yield get(b"m/limit%d" % number)
        yield watch(b"m/limit%d" % number)
        yield put(b"m/quota%d" % number, b"mine")
    for user in ("alice", "mallory", "unknown"):
        yield "etcdserverpb.Auth/UserGet", rpc_pb2.AuthUserGetRequest(name=user)
        yield "etcdserverpb.Auth/RoleGet", rpc_pb2.AuthRoleGetRequest(role=f"role-{user}")


def _own() -> Iterator[Ask]:
    """Requests that Mallory has every right to, by fields that could reach further."""
    foreign = Operation(request_range={"key": b"m1"})
    own = Operation(request_put={"key": b"z/own", "value": b"mine"})
    read = Operation(request_range={"key": b"z", "range_end": b"{"})
    for operations in ((own, foreign), (own, Operation(request_txn={"failure": [foreign]})), (own, read)):
        for compares in ([], [rpc_pb2.Compare(key=b"z/own", target="VALUE", value=b"mine")]):
            yield txn(*operations, failure=operations, compare=compares)
    for revision in (-1, 1, 5, 10_000_000):
        yield get(b"z", b"{", revision=revision)
        yield watch(b"z", b"{", start_revision=revision, prev_kv=True, fragment=True, progress_notify=True)
        yield f"{KV}/Compact", rpc_pb2.CompactionRequest(revision=revision, physical=True)
    for name in ("min_mod_revision", "max_mod_revision", "min_create_revision", "max_create_revision"):
        yield get(b"z", b"{", **{name: 5})
    for watch_id in (0, 1, 7):
        yield watch(b"z", b"{", watch_id=watch_id)
        yield WATCH, rpc_pb2.WatchRequest(cancel_request={"watch_id": watch_id})
    yield WATCH, rpc_pb2.WatchRequest(progress_request={})
    yield put(b"z/large", bytes(500_000))
    yield put(b"z/own", b"mine", prev_kv=True)
    yield put(b"z/own", ignore_value=True, ignore_lease=True)
    yield f"{KV}/DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"z", range_end=b"{", prev_kv=True)


def _break(mallory: Party) -> None:
    """Keep leases alive with a grace, and break the connection."""
    for lease in LEASES:
        call = mallory.ask(*keep_alive(lease, disconnect_grace_ms=1))
        mallory.world.leave(call, severed=True)


def _forge(mallory: Party) -> None:
    """Show tokens of others, and of the future."""
    token = mallory.token
    for mallory.token in (token[::-1], token[:-1] + "9" * 9, "x", ""):
        mallory.ask(*get(b"m1"))
        mallory.ask(*watch(b"m1"))
    mallory.token = token


Row = Callable[[Party], object]
ROWS: list[Row] = [
    *(lambda mallory, ask=ask: mallory.ask(*ask) for ask in (*_of_all_methods(), *_aimed(), *_own())),
    *(_break, _forge),
]


# -- what all share -------------------------------------------------------------------------------------------------


def _hold_watches(mallory: Party) -> None:
    mallory.world.replica.hub.shares.limit = 30_000
    stream = mallory.ask(*watch(b"z"))
    for _ in range(50):
        mallory.world.ask(stream, watch(b"z", b"{")[1])


def _hold_leases(mallory: Party) -> None:
    mallory.world.replica.lessor.granters.shares.limit = 40
    for number in range(50):
        mallory.ask(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=1000 + number, TTL=3600))


def _hold_proposals(mallory: Party) -> None:
    mallory.world.node.proposals.shares.limit = 80 * PROPOSAL_BYTES
    for _ in range(90):
        mallory.ask(*put(b"z/flood", b"mine"))


def _hold_tokens(mallory: Party) -> None:
    for _ in range(simple_tokens.TOKENS_MAX):
        mallory.token = mallory.world.token("mallory")


def _hold_queues(mallory: Party) -> None:
    if mallory.calls:
        return
    _hold_leases(mallory)
    for number in range(30):
        mallory.ask(*lock(b"z/lock", 1000 + number))
        mallory.ask(f"{ELECTION}/Observe", election_pb2.LeaderRequest(name=b"z/lock"))


HOLDS = (_hold_watches, _hold_leases, _hold_proposals, _hold_tokens, _hold_queues)


def play(
    secrets: Secrets,
    rows: list[Row],
    gaps: int = 1,
    hold: Row = lambda mallory: None,
    places: tuple[int, int] = (0, 0),
) -> tuple[Party, Party, int]:
    """Play Alice's story with Mallory's rows in its gaps; returns both parties, and the number of gaps.

    Arguments:
        secrets: Alice's.
        rows: what Mallory does, some of it in each gap.
        gaps: their number, as returned by a play without rows.
        hold: what Mallory does at the moment of each of Alice's steps, before her.
        places: the members that Alice and Mallory ask, of three; 0, 0: the only one.
    """
    world = Members(3 if any(places) else 1)
    world.user("alice", ("READWRITE", b"m", b"n"))
    world.user("mallory", ("READWRITE", b"z", b"{"))
    world.enable()
    alice, mallory, root = Party(world, "alice", places[0]), Party(world, "mallory", places[1]), Party(world, "root")
    root.ask("raftkvpb.Admin/QuotaSet", admin_pb2.QuotaSetRequest(prefix=b"m/quota", keys_max=3))
    limit = admin_pb2.Limit(kind="prefix", name=b"m/limit", requests_per_s=1, requests_burst=3)
    root.ask("raftkvpb.Admin/LimitSet", admin_pb2.LimitSetRequest(limit=limit))
    world.cluster.run_until(START_S)
    steps, parts = 0, story(alice, secrets)
    while (hold(mallory), next(parts, parts))[1] is not parts:
        some = rows[steps::gaps]
        for row in some:
            row(mallory)
            world.wait(GAP_S / len(some))
        steps += 1
        world.cluster.run_until(START_S + GAP_S * steps)
    world.close()
    return alice, mallory, steps


def differences(found: Party, expected: Party) -> list[str]:
    """Return the first part of each answer that a party heard otherwise."""
    return [
        f"{method}, {request!r}: {next((one, other) for one, other in zip_longest(*both) if one != other)}"
        for ((method, request), _), *both in zip(found.calls, found.heard(), expected.heard(), strict=True)
        if both[0] != both[1]
    ]


@pytest.mark.interpreted  # its member is made of parts that simulators replace
@pytest.mark.parametrize(
    ("seed", "places"),
    [
        (0, (0, 0)),
        *(pytest.param(seed, (0, 0), marks=pytest.mark.long) for seed in range(1, 6)),
        *(
            pytest.param(6 + number, places, marks=pytest.mark.long)
            for number, places in enumerate(((0, 1), (1, 0), (1, 1), (1, 2)))
        ),
    ],
)
def test_what_one_user_does_changes_and_shows_nothing_of_another(seed: int, places: tuple[int, int]) -> None:
    rows = random.Random(seed).sample(ROWS, len(ROWS))
    heard: list[Party] = []
    for secrets in SECRETS:
        alone, _, gaps = play(secrets, [], places=places)
        alice, mallory, _ = play(secrets, rows, gaps, places=places)
        assert differences(alice, alone) == []
        heard.append(mallory)
    print(f"{len(heard[0].calls)} calls of Mallory in {gaps} gaps")
    assert differences(*heard) == []


@pytest.mark.interpreted
@pytest.mark.parametrize("hold", HOLDS, ids=lambda hold: hold.__name__)
def test_a_user_who_holds_all_that_one_can_takes_nothing_from_another(
    hold: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simple_tokens, "TOKENS_MAX", 8)
    alone, *_ = play(SECRETS[0], [])
    alice, mallory, _ = play(SECRETS[0], [], hold=hold)
    assert differences(alice, alone) == []
    print(Counter(call.status for _, call in mallory.calls))
