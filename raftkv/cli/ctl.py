"""raftkvctl: the command line of a cluster, with etcdctl's commands, flags, output and exit codes.

Owns the tree of commands. What they do is in ``ctl_kv``, ``ctl_txn``, ``ctl_cluster``, ``ctl_run`` and ``ctl_about``;
how they reach the cluster in ``ctl_session``; how answers look in ``printer``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import click

from raftkv.cli.command import Branch, External, Leaf, dispatch
from raftkv.cli.door import leave
from raftkv.cli.exits import ERROR, CommandError
from raftkv.cli.pflag import BOOL, DURATION, INT, LIST, Flag

NAME = "raftkvctl"
COMPLETION_VARIABLE = "_RAFTKVCTL_COMPLETE"
FORMATS = ("simple", "fields", "json", "protobuf", "table")

GLOBAL_FLAGS = (
    Flag("endpoints", LIST, ("127.0.0.1:2379",), "members to talk to, host:port or URLs"),
    Flag("write-out", default="simple", usage="output format", short="w", choices=FORMATS),
    Flag("hex", BOOL, usage="print keys and values in hexadecimal"),
    Flag("command-timeout", DURATION, 5.0, "time for the command, without dialling"),
    Flag("dial-timeout", DURATION, 2.0, "time for a connection"),
    Flag("keepalive-time", DURATION, 2.0, "idle time before a connection is probed"),
    Flag("keepalive-timeout", DURATION, 6.0, "time for the answer to a probe"),
    Flag("max-request-bytes", INT, usage="largest request sent (0: 2 MiB)"),
    Flag("max-recv-bytes", INT, usage="largest answer accepted (0: 2 GiB)"),
    Flag("user", usage="name[:password]; the password is asked for if it is missing"),
    Flag("password", usage="password; then --user is the name alone"),
    Flag("cacert", usage="authorities that the members' certificates must come from"),
    Flag("cert", usage="certificate to show"),
    Flag("key", usage="its key"),
    Flag("insecure-transport", BOOL, True, "allow connections without TLS"),
    Flag("insecure-skip-tls-verify", BOOL, usage="accept any certificate (for tests alone)"),
    Flag("insecure-discovery", BOOL, True, "accept endpoints without TLS from DNS"),
    Flag("discovery-srv", usage="domain of SRV records naming the endpoints", short="d"),
    Flag("discovery-srv-name", usage="suffix of the SRV service name"),
    Flag("debug", BOOL, usage="print the settings in force to standard error"),
)

_CONSISTENCY = Flag("consistency", default="l", usage="l: linearizable, s: serializable", choices=("l", "s"))
GET_FLAGS = (
    _CONSISTENCY,
    Flag("order", usage="order of the result (ASCEND)", choices=("ASCEND", "DESCEND")),
    Flag("sort-by", usage="what is ordered", choices=("CREATE", "KEY", "MODIFY", "VALUE", "VERSION")),
    Flag("limit", INT, usage="most keys to return"),
    Flag("prefix", BOOL, usage="all keys that begin with KEY"),
    Flag("from-key", BOOL, usage="all keys from KEY on"),
    Flag("rev", INT, usage="read at this revision"),
    Flag("keys-only", BOOL, usage="leave the values out"),
    Flag("count-only", BOOL, usage="only count; needs --write-out=fields"),
    Flag("print-value-only", BOOL, usage="only the values; needs --write-out=simple"),
    Flag("min-create-rev", INT, usage="leave out keys created before"),
    Flag("max-create-rev", INT, usage="leave out keys created after"),
    Flag("min-mod-rev", INT, usage="leave out keys last changed before"),
    Flag("max-mod-rev", INT, usage="leave out keys last changed after"),
)
PUT_FLAGS = (
    Flag("lease", default="0", usage="lease to attach, in hexadecimal"),
    Flag("prev-kv", BOOL, usage="return what the key held before"),
    Flag("ignore-value", BOOL, usage="keep the value, change the lease"),
    Flag("ignore-lease", BOOL, usage="keep the lease, change the value"),
)
DELETE_FLAGS = (
    Flag("prefix", BOOL, usage="all keys that begin with KEY"),
    Flag("prev-kv", BOOL, usage="return what was deleted"),
    Flag("from-key", BOOL, usage="all keys from KEY on"),
    Flag("range", BOOL, usage="accepted: a range needs no confirmation here"),
)
WATCH_FLAGS = (
    Flag("interactive", BOOL, usage="read watch and progress commands from standard input", short="i"),
    Flag("prefix", BOOL, usage="all keys that begin with KEY"),
    Flag("rev", INT, usage="begin with the changes of this revision"),
    Flag("prev-kv", BOOL, usage="also print what a key held before"),
    Flag("progress-notify", BOOL, usage="also print how far the watch has come, now and then"),
)
_CLUSTER = Flag("cluster", BOOL, usage="all members, as the cluster lists them")

_PUT_DETAILS = """Without VALUE it is read from standard input.  A VALUE that begins with '-' would be taken for a
flag: put it behind '--', as in: put KEY -- -1"""
_TXN_DETAILS = """Reads comparisons, then the requests to do if all hold, then those to do otherwise; an empty line ends
each part.

\b
mod("k") = "3"         also create, version, value, lease; also != < >
put k "new value"
get k

\b
del k"""

_WATCH_DETAILS = """Behind '--' stands a command to run for each change; it finds the change in ETCD_WATCH_REVISION,
ETCD_WATCH_EVENT_TYPE, ETCD_WATCH_KEY and ETCD_WATCH_VALUE.  KEY and END may also come from ETCDCTL_WATCH_KEY and
ETCDCTL_WATCH_RANGE_END.

With -i each line of standard input is a watch (with flags and command), or the word progress.

A member that is lost is replaced by another of the endpoints; no change is lost or printed twice."""

_LOCK_DETAILS = """The command finds ETCD_LOCK_KEY and ETCD_LOCK_REV in its environment; its exit code becomes ours, and
it is ended if the lock is lost.  Flags of the command stand behind '--'."""


def _kv_commands() -> list[Leaf]:
    return [
        _leaf("get", "ctl_kv:get", "KEY [END]", "Read a key, or the keys from KEY up to END", GET_FLAGS),
        _leaf("put", "ctl_kv:put", "KEY [VALUE]", "Write a key", PUT_FLAGS, _PUT_DETAILS),
        _leaf("del", "ctl_kv:delete", "KEY [END]", "Delete a key, or the keys from KEY up to END", DELETE_FLAGS),
        _leaf(
            "txn",
            "ctl_txn:txn",
            "",
            "Compare and change keys in one step",
            (Flag("interactive", BOOL, usage="ask for each part", short="i"),),
            _TXN_DETAILS,
        ),
        _leaf(
            "compaction",
            "ctl_kv:compaction",
            "REVISION",
            "Forget the history before a revision",
            (Flag("physical", BOOL, usage="wait until it is removed from the database"),),
        ),
        _leaf(
            "watch",
            "ctl_watch:watch",
            "KEY [END] [-- COMMAND ...]",
            "Print the changes of keys as they happen",
            WATCH_FLAGS,
            _WATCH_DETAILS,
        ),
    ]


def _lease_commands() -> Branch:
    once = Flag("once", BOOL, usage="renew once and leave")
    keys = Flag("keys", BOOL, usage="also print the keys that go with it")
    children = [
        _leaf("grant", "ctl_lease:grant", "TTL", "Make a lease that lives for TTL seconds"),
        _leaf("revoke", "ctl_lease:revoke", "LEASE", "End a lease and delete its keys"),
        _leaf("timetolive", "ctl_lease:time_to_live", "LEASE", "Print what is left of a lease", (keys,)),
        _leaf("list", "ctl_lease:list_leases", "", "List all leases"),
        _leaf("keep-alive", "ctl_lease:keep_alive", "LEASE", "Renew a lease until it is gone", (once,)),
    ]
    return Branch("lease", "Commands about leases", children, GLOBAL_FLAGS)


def _coordination_commands() -> list[Leaf]:
    return [
        _leaf(
            "lock",
            "ctl_lock:lock",
            "NAME [COMMAND ...]",
            "Hold a lock, until a signal comes or a command ends",
            (Flag("ttl", INT, 10, "seconds after which a holder that is gone loses the lock"),),
            _LOCK_DETAILS,
        ),
        _leaf(
            "elect",
            "ctl_elect:elect",
            "NAME [PROPOSAL]",
            "Take part in an election, or observe it",
            (Flag("listen", BOOL, usage="only print who leads", short="l"),),
            "The leader prints its key and stays until a signal comes; then it resigns.",
        ),
    ]


def _cluster_commands() -> list[Branch]:
    revision = Flag("rev", INT, usage="hash up to this revision (0: all)")
    member_list = _leaf("list", "ctl_cluster:member_list", "", "List the members", (_CONSISTENCY,))
    endpoint = [
        _leaf("health", "ctl_cluster:endpoint_health", "", "Tell whether endpoints can commit", (_CLUSTER,)),
        _leaf("status", "ctl_cluster:endpoint_status", "", "Print the status of endpoints", (_CLUSTER,)),
        _leaf("hashkv", "ctl_cluster:endpoint_hashkv", "", "Print history hashes", (_CLUSTER, revision)),
    ]
    alarm = [
        _leaf("list", "ctl_cluster:alarm_list", "", "List all alarms"),
        _leaf("disarm", "ctl_cluster:alarm_disarm", "", "Disarm all alarms"),
    ]
    return [
        Branch("member", "Commands about members", [member_list], GLOBAL_FLAGS),
        Branch("endpoint", "Commands about endpoints", endpoint, (*GLOBAL_FLAGS, _CLUSTER)),
        Branch("alarm", "Commands about alarms", alarm, GLOBAL_FLAGS),
    ]


def _mirror_command() -> Leaf:
    flags = (
        Flag("prefix", usage="only keys that begin with this"),
        Flag("rev", INT, usage="do not copy; begin with the changes of this revision"),
        Flag("max-txn-ops", INT, 128, "most keys that are written in one transaction"),
        Flag("dest-prefix", usage="what the prefix becomes at the destination"),
        Flag("no-dest-prefix", BOOL, usage="leave the prefix away at the destination"),
        Flag("dest-cert", usage="certificate to show to the destination"),
        Flag("dest-key", usage="its key"),
        Flag("dest-cacert", usage="authorities that the destination's certificates must come from"),
        Flag("dest-insecure-transport", BOOL, True, "allow a connection without TLS to the destination"),
        Flag("dest-user", usage="name[:password] at the destination"),
        Flag("dest-password", usage="password at the destination; then --dest-user is the name alone"),
    )
    details = "Every 30 seconds it prints how many keys it has written. It runs until something ends it."
    return _leaf(
        "make-mirror", "ctl_mirror:make_mirror", "DESTINATION", "Copy keys to a cluster and follow", flags, details
    )


def _check_commands() -> Branch:
    def flags(prefix: str) -> tuple[Flag, ...]:
        loads = ("s", "m", "l", "xl")
        return (
            Flag("load", default="s", usage="how much: small, medium, large, very large", choices=loads),
            Flag("prefix", default=prefix, usage="where the keys of the check are written, and deleted"),
            Flag("auto-compact", BOOL, usage="compact the history afterwards"),
            Flag("auto-defrag", BOOL, usage="defragment the members afterwards"),
        )

    perf_flags, scale_flags = flags("/etcdctl-check-perf/"), flags("/etcdctl-check-datascale/")
    children = [
        _leaf("perf", "ctl_check:perf", "", "Put at a steady rate for 60 s and judge the cluster", perf_flags),
        _leaf("datascale", "ctl_check:datascale", "", "Write many keys and tell what memory they take", scale_flags),
    ]
    return Branch("check", "Commands that judge a cluster", children, GLOBAL_FLAGS)


_JSON = Flag("json", BOOL, usage="print JSON; watch: one object a line")
_EXEC_FLAGS = (
    Flag("job", usage="id of the run, the same on all of its nodes"),
    Flag("nnodes", default="1", usage="nodes that take part: a number, or MIN:MAX"),
    Flag("nproc-per-node", INT, 1, "workers of this node"),
    Flag("max-restarts", INT, usage="faults of this node's workers after which it goes on"),
    Flag("env-style", LIST, usage="what workers find in their environment: torch,pet,tf,horovod, or none (all)"),
    Flag("conf", LIST, usage="settings of the run, NAME=VALUE: lease_ttl, last_call_timeout, join_timeout, ..."),
    Flag("local-addr", usage="address at which other nodes reach this one (its host's name)"),
    Flag("node-name", usage="name of this machine (its host's name)"),
    Flag("stop-grace", DURATION, 10.0, "time from SIGTERM to SIGKILL when workers are stopped"),
    Flag("log-dir", usage="directory for the workers' log files; alone it means --tee 3"),
    Flag("redirects", usage="streams that go to log files only: 1 stdout, 2 stderr, 3 both, or 0:3,1:2", short="r"),
    Flag("tee", usage="streams that go to log files and to the console, as for --redirects", short="t"),
    Flag("local-ranks-filter", usage="local ranks whose output is on the console (all)"),
    Flag("no-prefix", BOOL, usage="print lines of workers without the [rankN] before them"),
    Flag("quiet", BOOL, usage="print nothing but what the workers print", short="q"),
)
_EXEC_DETAILS = """Starts the workers when enough nodes are there, with their ranks and the address of rank 0 in their
environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_*, TF_CONFIG, HOROVOD_*, RAFTKV_*); stops and starts them
anew when nodes come or go, or when a worker fails anywhere.  When all have ended well everywhere, the run is closed and
the exit code is 0; else it is the failed worker's, 128 and the signal's number if a signal ended it, or 1 if another
node closed the run."""


def _run_commands() -> Branch:
    flags = (_JSON,)
    sure = (Flag("yes", BOOL, usage="do not ask", short="y"), Flag("force", BOOL, usage="even while nodes are alive"))
    delete = "Faults and epochs are forgotten, and the next run of that id begins with epoch 1."
    children = [
        _leaf("list", "ctl_run:list_all", "", "List the runs", flags),
        _leaf("show", "ctl_run:show", "RUN", "Print who is in a run, who waits and why, and the last faults", flags),
        _leaf("timeline", "ctl_run:timeline", "RUN", "Print what happened: epochs, ranks, causes, seconds", flags),
        _leaf("watch", "ctl_run:watch", "RUN", "Print what happens, until a signal comes", flags),
        _leaf("queue", "ctl_run:queue", "[CLUSTER]", "Print who holds the slots that runs share, and who waits", flags),
        _leaf("exec", "ctl_run_exec:execute", "-- COMMAND ...", "Take part as a node", _EXEC_FLAGS, _EXEC_DETAILS),
        _leaf("delete", "ctl_run:delete", "RUN", "Delete all keys of a run", (*flags, *sure), delete),
    ]
    return Branch("run", "Commands about training runs", children, (*GLOBAL_FLAGS, _JSON))


_TOP_FLAGS = (
    Flag("interval", DURATION, 2.0, "time between two looks"),
    Flag("once", BOOL, usage="look for one interval, print, leave"),
    Flag("json", BOOL, usage="print JSON, one object a line"),
)
_TOP_DETAILS = """Members with role, term, log index and lag, revision, size, rates, watchers and how far they are
behind, leader changes and alarms.  Rates come from the members' metrics; q or Ctrl-C quits."""


def _about_commands() -> list[click.Command]:
    commands: list[click.Command] = [
        _leaf("top", "ctl_top:top", "", "Show the cluster live", _TOP_FLAGS, _TOP_DETAILS),
        _leaf("version", "ctl_about:version", "", "Print the version"),
        _leaf(
            "completion", "ctl_about:completion", "bash|zsh|fish|powershell", "Print a completion script for a shell"
        ),
    ]
    if os.path.exists(os.path.join(os.path.dirname(__file__), "bench.py")):
        commands.append(External("bench", "raftkv.cli.bench:bench", "Measure a cluster"))
    return commands


def _leaf(name: str, target: str, usage: str, short: str, flags: Sequence[Flag] = (), details: str = "") -> Leaf:
    return Leaf(
        name,
        f"raftkv.cli.{target}",
        usage=usage,
        short=short,
        flags=flags,
        shared=GLOBAL_FLAGS,
        details=details,
    )


def make_tree() -> Branch:
    """All commands."""
    children = [
        *_kv_commands(),
        _lease_commands(),
        *_coordination_commands(),
        _mirror_command(),
        *_cluster_commands(),
        _check_commands(),
        _run_commands(),
        *_about_commands(),
    ]
    return Branch(NAME, "Talk to a raftkv or etcd cluster.", children, GLOBAL_FLAGS)


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkvctl.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    if words is None:
        # A command lives for a moment and makes no cycles worth finding: the collector would only slow its imports.
        gc.disable()
    tree = make_tree()
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(tree, {}, NAME, COMPLETION_VARIABLE, instruction)
    given = sys.argv[1:] if words is None else words
    return leave(lambda: _run(tree, given), lambda text: print(f"Error: {text}", file=sys.stderr))


def _run(tree: Branch, words: Sequence[str]) -> int:
    _check_api_version()
    try:
        return dispatch(tree, words)
    except CommandError as error:
        if error.details:
            sys.stdout.flush()
        for line in error.details:
            print(f"{NAME}: {line}", file=sys.stderr)
        raise


def _check_api_version() -> None:
    version = os.environ.pop("ETCDCTL_API", "")
    if version not in ("", "3"):
        raise CommandError(f"unsupported API version: {version}", ERROR)


if __name__ == "__main__":
    sys.exit(main())
