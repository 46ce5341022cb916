"""Scripts for a store: commands with expected answers; each runs on both engines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from raftkv.errors import StatusError
from raftkv.storage.key_value import KeyValueView
from raftkv.storage.mvcc import Change, Store
from raftkv.storage.revision import describe
from tests.raft import golden
from tests.storage.conftest import Engine
from tests.storage.memory import ScriptedWriter

STORIES = sorted((Path(__file__).parent / "testdata").glob("mvcc_*.txt"))


class Script:
    """Runs the commands of a story; ``help`` of each verb is its method."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open()

    def _open(self) -> None:
        self._writer = ScriptedWriter()
        self.store = Store.open(self._engine.backend(), self._writer)

    def execute(self, line: str) -> str:
        verb, *arguments = shlex.split(line)
        try:
            return str(getattr(self, f"_{verb}")(*arguments))
        except StatusError as error:
            return f"error: {error}\n"

    def _put(self, *arguments: str) -> str:
        return self._txn("put", *arguments)

    def _delete(self, *arguments: str) -> str:
        return self._txn("delete", *arguments)

    def _txn(self, *words: str) -> str:
        """One transaction: operations separated by ``;``."""
        txn = self.store.begin()
        out = ""
        for part in " ".join(words).split(";"):
            verb, key, *rest = part.split()
            if verb == "put":
                lease = int(rest[1]) if len(rest) > 1 else 0
                txn.put(key.encode(), rest[0].encode(), lease)
            elif verb == "delete":
                txn.delete_range(key.encode(), _end(rest))
            else:
                out += _listed(txn.range(key.encode(), _end(rest)).kvs)
        out += "".join(map(_event, txn.end()))
        self.store.set_applied(self.store.applied_index + 1, 1)
        return out + f"revision {self.store.revision}\n"

    def _range(self, key: str, *arguments: str) -> str:
        """``range KEY [END] [revision=N] [limit=N] [keys_only=1] [count_only=1]``; ``ALL`` for an open end."""
        given = {name: int(text) for name, _, text in (word.partition("=") for word in arguments if "=" in word)}
        options: dict[str, Any] = {name: bool(n) if name.endswith("_only") else n for name, n in given.items()}
        positional = [word for word in arguments if "=" not in word]
        result = self.store.range(key.encode(), _end(positional), **options)
        return _listed(result.kvs) + f"count {result.count} revision {result.revision}\n"

    def _compact(self, revision: str) -> str:
        self.store.compact(int(revision))
        self.store.set_applied(self.store.applied_index + 1, 1)
        return ""

    def _work(self) -> str:
        """Compact to the end, committing on the way."""
        while self.store.is_compacting:
            self.store.compaction_step()
            self.store.commit()
            self._writer.run_all()
        return ""

    def _commit(self) -> str:
        self.store.commit()
        self._writer.run_all()
        return f"durable up to entry {self.store.durable_index}\n"

    def _crash(self) -> str:
        self.store.close()
        self._open()
        return self._status()

    def _status(self) -> str:
        store = self.store
        compacting = " compacting" if store.is_compacting else ""
        return (
            f"revision {store.revision} compacted {store.compact_revision} "
            f"applied {store.applied_index} keys {store.key_count}{compacting}\n"
        )

    def _history(self, first: str, last: str) -> str:
        views = [(describe(key), KeyValueView(data)) for key, data in self.store.history(int(first), int(last))]
        return "".join(f"{at} {view.key.decode()}={view.value.decode()}\n" for at, view in views)

    def _leases(self) -> str:
        return "".join(f"{key.decode()} {lease}\n" for key, lease in sorted(self.store._attachments.of_key.items()))

    def _hash(self, revision: str) -> str:
        found: list = []
        self.store.hash_kv(int(revision), lambda job: found.append(job()))
        self._writer.run_all()
        return f"{found[0].hash:08x} at {found[0].revision} compacted {found[0].compact_revision}\n"


def _end(words: list[str]) -> bytes:
    return b"\x00" if words == ["ALL"] else "".join(words).encode()


def _event(change: Change) -> str:
    key, data, deleted, previous = change
    view = KeyValueView(data)
    return (
        f"{'delete' if deleted else 'put'} {key.decode()} at {view.mod_revision}{' before: ' if previous else ''}"
        + (f"{previous >> 24}.{previous & 0xFFFFFF}\n" if previous else "\n")
    )


def _listed(kvs: list[bytes]) -> str:
    out = ""
    for view in map(KeyValueView, kvs):
        lease = f" lease {view.lease}" if view.lease else ""
        numbers = f"create {view.create_revision} mod {view.mod_revision} version {view.version}{lease}"
        out += f"{view.key.decode()}={view.value.decode()} {numbers}\n"
    return out


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path, engine: Engine, rewrite: bool) -> None:
    script = Script(engine)
    golden.run(path, script.execute, rewrite)
    script.store.close()


def test_there_are_stories() -> None:
    assert len(STORIES) >= 4
