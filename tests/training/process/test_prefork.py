"""Spares: processes that have imported modules and become workers, as `python SCRIPT` would have made them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raftkv.client.guard import find_marked
from raftkv.training.process.prefork import Spare, count_options, of_no_generation
from raftkv.training.process.supervisor import Workers

TIMEOUT_S = 90.0
REPORT = """
import json, os, pickle, sys
class Kept: pass
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "file": __file__, "path": sys.path[0], "here": os.getcwd(),
    "environment": dict(os.environ), "modules": [name for name in ("decimal", "colorsys") if name in sys.modules],
    "pickled": type(pickle.loads(pickle.dumps(Kept()))) is Kept, "pid": os.getpid(),
    "unbuffered": sys.stdout.write_through,
}))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def start(
    command: list[str], modules: list[str], folder: Path, **variables: str
) -> tuple[Spare, subprocess.Popen[bytes]]:
    spare = Spare.plan(command, modules)
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        spare.command, pass_fds=spare.pass_fds, env=environment, cwd=folder, stderr=subprocess.PIPE
    )
    spare.started()
    return spare, process


def become(spare: Spare, process: subprocess.Popen[bytes], folder: Path, **variables: str) -> tuple[str, str, str]:
    """Make a spare a worker that prints into files; return stdout, stderr, and the stderr of the spare until then."""
    with open(folder / "out", "w+b") as out, open(folder / "err", "w+b") as err:
        assert spare.hand_over({"PATH": os.environ["PATH"], **variables}, [out.fileno(), err.fileno()])
        earlier = process.communicate(timeout=TIMEOUT_S)[1].decode()
        out.seek(0)
        err.seek(0)
        return out.read().decode(), err.read().decode(), earlier


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_spare_becomes_what_the_command_would_have_been(form: str, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT, encoding="utf-8")
    script = str(tmp_path / "report.py")
    words = [script] if form == "script" else ["-m", "report"]
    command = [sys.executable, "-u", *words, "--lr", "1"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    spare, process = start(command, ["decimal"], tmp_path, OLD="1", RANK="7")
    printed, complaint, earlier = become(spare, process, tmp_path, RANK="2", BROKEN="\udcff")
    assert (process.returncode, complaint) == (3, "to stderr\n") == (plain.returncode, plain.stderr)
    assert earlier == ""
    found, expected = json.loads(printed), json.loads(plain.stdout)
    assert found["pid"] == process.pid
    assert found["environment"] == {"PATH": os.environ["PATH"], "RANK": "2", "BROKEN": "\udcff"} | (
        {"LC_CTYPE": "C.UTF-8"} if "LC_CTYPE" in found["environment"] else {}
    )
    assert found["modules"] == ["decimal"]
    for name in ("argv", "name", "file", "path", "here", "pickled", "unbuffered"):
        assert found[name] == expected[name], name


def test_a_module_that_cannot_be_imported_costs_a_line(tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text("print('trained')", encoding="utf-8")
    spare, process = start([sys.executable, str(tmp_path / "report.py")], ["no_such_module", "decimal"], tmp_path)
    line = "raftkv: --prefork: no_such_module cannot be imported: No module named 'no_such_module'\n"
    assert become(spare, process, tmp_path) == ("trained\n", "", line)
    assert process.returncode == 0


def test_a_spare_ends_with_its_agent_and_is_then_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text("print('trained')", encoding="utf-8")
    spare, process = start([sys.executable, str(tmp_path / "report.py")], ["decimal"], tmp_path)
    spare.close()
    assert process.communicate(timeout=TIMEOUT_S) == (None, b"")
    assert process.returncode == 0
    spare, process = start([sys.executable, str(tmp_path / "report.py")], [], tmp_path)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert not spare.hand_over({}, [])


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["python3", "SCRIPT"], 1),
        (["/usr/bin/python3.11", "-u", "-Wignore", "-X", "dev", "-OB", "SCRIPT", "-m", "x"], 6),
        (["python", "-um", "x"], None),
        (["python", "-u", "-m", "package.train", "--lr"], 2),
        (["python", "-m"], None),
        (["python", "-c", "pass"], None),
        (["python", "-i", "SCRIPT"], None),
        (["python", "-"], None),
        (["python", "--version", "SCRIPT"], None),
        (["python", "no_such_script.py"], None),
        (["python"], None),
        (["bash", "SCRIPT"], None),
        (["numactl", "python", "SCRIPT"], None),
        ([], None),
    ],
)
def test_only_scripts_and_modules_of_python_can_be_spares(words: list[str], count: int | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    command = [str(script) if word == "SCRIPT" else word for word in words]
    if count is not None:
        assert count_options(command) == count
        return
    with pytest.raises(ValueError, match=r"^the command must be: python \[OPTIONS\] SCRIPT"):
        count_options(command)


def test_workers_of_a_node_are_its_spares_and_spares_left_over_end(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import threading; threading.Event().wait()", encoding="utf-8")
    command = [sys.executable, str(script)]
    environments = [{**os.environ, "RANK": str(rank)} for rank in range(3)]

    async def main() -> str:
        async with asyncio.timeout(TIMEOUT_S):
            prepared = await Workers.prepare(command, environments, ["decimal"])
            spares = [process.pid for _, process in prepared.spares]
            prepared.spares[1][1].kill()
            await prepared.spares[1][1].wait()
            async with Workers.started(command, environments[:2], prepared=prepared) as workers:
                pids = [process.worker.pid for process in workers.processes]
                assert (pids[0] == spares[0], pids[1] in spares, len(pids)) == (True, False, 2)
                assert {os.getpgid(pid) for pid in pids} == {workers.guard.pid}
                assert set(find_marked(workers.mark)) == {*pids, spares[2]}
            return prepared.mark

    assert find_marked(asyncio.run(main())) == []


def test_a_spare_looks_like_no_worker() -> None:
    assert of_no_generation({"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}
