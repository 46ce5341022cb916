"""Checkpoints of JAX itself: trees of arrays, one process with several devices, and two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import raftkv.checkpoint
from raftkv.client.local import LocalCluster
from tests.foreign.environments import interpreter
from tests.foreign.test_jax import ended, start

ALONE = """
import io, json, os, sys
from collections import namedtuple
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import raftkv, raftkv.checkpoint, raftkv.jax
from raftkv.jax.trees import describe, rebuild, write_parts

Pair = namedtuple("Pair", "a b")
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def same(one, other):
    leaves = zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other), strict=True)
    plain = lambda leaf: jax.random.key_data(leaf) if hasattr(leaf, "dtype") and "key" in str(leaf.dtype) else leaf
    return all(type(a) is type(b) and np.array_equal(plain(a), plain(b)) for a, b in leaves)

mesh = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y")), P("x", "y"))
other = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
spread = jax.device_put(jnp.arange(64.0).reshape(8, 8), mesh)
tree = {
    "params": {"w": spread, "half": jnp.ones((3, 1), jnp.bfloat16), "empty": jnp.zeros((0, 4))},
    "opt": [jnp.int32(7), (None, jnp.array([True, False]))], "step": 3, "rate": 0.5, "key": jax.random.key(5),
}
with raftkv.connect(os.environ["RAFTKV_ENDPOINTS"]) as kv:
    registry = raftkv.checkpoint.Registry(kv, "alone", uri=sys.argv[1])
    result = {}
    with raftkv.jax.CheckpointManager(registry, save_interval_steps=2, max_to_keep=3, best_metric="loss") as manager:
        result["empty"] = [manager.latest_step(), manager.best_step(), manager.all_steps()]
        result["saved"] = [manager.save(step, tree, metrics={"loss": -step}) for step in (0, 1, 2, 2, 4)]
        result["metric"] = [error_of(lambda: manager.save(6, tree, metrics={"loss": "low"})), manager.should_save(6)]
        result["unwritable"] = error_of(lambda: manager.save(6, {"name": "x"}))
        result["steps"] = [manager.save(7, Pair(spread, 1), metrics={"loss": 9}, is_forced=True)]
    result["steps"] += [manager.latest_step(), manager.best_step(), manager.all_steps()]
    late = f"{sys.argv[1]}/late"
    open(late, "w").close()
    with raftkv.jax.CheckpointManager(raftkv.checkpoint.Registry(kv, "late", uri=late)) as manager:
        result["again"] = [manager.save(1, tree), error_of(manager.wait_until_finished).partition(":")[0]]
        os.unlink(late)
        result["again"] += [manager.save(1, tree), error_of(manager.wait_until_finished), manager.latest_step()]
    layout, parts = describe({"w": spread})
    write_parts(torn := io.BytesIO(), parts[1:])
    result["torn"] = error_of(lambda: rebuild(layout, [torn.getvalue()]))
    wide = {"count": np.array([2**40, -1]), "rate": np.array([1e300]), "narrow": np.arange(3, dtype=np.int32)}
    with raftkv.jax.CheckpointManager(raftkv.checkpoint.Registry(kv, "wide", uri=f"{sys.argv[1]}/wide")) as manager:
        manager.save(1, wide)
        back = manager.restore()
    result["wide"] = {name: [type(back[name]).__name__, back[name].tolist()] for name in wide}
    with raftkv.jax.CheckpointManager(registry) as after:
        opened = raftkv.jax.checkpoints.load_manifest
        def counting(found):
            result["pins"] = [len(registry.pins())]
            return opened(found)
        raftkv.jax.checkpoints.load_manifest = counting
        result["same"] = same(after.restore(2), tree) and list(after.restore(2)) == sorted(tree)
        result["class"] = error_of(after.restore)
        like = Pair(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other), 0)
        back = after.restore(like=like)
        result["sharding"] = [type(back).__name__, back.a.sharding == other, same(back, Pair(spread, 1))]
        result["shape"] = error_of(lambda: after.restore(like=Pair(jnp.ones(3), 0)))
        result["other"] = error_of(lambda: after.restore(like={"a": spread, "b": 1}))
        manager.__init__(registry)
        after.save(8, tree)
        result["fenced"] = error_of(after.wait_until_finished)
    manager.close()
    file = next(p for p in os.scandir(registry.at(4).uri) if p.name.startswith("arrays"))
    with open(file.path, "r+b") as damaged:
        damaged.seek(-1, 2), damaged.write(b"!")
    result["damaged"] = error_of(lambda: manager.restore(4))
    result["pins"].append(len(registry.pins()))
print(json.dumps(result))
"""
TOLD = """
import os, signal, sys
import jax.numpy as jnp
import raftkv, raftkv.checkpoint, raftkv.jax
with raftkv.connect(os.environ["RAFTKV_ENDPOINTS"]) as kv:
    registry = raftkv.checkpoint.Registry(kv, "told", uri=sys.argv[1])
    policy = raftkv.checkpoint.Policy(keep_last=1)
    with raftkv.jax.CheckpointManager(registry, save_interval_steps=2, best_metric="loss", policy=policy) as manager:
        for step in range(1, 20):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.save(step, {"w": jnp.ones(3)}, metrics={"loss": abs(step - 2)})
print("went on")
"""
TOGETHER = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import raftkv, raftkv.checkpoint, raftkv.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
spread = jax.make_array_from_callback((4, 2), sharding, lambda index: np.arange(8.0).reshape(4, 2)[index])
with raftkv.connect(os.environ["RAFTKV_ENDPOINTS"]) as kv:
    registry = raftkv.checkpoint.Registry(kv, "together", uri=sys.argv[1])
    with raftkv.jax.CheckpointManager(registry) as manager:
        for step in (1, 2):
            manager.save(step, {"spread": spread, "all": np.arange(3)})
        back = manager.restore(like={"spread": spread, "all": np.zeros(3, int)})
        manager.save(3 + jax.process_index(), {"all": np.arange(3)})
        try:
            mixed = manager.wait_until_finished()
        except Exception as error:
            mixed = str(error).partition(": all ranks")[0]
        manager.save(5, {"all": np.arange(3)})
    own = [shard.data.tolist() for shard in back["spread"].addressable_shards]
    print("RESULT", jax.process_index(), manager.all_steps(), own, back["all"].tolist(), mixed)
"""


@pytest.mark.long
def test_trees_of_arrays_come_back_as_they_were(raftkv_cluster: LocalCluster, tmp_path: Path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    result = json.loads(ended(start(raftkv_cluster, ALONE, str(tmp_path), **flags)))
    assert result["empty"] == [None, None, []]
    assert result["saved"] == [True, False, True, False, True]
    assert result["unwritable"] == "ConfigError: ['name'] is a str; save arrays of numbers, and numbers"
    assert result["steps"] == [True, 7, 4, [2, 4, 7]]
    assert result["again"] == [True, "StorageError", True, None, 1]
    assert result["metric"] == ["ConfigError: metric 'loss' is 'low', which is not a number", True]
    assert result["wide"] == {
        "count": ["ndarray", [2**40, -1]], "rate": ["ndarray", [1e300]], "narrow": ["ArrayImpl", [0, 1, 2]],
    }  # fmt: skip
    torn = "ConfigError: ['w'] is not whole in the checkpoint: its shards have 48 of 64 elements; "
    assert result["torn"].startswith(torn)
    assert result["same"]
    assert result["pins"] == [1, 0]
    assert result["class"].startswith("ConfigError: the checkpoint has nodes of a class")
    assert result["sharding"] == ["Pair", True, True]
    assert result["shape"] == "ConfigError: .a has the shape (8, 8) in the checkpoint, and (3,) is wanted"
    assert result["other"].startswith("ConfigError: the tree is another than that of the checkpoint: only one of them")
    assert result["fenced"].startswith("FenceBroken: ")
    assert result["damaged"].startswith("DigestMismatch: ")


WRONG = """
import io, json
import jax, jax.numpy as jnp, numpy as np
from raftkv.jax.trees import Part, describe, rebuild, write_parts

tree = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 3), np.int32), "n": 7, "w": np.int64(1)}
layout, parts = describe(tree)
def file(*more, but=()):
    write_parts(out := io.BytesIO(), [*(part for part in parts if part.name not in but), *more])
    return out.getvalue()
def error_of(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
data, one = file(), np.ones(1, np.float32)
names = ("9@0", "-1@0", "0@-1", "x", "0@0,0", "@", "0@4")
tries = {
    **{name: lambda name=name: rebuild(layout, [file(Part(name, one))]) for name in names},
    "dtype": lambda: rebuild(layout, [file(Part("0@0", np.arange(4.0)), but=["0@0"])]),
    "no file": lambda: rebuild(layout, [b"x"]), "cut": lambda: rebuild(layout, [data[:-1]]),
    "no header": lambda: rebuild(layout, [b"\\x02" + bytes(7) + b"[]"]),
    "layout": lambda: rebuild([], [data]), "no leaves": lambda: rebuild({"format": 1}, [data]),
    "shape": lambda: rebuild({**layout, "leaves": [{**leaf, "shape": [10**15]} for leaf in layout["leaves"]]}, [data]),
    "structure": lambda: rebuild({**layout, "structure": {"dict": {"a": 99}}}, [data]),
    "like dtype": lambda: rebuild(layout, [data], {**tree, "a": np.zeros(4)}),
    "like jax dtype": lambda: rebuild(layout, [data], {**tree, "a": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}),
    "like scalar": lambda: rebuild(layout, [data], {**tree, "a": 1.0}),
    "like array": lambda: rebuild(layout, [data], {**tree, "n": np.zeros(3, int)}),
    "like key": lambda: rebuild(layout, [data], {**tree, "a": jax.random.key(1)}),
}
wide, wide_parts = describe({"w": np.array([2**40])})
write_parts(out := io.BytesIO(), wide_parts)
tries["cut to 32"] = lambda: rebuild(wide, [out.getvalue()], {"w": jnp.zeros(1, jnp.int32)})
back = rebuild(layout, [data], tree)
same = all(np.array_equal(back[name], tree[name]) for name in tree)
print(json.dumps([same, {name: error_of(call) for name, call in tries.items()}]))
"""


@pytest.mark.long
def test_files_that_do_not_fit_the_tree_are_refused_with_one_line():
    """They ended as IndexError, or as values of another leaf or another type."""
    program = [str(interpreter("jax")), "-c", WRONG]
    same, errors = json.loads(subprocess.check_output(program, env={**os.environ, "JAX_PLATFORMS": "cpu"}))
    assert same
    wrong = {name: line for name, line in errors.items() if not line.startswith("ConfigError: ") or "\n" in line}
    assert wrong == {}
    assert errors["9@0"] == "ConfigError: shard '9@0' is of none of the 4 leaves of the tree"
    assert errors["like dtype"] == "ConfigError: ['a'] has the dtype float32 in the checkpoint, and float64 is wanted"
    assert "has numbers beyond int32" in errors["cut to 32"]


OPEN = """
import os, sys
import jax, numpy as np
import raftkv, raftkv.checkpoint, raftkv.jax
kv = raftkv.connect(os.environ["RAFTKV_ENDPOINTS"])
managers = {}
for run_id in ("open", "fenced"):
    registry = raftkv.checkpoint.Registry(kv, run_id, uri=f"{sys.argv[1]}/{run_id}")
    managers[run_id] = raftkv.jax.CheckpointManager(registry, is_async=run_id == "open")
managers["fenced"].save(1, {"a": np.zeros(9)})
registry.claim()
managers["fenced"]._is_async = True
for step, manager in enumerate(managers.values(), start=1):
    manager.save(step, {"a": np.zeros(1 << 22)})
"""


@pytest.mark.long
def test_a_manager_left_open_has_saved_or_says_that_it_has_not(raftkv_cluster: LocalCluster, tmp_path: Path):
    process = start(raftkv_cluster, OPEN, str(tmp_path))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with raftkv_cluster.connect() as kv:
        found = {run_id: raftkv.checkpoint.Registry(kv, run_id).latest().step for run_id in ("open", "fenced")}
    assert found == {"open": 1, "fenced": 1}
    assert "the checkpoint in progress at the end of the program was not saved: generation 1 of the" in errors


@pytest.mark.long
def test_each_process_writes_its_shards(raftkv_cluster: LocalCluster, tmp_path: Path):
    settings = {"RAFTKV_NNODES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    processes = [start(raftkv_cluster, TOGETHER, str(tmp_path), **settings) for _ in range(2)]
    lines = sorted(line for process in processes for line in ended(process).splitlines() if line.startswith("RESULT"))
    mixed = "the coordinator saves step 3, and process 1 step 4"
    assert lines == [
        "RESULT 0 [1, 2, 5] [[[0.0, 1.0], [2.0, 3.0]]] [0, 1, 2] step 3 of run 'together' (orbax) was aborted, "
        f"or deleted: process 1 failed: ConfigError: {mixed}",
        f"RESULT 1 [1, 2, 5] [[[4.0, 5.0], [6.0, 7.0]]] [0, 1, 2] {mixed}",
    ]


@pytest.mark.long
def test_process_that_is_told_to_end_saves_first_and_keeps_the_best(raftkv_cluster, tmp_path):
    process = start(raftkv_cluster, TOLD, str(tmp_path))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (-signal.SIGTERM, ""), errors
    with raftkv_cluster.connect() as kv:
        registry = raftkv.checkpoint.Registry(kv, "told")
        assert [found.step for found in registry.checkpoints()] == [2, 7]
