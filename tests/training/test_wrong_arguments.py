"""Any argument that is given to a public function is taken, or refused in words; it fails nowhere deep inside."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raftkv
import raftkv.checkpoint
import raftkv.dataset
import raftkv.training
from raftkv.dataset import Entry
from raftkv.errors import RaftKVError
from tests.procs import RAFTKV, Cluster

WRONG: tuple[Any, ...] = (
    None, 5, -1, 1.5, math.nan, math.inf, 2**70, "", "x", b"x", "\ud800", "x\0", [], [1], ["x"], {1: 2}, object(), len,
)  # fmt: skip
REFUSALS = (RaftKVError, TypeError, ValueError, TimeoutError, OSError, OverflowError)
Case = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture(scope="module")
def kv() -> Iterator[raftkv.Client]:
    with Cluster(RAFTKV) as cluster, raftkv.connect(cluster.endpoints, timeout_s=2) as kv:
        yield kv


@pytest.fixture
def empty() -> Iterator[raftkv.Client]:
    """A store of this test alone: a lock without a name waits for every key below "/", those of a run too."""
    with Cluster(RAFTKV) as cluster, raftkv.connect(cluster.endpoints, timeout_s=2) as kv:
        yield kv


def failures(cases: dict[str, Case]) -> list[str]:
    """Give each argument of each function each wrong value; return what neither worked nor was refused."""
    found = []
    for name, (function, good) in cases.items():
        options = [option for option in inspect.signature(function).parameters if option not in ("args", "options")]
        for option in dict.fromkeys([*options, *good]):
            for value in WRONG:
                try:
                    function(**{**good, option: value})
                except REFUSALS:
                    continue
                except Exception as error:
                    found.append(f"{name}({option}={value!r}): {error!r}")
    return found


def each(owner: Any, **methods: dict[str, Any]) -> dict[str, Case]:
    """Make the cases of methods of an object, and the arguments that they take besides the wrong one."""
    return {f"{type(owner).__name__}.{name}": (getattr(owner, name), good) for name, good in methods.items()}


@pytest.mark.long
def test_of_the_client(empty):
    kv = empty

    def taken(what: str, **options: Any) -> None:
        with getattr(kv, what)(**options):
            pass

    def drawn(what: str, **options: Any) -> list[Any]:
        return list(getattr(kv, what)(**options))

    def watched(**options: Any) -> None:
        kv.watch(**options).cancel()

    def executed(make: Callable[..., Any], **options: Any) -> None:
        kv.txn().then(make(**options)).commit()

    key = {"key": "k"}
    operations = {
        f"raftkv.{name}": (lambda make=make, **options: executed(make, **options), {**key, **given})
        for name, make, given in [
            ("get", raftkv.get, {"serializable": False}),
            ("get_range", raftkv.get_range, {"sort_by": "key", "limit": 1, "revision": 0}),
            ("put", raftkv.put, {"value": "v", "lease": None}),
            ("delete", raftkv.delete, {"prefix": False}),
        ]
    }
    parts = {
        "lease": (lambda **options: taken("lease", **options), {"ttl": 9, "id": 0, "disconnect_grace_s": 0}),
        "session": (lambda **options: taken("session", **options), {"ttl": 9, "on_lost": None}),
        "lock": (lambda **options: taken("lock", **options), {"name": "n", "ttl": 9, "lease": None}),
        "campaign": (lambda **options: taken("campaign", **options), {"name": "e", "value": "v", "ttl": 9}),
        "scan": (lambda **options: drawn("scan", **options), {**key, "page_size": 9, "revision": 0}),
        "watch": (watched, {**key, "start_revision": 0, "queue_bytes": 9, "end": None}),
        "connect": (raftkv.connect, {"endpoints": "127.0.0.1:2379"}),
    }
    assert failures({**parts, **operations}) == []


def test_of_the_calls_of_a_client(kv):
    key = {"key": "k"}
    methods = each(
        kv,
        put={**key, "value": "v"},
        get=key,
        range=key,
        count=key,
        delete=key,
        put_many={"items": {"a": "b"}},
        get_many={"keys": ["a"]},
        txn={},
        lease_info={"id": 5},
        leases={},
        revoke={"id": 5},
        leader={"name": "e"},
        status={},
        members={},
        compact={"revision": 1},
        set_quota={"prefix": "q/", "max_keys": 9},
        view={"prefix": "p"},
        endpoints={"service": "s"},
    )
    del methods["Client.status"]  # an endpoint may be anywhere: it is waited for
    assert failures(methods) == []
    kv.put("k", "as before")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:epoch is deprecated")
def test_of_a_run(kv, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a path "x" is
    run = raftkv.training.join("run", kv=kv, lease_ttl_s=60, disconnect_grace_s=0, checkpoints=tmp_path / "checkpoints")
    steps = iter(range(1, 1 << 40))

    def saved(**options: Any) -> None:
        with run.checkpoint(**{"step": next(steps), **options}):
            pass

    def written(name: Any = "n", data: Any = b"") -> None:
        with run.checkpoint(next(steps)) as saving:
            saving.write(name, data)

    def resumed(**options: Any) -> None:
        with run.resume(**options):
            pass

    def elected(**options: Any) -> None:
        run.elect(**options).resign()

    named = {"name": "n"}
    options = {"metrics": None, "metadata": None, "parent": None, "trackers": (), "kind": "files"}
    parts = {
        "checkpoint": (saved, options),
        "written": (written, {}),
        "resume": (resumed, {"kind": "", "trackers": ()}),
        "elect": (elected, {**named, "value": "v"}),
    }
    methods = each(
        run,
        barrier=named,
        broadcast={**named, "value": "v"},
        gather={**named, "value": "v"},
        all_gather={**named, "value": "v"},
        put={"key": "k", "value": "v"},
        get={"key": "k"},
        leader=named,
        counter=named,
        publish={"value": "v"},
        on_change={"callback": print},
    )
    assert failures({**methods, **parts}) == []
    assert not run.changed

    run.leave()


@pytest.mark.long
def test_of_a_registry(kv, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a path "x" is
    run = raftkv.training.join("other", kv=kv, lease_ttl_s=60, disconnect_grace_s=0, checkpoints=tmp_path / "run")
    steps = iter(range(1, 1 << 40))
    named = {"name": "n"}
    registry = raftkv.checkpoint.Registry(kv, "registry", uri=tmp_path / "registry")
    with run.checkpoint(next(steps)) as saving:
        saving.write("n", b"")
    checkpoint, claim = run.checkpoints.latest(), registry.claim()

    def begun(claim: Any = claim, **options: Any) -> None:
        registry.begin(claim, **{"step": next(steps), **options}).abort("wrong")

    def prepared(rank: Any = 0, files: Any = (), metrics: Any = None) -> None:
        attempt = registry.begin(claim, next(steps))
        try:
            attempt.prepare(rank, files)
            attempt.commit(metrics=metrics)
        finally:
            attempt.abort("wrong")

    def pinned(**options: Any) -> None:
        with registry.pin(**options):
            pass

    one = {"checkpoint": checkpoint}
    methods = each(
        registry,
        claim={},
        claim_run={"generation": run.generation, "revision": run.world.revision, "fence": run.fence},
        take_over={"claim": claim},
        latest={},
        at={"step": 1},
        tagged=named,
        best={"metric": "loss"},
        checkpoints={},
        watch={},
        watch_best={"metric": "loss"},
        pin_for={**one, "reader": "r", "duration_s": 9},
        unpin={**one, "reader": "r"},
        tag={**one, **named},
        untag=named,
        collect={},
        lineage=one,
        set_metrics={"step": checkpoint.step, "kind": checkpoint.kind, "metrics": {}},
        import_directory={"uri": str(tmp_path / "none")},
        export={**one, "uri": str(tmp_path / "export")},
        import_export={"claim": claim, "uri": str(tmp_path / "none")},
    )
    assert failures(methods) == []
    parts = {
        "Registry": (raftkv.checkpoint.Registry, {"kv": kv, "run_id": "registry"}),
        "Policy": (raftkv.checkpoint.Policy, {}),
        "begin": (begun, {"world_size": 1, "kind": "files", "parent": None, "metadata": None}),
        "prepare": (prepared, {}),
        "join": (lambda claim=claim, **options: registry.join(claim, timeout_s=0.01, **options), {"step": 1}),
        "pin": (pinned, {**one, "reader": "r"}),
    }
    assert failures(parts) == []
    run.leave()


def test_of_a_dataset(kv):
    data = raftkv.dataset.Dataset(kv, "dataset")
    data.publish([Entry("a", 1)])
    methods = each(
        data,
        publish={"entries": [Entry("a", 1)]},
        at={"version": 1},
        lookup={"path": "a"},
        pin={"version": 1, "name": "n"},
        unpin={"version": 1, "name": "n"},
        collect={},
    )
    parts = {
        "Dataset": (raftkv.dataset.Dataset, {"kv": kv, "name": "n"}),
        "Entry": (lambda **fields: data.publish([Entry(**fields)]), {"path": "a", "size": 1}),
    }
    assert failures({**methods, **parts}) == []
