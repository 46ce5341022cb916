"""Machines for tests of deployments: hosts with an own systemd, and a desk to work from, as namespaces of this machine.

Each has this machine's files under a layer of its own (overlayfs), processes, mounts and a network of its own; the
networks meet at a bridge in a namespace that is made for it, so addresses such as 10.0.0.1 exist only inside.

    with Machines(tmp_path, ["10.0.0.1", "10.0.0.2"]) as machines:
        machines.at_desk("ssh root@10.0.0.1 systemctl is-system-running")

At the desk `ssh root@ADDRESS COMMAND` and `scp FILE... root@ADDRESS:PLACE` enter the namespaces of the host,
and know no other words. Needs root, and what Debian's `systemd` and `iproute2` bring.

Leaves out: kernels, clocks and disks of their own, and how long a network takes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests import installed
from tests.procs import wait_for

SCRIPT = Path(__file__).with_name("machine.sh")
UNITS = Path("/usr/lib/systemd/system")
STARTED_WITH = (
    *("basic.target", "sysinit.target", "sockets.target", "timers.target", "paths.target", "slices.target"),
    *("multi-user.target", "network-online.target", "network.target", "time-sync.target", "shutdown.target"),
    *("umount.target", "systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket"),
)
DESK, BITS = "10.0.0.254", 24
SSH = """\
#!/bin/bash
# ssh root@HOST COMMAND
exec nsenter -t "$(cat "/mnt/hosts/${1#root@}")" -m -p -n -u -i -C -- \\
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -c "cd; ${*:2}"
"""
SCP = """\
#!/bin/bash
# scp [-q] FILE... root@HOST:PLACE
[ "$1" = -q ] && shift
target=${*: -1} files=("${@:1:$#-1}") place=${target#*:}
ssh "${target%%:*}" test -d "$place" && into=x || into=
for file in "${files[@]}"; do
  ssh "${target%%:*}" "cat > '$place${into:+/$(basename "$file")}'" < "$file" || exit
done
"""


class Machines:
    """Some hosts, a desk and the network between them.

    Arguments:
        directory: for their layers; on a real disk, which overlayfs wants.
        addresses: of the hosts.
    """

    def __init__(self, directory: Path, addresses: Sequence[str]) -> None:
        self._directory = directory
        self._addresses = addresses
        self._cgroup = _cgroup_root() / directory.name
        self._running = ExitStack()
        self.pids: dict[str, int] = {}

    def __enter__(self) -> Machines:
        for program in ("ip", "systemd-analyze"):
            installed.program(program)
        with ExitStack() as undo:
            undo.push(self)
            hosts = self._directory / "desk" / "hosts"
            hosts.mkdir(parents=True)
            self._write_programs()
            self._start("desk", DESK)
            self._net("ip link add bridge type bridge; ip link set bridge up")
            self._net(f"ip addr add {DESK}/{BITS} dev bridge")
            for address in self._addresses:
                self._start("host", address)
                (hosts / address).write_text(str(self.pids[address]))
                self._connect(address)
            for address in self._addresses:
                wait_for(lambda at=address: self._is_up(at), f"systemd of {address}")
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()
        for folder in sorted(self._cgroup.rglob("*/"), reverse=True):
            if folder.is_dir():
                wait_for(lambda at=folder: _removed(at), f"the end of {folder}")
        wait_for(lambda: _removed(self._cgroup), f"the end of {self._cgroup}")

    def at_desk(
        self,
        command: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        outside: bool = False,
        timeout_s: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the shell at the desk.

        Arguments:
            command: for bash.
            folder: where.
            environment: of it.
            outside: with this machine's own network, for what is downloaded.
            timeout_s: for all of it.
        """
        words = ["nsenter", "-t", str(self.pids[DESK]), "-m", *([] if outside else ["-n"])]
        return subprocess.run(
            [*words, "bash", "-c", f"cd {folder} && {command}"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def journal(self, address: str) -> str:
        """Return what the units of a host have logged."""
        words = ["nsenter", "-t", str(self.pids[address]), "-m", "-p", "journalctl", "--no-pager", "-q", "-n", "400"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def _write_programs(self) -> None:
        for name, text in {"ssh": SSH, "scp": SCP}.items():
            path = self._directory / "desk" / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def _start(self, kind: str, address: str) -> None:
        folder = self._directory / ("desk" if kind == "desk" else address)
        folder.mkdir(exist_ok=True)
        group = self._cgroup / address
        group.mkdir(parents=True)
        namespaces = ["-m", "-n", "-u"]
        if kind == "host":
            (folder / "units").mkdir()
            for name in STARTED_WITH:
                shutil.copy(UNITS / name, folder / "units")
            (folder / "units" / "multi-user.target.d").mkdir()
            (folder / "units" / "multi-user.target.d" / "journal.conf").write_text(
                "[Unit]\nWants=systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service\n"
            )
            namespaces += ["-p", "-f", "--kill-child", "-i", "-C"]
        command = ["unshare", *namespaces, "--propagation=private", str(SCRIPT), kind, str(folder)]
        log = self._running.enter_context((folder / "log").open("wb"))
        # The shell moves to a group of its own, which the namespace of groups then takes for the root of all.
        mover = ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"]
        process = subprocess.Popen([*mover, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        self.pids[address] = process.pid
        if kind == "host":
            wait_for(lambda: len(_children(process)) == 1, f"the first process of {address}")
            (self.pids[address],) = _children(process)
        ready = Path(f"/proc/{self.pids[address]}/comm")
        wait_for(lambda: ready.read_text().strip() in ("systemd", "sleep"), f"{address}: {folder / 'log'}")

    def _connect(self, address: str) -> None:
        number, pid = address.rpartition(".")[2], self.pids[address]
        self._net(f"ip link add port{number} type veth peer name eth0 netns {pid}")
        self._net(f"ip link set port{number} master bridge up")
        self._net(f"ip addr add {address}/{BITS} dev eth0; ip link set eth0 up", pid)

    def _net(self, command: str, pid: int = 0) -> None:
        words = ["nsenter", "-t", str(pid or self.pids[DESK]), "-n", "bash", "-ec", command]
        subprocess.run(words, check=True)

    def _is_up(self, address: str) -> bool:
        words = [
            "nsenter",
            "-t",
            str(self.pids[address]),
            "-m",
            "-p",
            "systemctl",
            "is-active",
            "-q",
            "multi-user.target",
        ]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _cgroup_root() -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next(Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2")


def _removed(folder: Path) -> bool:
    """Remove a group of processes, as soon as the last of them has ended."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
