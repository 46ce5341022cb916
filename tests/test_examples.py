"""The examples run, against throwaway clusters, and print what they are there to show."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raftkv.training.config import RunConfig
from tests.foreign.environments import interpreter
from tests.long import long_except

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

EXPECTED = {
    "asyncio_client": r"""
jobs done: 20
events seen: 20
left: 0""",
    "bulk_load": r"""
20000 keys written \([\d,]+/s\)
20000 keys read, 20001 are there now
\['value 0', 'value 5000', 'value 10000', 'value 15000'\]""",
    "checkpoints/elastic": r"""
from step 0 to 50 SIGKILL SIGKILL all ranks agree: True
from step 40 to 59 done done all ranks agree: True
steps done twice: 11 with the same losses, bit for bit: True""",
    "checkpoints/hf_trainer": r"""
job goes on from step 0 - ended with -9
job calm goes on from step 2 - ended with 0
checkpoints: \[2, 4, 6\]
metrics: \['eval_loss', 'loss'\] best: \d
the same weights as without the fault: True""",
    "checkpoints/lightning_fit": r"""
job goes on from step 0 - ended with -9
job calm goes on from step 4 - ended with 0
checkpoints: \[4, 8, 12\]
metrics: \['loss'\]
the same weights as without the fault: True""",
    "checkpoints/memory": r"""
copies of the state of rank 1: 2 in \{'memory'\}
node-b is killed, and comes back empty
the nodes ended with \[0, 0\]
generations began from \{'0 then a save'\}
all losses are the same, bit for bit: True""",
    "checkpoints/torchrun": r"""
step 10 is committed by generation 1
step 20 is committed by generation 1
a worker is killed
step 30 is committed by generation [12]
step 40 is committed by generation 2
the job ended with 0
the job without faults ended with 0 0
steps done twice: \d+
all losses are the same, bit for bit: True
steps without a loss: 0""",
    "checkpoints/quickstart": r"""
from the beginning
from step 30
steps: \[10, 30, 50, 60\] deleted: 2""",
    "checkpoints/serving": r"""
serving 1
serving 2
the one that is served stays: {"step": 2, "y": 40\.0}; kept: \[2, 3\]
serving 4
after the evaluator: {"step": 4, "y": 80\.0}; kept: \[4\]""",
    "data_exactly_once": r"""
processes: \['killed', 'killed', 'done', 'done', 'done'\]
world sizes: \[\d(, \d){3,}\]
each sample was used once in every epoch: True""",
    "data_loader": r"""
sum 2016\.0
read by 2 workers, not by this process: True""",
    "distributed_lock_with_fencing": r"""
we hold it, token > 0
they hold it, token is larger: True
our late write was refused: (LockLost|LeaseLost) definite: True
what is stored: theirs""",
    "inprocess_recovery": r"""
killed: \['SIGKILL'\]
rank 0 is now rank 0 of 2 in generation 2: 300 steps, the longest \d+ ms
rank 2 is now rank 1 of 2 in generation 2: 300 steps, the longest \d+ ms
weights are the same: True""",
    "jax_processes": r"""
(?s:.*)processes: 2 ids: \[0, 1\]
(?s:.*)all ended well: True""",
    "cached_reads": r"""
alice has \['jobs/a', 'jobs/c'\]
after the write: alice
linearizable: \['jobs/b', 'jobs/c'\]
SNAPSHOT
EVENTS \[\('PUT', b'jobs/d'\)\]""",
    "grpc_endpoints": r"""
servers that answer: 3
one is killed, calls that failed: 0
its lease has ended, servers that answer: 2
a new one came, servers that answer: 3
all have left: \[0, 0, 0\]""",
    "horovod_rendezvous": r"""
rank 0: HOROVOD_GLOO_RENDEZVOUS_ADDR=127\.0\.0\.1 HOROVOD_GLOO_RENDEZVOUS_PORT=\d+
rank 1: HOROVOD_GLOO_RENDEZVOUS_ADDR=127\.0\.0\.1 HOROVOD_GLOO_RENDEZVOUS_PORT=\d+
rank 0 of 2, sum of ranks 1
rank 1 of 2, sum of ranks 1
left behind: 0""",
    "leader_election": r"""
leads: worker-\d
leads: worker-\d
leads: worker-\d
all have led: True
fences grow: True""",
    "nvrx_inprocess": r"""
a step failed, and all three go on in the same processes: True
rank 0 was killed, and two go on in the same processes: True
they ended with 0 0""",
    "quickstart": r"""
b'jobs/a' b'1' version 1
\[b'jobs/a', b'jobs/b'\]
created
is there already: b'4'
counter 1 2
deleted 5""",
    "run_exec": r"""
\[rank0\]: sum of the ranks of 4: 6
exit codes: \[0, 0\]
generation 1: 2 nodes, over because: rank 1: SIGKILL
generation 2: 2 nodes, over because: succeeded""",
    "training_api": r"""
config batch=32; rank 0 of 3, rank 1 of 3, rank 2 of 3
rank 0 of 2 in generation 2, because node \S+ left
rank 1 of 2 in generation 2, because node \S+ left
results: \['result/0', 'result/1'\]""",
    "two_teams": r"""
user alice has run:vision-\*
user bob has run:speech-\*
alice trains as rank 0
bob may not read her checkpoints: etcdserver: permission denied
bob may not move her latest one: etcdserver: permission denied
bob may not end her run: etcdserver: permission denied
bob may not watch her nodes: etcdserver: permission denied
bob may not join her run: etcdserver: permission denied
bob may not read everything: etcdserver: permission denied
bob trains as rank 0
User: alice
Roles: run:vision-\*""",
    "torch_store": r"""
\['rank 0: 3', 'rank 1: 3'\]
\['rank 0: True', 'rank 0: 3'\] 0
\['rank 1: True', 'rank 1: 3'\] 0""",
    "torchft_ddp": r"""
steps of 3 replicas
one was killed, steps of 2
quorum id has grown: True""",
    "train_allreduce": r"""
rank 0 ends after step 20
rank 0 of 2, generation 1, restarts 0
rank 1 ends after step 20
rank 1 of 2, generation 1, restarts 0
agents ended with 0 0
step in the store: 20""",
    "watch_config": r"""
started with \{'config/log-level': 'info'\}
put config/log-level debug
put config/workers 8
delete config/log-level\s
put config/stop now
ended with \{'config/workers': '8', 'config/stop': 'now'\}""",
}

ENVIRONMENTS = {
    "checkpoints/hf_trainer": "trainers",
    "checkpoints/lightning_fit": "trainers",
    "jax_processes": "jax",
    "nvrx_inprocess": "nvrx",
    "torchft_ddp": "torchft",
}
"""Examples whose package lives in an environment of its own."""


SHORT = {"distributed_lock_with_fencing", "quickstart"}
"""Examples that `make test` runs; the others are long."""


def _python(name: str) -> str:
    return str(interpreter(ENVIRONMENTS[name])) if name in ENVIRONMENTS else sys.executable


def test_every_example_is_run_here():
    names = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.py")}
    assert names == {*EXPECTED, "test_with_pytest"}


@pytest.mark.parametrize("name", long_except(EXPECTED, SHORT))
def test_example_prints_expected_output(name, tmp_path):
    done = subprocess.run(
        [_python(name), "-W", "ignore::UserWarning", str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(EXPECTED[name][1:] + "\n", done.stdout), done.stdout


@pytest.mark.long
def test_the_quickstart_takes_endpoints(raftkv_cluster):
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), raftkv_cluster.endpoints[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith("deleted 5\n")


@pytest.mark.long
def test_the_example_of_a_test_passes():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_with_pytest.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert "3 passed" in done.stdout, done.stdout


WHOLE = ["docs/guides/client.md", "docs/guides/coming-from.md"]
"""Pages whose blocks are programs; those of others leave out what is the reader's, and an example has the whole."""


def python_blocks(place):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


FOREIGN = ("raftkv.jax", "raftkv.torch.lightning", "raftkv.torch.nvrx", "raftkv.torch.transformers")
"""Modules that need another environment; their examples are played there."""

PARTS = [
    (str(page.relative_to(ROOT)), number)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for number, _ in enumerate(python_blocks(page))
    if str(page.relative_to(ROOT)) not in WHOLE and not any(name in python_blocks(page)[number] for name in FOREIGN)
]


@pytest.mark.parametrize(("place", "number"), PARTS)
def test_names_in_excerpts_exist(place, number):
    """Imports up to there work, and functions and classes that it calls of them take the arguments that it names."""
    *before, tree = map(ast.parse, python_blocks(place)[: number + 1])
    nodes = [node for block in (*before, tree) for node in ast.walk(block)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [
        node for node in imports if "raftkv" in ast.unparse(node) and not any(n in ast.unparse(node) for n in FOREIGN)
    ]
    assert ours
    names: dict[str, object] = {}
    exec(compile(ast.Module(ours, []), place, "exec"), names)
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        called = ast.unparse(call.func)
        if called.split(".")[0] in names:
            function: Any = eval(called, names)
            descriptor = getattr(function, "DESCRIPTOR", None)  # of a message, which has no signature
            taken = set(inspect.signature(function).parameters if descriptor is None else descriptor.fields_by_name)
            if "options" in taken:  # of a run
                taken |= {field.name for field in dataclasses.fields(RunConfig)}
            assert {keyword.arg for keyword in call.keywords} <= taken, called


@pytest.mark.long
@pytest.mark.parametrize("place", WHOLE)
def test_the_python_of_the_documentation_runs(place, tmp_path):
    """Each block of Python is a program, or a test if it has a test function."""
    blocks = python_blocks(place)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"test_block_{number}.py"
        path.write_text(block, encoding="utf-8")
        runner = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if "def test_" in block else []
        command = [sys.executable, *runner, str(path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
