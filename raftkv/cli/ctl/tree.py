"""The commands of raftkvctl: their names, flags, help and examples, and the functions that they run.

Owns the tree. Leaves name their function as ``module:function``; see ``command``. What etcdctl has and raftkv does not
have yet is here too (``Absent``), so that it is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import click

from raftkv.cli.goflags.command import Absent, Branch, External, Leaf
from raftkv.cli.goflags.pflag import BOOL, DURATION, INT, LIST, Flag

NAME = "raftkvctl"
COMPLETION_VARIABLE = "_RAFTKVCTL_COMPLETE"
ENVIRONMENT_PREFIX = "ETCDCTL_"
FORMATS = ("simple", "fields", "json", "protobuf", "table")


def _ours(*flags: Flag) -> tuple[Flag, ...]:
    """Mark flags that etcdctl does not have: what is wrong with them is said in plain words."""
    return tuple(replace(flag, ours=True) for flag in flags)


def _inherited(*flags: Flag) -> tuple[Flag, ...]:
    """Mark flags that an environment variable sets, too."""
    variables = (ENVIRONMENT_PREFIX + flag.name.upper().replace("-", "_") for flag in flags)
    return tuple(replace(flag, variable=variable) for flag, variable in zip(flags, variables, strict=True))


GLOBAL_FLAGS = _inherited(
    Flag("endpoints", LIST, ("127.0.0.1:2379",), "members to talk to: host:port or URLs, separated by commas"),
    Flag("write-out", default="simple", usage="output format", short="w", choices=FORMATS),
    Flag("hex", BOOL, usage="print keys and values in hexadecimal"),
    Flag("command-timeout", DURATION, 5.0, "time limit of a command, without the time to connect"),
    Flag("dial-timeout", DURATION, 2.0, "time limit of one connection attempt"),
    Flag("keepalive-time", DURATION, 2.0, "idle time after which a connection is probed (at least 10s are waited)"),
    Flag("keepalive-timeout", DURATION, 6.0, "time limit for the answer to a probe"),
    Flag("max-request-bytes", INT, usage="largest request that is sent, in bytes; 0 means 2 MiB"),
    Flag("max-recv-bytes", INT, usage="largest answer that is accepted, in bytes; 0 means 2 GiB"),
    Flag("user", usage="NAME or NAME:PASSWORD; a missing password is asked for"),
    Flag("password", usage="the user's password; --user is then the name alone"),
    Flag("cacert", usage="file of the authorities that sign the members' certificates"),
    Flag("cert", usage="file of the certificate to present"),
    Flag("key", usage="file of that certificate's private key"),
    Flag("insecure-transport", BOOL, True, "allow connections without TLS"),
    Flag("insecure-skip-tls-verify", BOOL, usage="accept any certificate; use it in tests only"),
    Flag("insecure-discovery", BOOL, True, "accept endpoints without TLS from DNS"),
    Flag("discovery-srv", usage="domain whose SRV records name the endpoints (not implemented)", short="d"),
    Flag("discovery-srv-name", usage="suffix of the SRV service name (not implemented)"),
    Flag("debug", BOOL, usage="print the settings in force to standard error"),
)

_CONSISTENCY = Flag(
    "consistency", default="l", usage="read consistency: l is linearizable, s is serializable", choices=("l", "s")
)
GET_FLAGS = (
    _CONSISTENCY,
    Flag("order", usage="order of the result; without it ascending", choices=("ASCEND", "DESCEND")),
    Flag(
        "sort-by", usage="what to sort by; without it by key", choices=("CREATE", "KEY", "MODIFY", "VALUE", "VERSION")
    ),
    Flag("limit", INT, usage="largest number of keys to return; 0 means all"),
    Flag("prefix", BOOL, usage="read all keys that begin with KEY"),
    Flag("from-key", BOOL, usage="read all keys from KEY on, in byte order"),
    Flag("rev", INT, usage="read the keys as of this revision; 0 means the newest"),
    Flag("keys-only", BOOL, usage="print the keys without their values"),
    Flag("count-only", BOOL, usage="print only the number of keys; needs --write-out=fields"),
    Flag("print-value-only", BOOL, usage="print only the values; needs --write-out=simple"),
    Flag("min-create-rev", INT, usage="leave out keys created before this revision"),
    Flag("max-create-rev", INT, usage="leave out keys created after this revision; 0 means none"),
    Flag("min-mod-rev", INT, usage="leave out keys last changed before this revision"),
    Flag("max-mod-rev", INT, usage="leave out keys last changed after this revision; 0 means none"),
)
PUT_FLAGS = (
    Flag("lease", default="0", usage="lease to attach the key to, in hexadecimal; 0 means none"),
    Flag("prev-kv", BOOL, usage="also print what the key held before"),
    Flag("ignore-value", BOOL, usage="keep the value and change the lease"),
    Flag("ignore-lease", BOOL, usage="keep the lease and change the value"),
)
DELETE_FLAGS = (
    Flag("prefix", BOOL, usage="delete all keys that begin with KEY"),
    Flag("prev-kv", BOOL, usage="also print what was deleted"),
    Flag("from-key", BOOL, usage="delete all keys from KEY on, in byte order"),
    Flag("range", BOOL, usage="accepted and ignored: a range needs no confirmation here"),
)
WATCH_FLAGS = (
    Flag("interactive", BOOL, usage="read watch and progress commands from standard input", short="i"),
    Flag("prefix", BOOL, usage="watch all keys that begin with KEY"),
    Flag("rev", INT, usage="begin with the changes of this revision; 0 means from now on"),
    Flag("prev-kv", BOOL, usage="also print what a key held before each change"),
    Flag("progress-notify", BOOL, usage="also print from time to time how far the watch has come"),
)
(_CLUSTER,) = _inherited(
    Flag("cluster", BOOL, usage="ask all members that the cluster lists, instead of the endpoints")
)

_PUT_DETAILS = (
    """Without VALUE, the value is read from standard input.  Write "--" before a VALUE that begins with "-"."""
)
_TXN_DETAILS = """Reads three parts from standard input, each ended by an empty line: comparisons, the requests to make
if all of them hold, and the requests to make otherwise.

\b
mod("k") = "3"         or create, version, value, lease; = may be != < >
put k "new value"
get k

\b
del k"""
_WATCH_DETAILS = """The COMMAND runs for each change and finds it in its environment: ETCD_WATCH_REVISION,
ETCD_WATCH_EVENT_TYPE, ETCD_WATCH_KEY and ETCD_WATCH_VALUE.  KEY and END may also be given by the environment variables
ETCDCTL_WATCH_KEY and ETCDCTL_WATCH_RANGE_END.

With -i each line of standard input is "watch" with flags and command, or "progress".

If a member is lost, the watch goes on at another endpoint; no change is lost or printed twice."""
_LOCK_DETAILS = """Without COMMAND the lock is held until SIGINT or SIGTERM arrives.  COMMAND finds ETCD_LOCK_KEY and
ETCD_LOCK_REV in its environment; its exit code becomes that of raftkvctl.  It is ended if the lock is lost.  Write "--"
before a COMMAND that has flags of its own."""


def _kv_commands() -> list[Leaf]:
    interactive = Flag("interactive", BOOL, usage="ask for each part", short="i")
    physical = Flag("physical", BOOL, usage="wait until the history is removed from the database of the member asked")
    return [
        _leaf("get", "ctl.kv:get", "KEY [END]", "Read a key, or the keys from KEY up to END", GET_FLAGS)(
            "get greeting", "get jobs/ --prefix --keys-only", "get greeting --rev=4 -w json"
        ),
        _leaf("put", "ctl.kv:put", "KEY [VALUE]", "Write a key", PUT_FLAGS, _PUT_DETAILS)(
            "put greeting hello", "put offset -- -1", "put config < config.json"
        ),
        _leaf("del", "ctl.kv:delete", "KEY [END]", "Delete a key, or the keys from KEY up to END", DELETE_FLAGS)(
            "del greeting", "del jobs/ --prefix"
        ),
        _leaf("txn", "ctl.txn:txn", "", "Compare and change keys in one step", (interactive,), _TXN_DETAILS)(
            "txn --interactive", "txn < transaction.txt"
        ),
        _leaf("compaction", "ctl.kv:compaction", "REVISION", "Forget the history before a revision", (physical,))(
            "compaction 1000"
        ),
        _leaf(
            "watch",
            "ctl.watch:watch",
            "KEY [END] [-- COMMAND ...]",
            "Print the changes of keys as they happen",
            WATCH_FLAGS,
            _WATCH_DETAILS,
        )("watch jobs/ --prefix", "watch greeting --rev=1", "watch config -- ./reload.sh"),
    ]


def _lease_commands() -> Branch:
    once = Flag("once", BOOL, usage="renew the lease once and end")
    keys = Flag("keys", BOOL, usage="also print the keys that are attached to the lease")
    children = [
        _leaf("grant", "ctl.lease:grant", "TTL", "Make a lease that lives for TTL seconds")("lease grant 60"),
        _leaf("revoke", "ctl.lease:revoke", "LEASE", "End a lease and delete its keys")(
            "lease revoke 32695410dcc0ca06"
        ),
        _leaf("timetolive", "ctl.lease:time_to_live", "LEASE", "Print how many seconds a lease has left", (keys,))(
            "lease timetolive 32695410dcc0ca06 --keys"
        ),
        _leaf("list", "ctl.lease:list_leases", "", "List all leases")("lease list"),
        _leaf("keep-alive", "ctl.lease:keep_alive", "LEASE", "Renew a lease until it ends", (once,))(
            "lease keep-alive 32695410dcc0ca06"
        ),
    ]
    return Branch("lease", "Make, renew and end leases (LEASE is an id in hexadecimal)", children, GLOBAL_FLAGS)


def _coordination_commands() -> list[Leaf]:
    ttl = Flag("ttl", INT, 10, "seconds after which a holder that has died loses the lock")
    listen = Flag("listen", BOOL, usage="only print who leads", short="l")
    elect_details = """With PROPOSAL it takes part: when it leads it prints its key, and it stays until SIGINT or
SIGTERM arrives; then it resigns.  Its lease has a TTL of 60 seconds."""
    return [
        _leaf("lock", "ctl.lock:lock", "NAME [COMMAND ...]", "Hold a lock", (ttl,), _LOCK_DETAILS)(
            "lock backup", "lock backup -- ./backup.sh --full"
        ),
        _leaf(
            "elect",
            "ctl.elect:elect",
            "NAME [PROPOSAL]",
            "Take part in an election, or observe it",
            (listen,),
            elect_details,
        )("elect scheduler 10.0.0.1:80", "elect -l scheduler"),
    ]


_NO_CHANGES = "raftkv cannot change the members of a running cluster yet"
_NO_SNAPSHOTS = "raftkv cannot save or restore a snapshot by command yet"
_NO_AUTH = "raftkv has no users, roles and permissions yet"


def _cluster_commands() -> list[click.Command]:
    revision = Flag("rev", INT, usage="hash the history up to this revision; 0 means all of it")
    members: list[click.Command] = [
        _leaf("list", "ctl.cluster:member_list", "", "List the members", (_CONSISTENCY,))("member list -w table"),
        *(Absent(name, f"member {name}", _NO_CHANGES) for name in ("add", "promote", "remove", "update")),
    ]
    endpoint = [
        _leaf("health", "ctl.cluster:endpoint_health", "", "Tell whether endpoints can commit a write", (_CLUSTER,))(
            "endpoint health --cluster"
        ),
        _leaf("status", "ctl.cluster:endpoint_status", "", "Print version, size, leader and term", (_CLUSTER,))(
            "endpoint status --cluster -w table"
        ),
        _leaf("hashkv", "ctl.cluster:endpoint_hashkv", "", "Print the hash of the history", (_CLUSTER, revision))(
            "endpoint hashkv --cluster"
        ),
    ]
    alarm = [
        _leaf("list", "ctl.cluster:alarm_list", "", "List all alarms")("alarm list"),
        _leaf("disarm", "ctl.cluster:alarm_disarm", "", "Disarm all alarms")("alarm disarm"),
    ]
    defragmentation = "raftkv needs no defragmentation: its database uses the pages again that a compaction frees"
    return [
        Branch("member", "List the members", members, GLOBAL_FLAGS),
        Branch("endpoint", "Ask members for their health, status and hash", endpoint, (*GLOBAL_FLAGS, _CLUSTER)),
        Branch("alarm", "List and disarm alarms", alarm, GLOBAL_FLAGS),
        *(Absent(name, name, _NO_AUTH) for name in ("auth", "role", "user")),
        Absent("snapshot", "snapshot", _NO_SNAPSHOTS),
        Absent("defrag", "defrag", defragmentation),
        Absent(
            "move-leader", "move-leader", "raftkv cannot move its leader by command yet; a leader that is stopped does"
        ),
        Absent("downgrade", "downgrade", "raftkv has no version to go back to yet"),
    ]


def _mirror_command() -> Leaf:
    flags = (
        Flag("prefix", usage="copy only keys that begin with this"),
        Flag("rev", INT, usage="copy nothing and begin with the changes of this revision; 0 means copy first"),
        Flag("max-txn-ops", INT, 128, "largest number of keys written in one transaction"),
        Flag("dest-prefix", usage="what replaces --prefix at the destination"),
        Flag("no-dest-prefix", BOOL, usage="remove --prefix at the destination"),
        Flag("dest-cert", usage="file of the certificate to present to the destination"),
        Flag("dest-key", usage="file of that certificate's private key"),
        Flag("dest-cacert", usage="file of the authorities that sign the destination's certificates"),
        Flag("dest-insecure-transport", BOOL, True, "allow a connection without TLS to the destination"),
        Flag("dest-user", usage="NAME or NAME:PASSWORD at the destination"),
        Flag("dest-password", usage="password at the destination; --dest-user is then the name alone"),
    )
    details = "Prints every 30 seconds how many keys it has written. It runs until something ends it."
    return _leaf(
        "make-mirror", "ctl.mirror:make_mirror", "DESTINATION", "Copy keys to a cluster and follow", flags, details
    )("make-mirror 10.0.1.1:2379", "make-mirror 10.0.1.1:2379 --prefix jobs/ --dest-prefix old-jobs/")


def _check_commands() -> Branch:
    def flags(prefix: str) -> tuple[Flag, ...]:
        loads = ("s", "m", "l", "xl")
        return (
            Flag("load", default="s", usage="size of the load: small, medium, large, very large", choices=loads),
            Flag(
                "prefix", default=prefix, usage="where the keys of the check are written; they are deleted afterwards"
            ),
            Flag("auto-compact", BOOL, usage="compact the history afterwards"),
            Flag("auto-defrag", BOOL, usage="defragment the members afterwards"),
        )

    perf_flags, scale_flags = flags("/etcdctl-check-perf/"), flags("/etcdctl-check-datascale/")
    perf = """The loads are 150, 1000, 8000 and 15000 puts a second.  PASS needs nine tenths of that, no put slower than
0.5 s, and a standard deviation below 0.1 s.  Ctrl-C prints what was measured until then."""
    scale = "The loads are 10,000, 100,000, 1,000,000 and 3,000,000 keys of 1 KiB."
    children = [
        _leaf("perf", "ctl.check:perf", "", "Put at a steady rate for 60 s and judge the cluster", perf_flags, perf)(
            "check perf", "check perf --load=m --auto-compact"
        ),
        _leaf(
            "datascale",
            "ctl.check:datascale",
            "",
            "Write many keys and print how much memory they take",
            scale_flags,
            scale,
        )("check datascale --load=s"),
    ]
    return Branch("check", "Judge a cluster by its answers to a load", children, GLOBAL_FLAGS)


(_JSON,) = _ours(Flag("json", BOOL, usage="print JSON; watch prints one object a line"))
_EXEC_FLAGS = _ours(
    Flag("job", usage="id of the run, the same on all of its nodes (required)"),
    Flag("nnodes", default="1", usage="number of nodes that take part: N, or MIN:MAX"),
    Flag("nproc-per-node", INT, 1, "number of workers on this node"),
    Flag("max-restarts", INT, usage="number of times that this node's workers may fail before it gives up"),
    Flag("env-style", LIST, usage="variables that workers find: torch,pet,tf,horovod or none; without it all"),
    Flag("conf", LIST, usage="settings of the run, NAME=VALUE: lease_ttl, last_call_timeout, join_timeout, ..."),
    Flag("local-addr", usage="address at which other nodes reach this one; without it the host's name"),
    Flag("node-name", usage="name of this machine; without it the host's name"),
    Flag("stop-grace", DURATION, 10.0, "time from SIGTERM to SIGKILL when workers are stopped"),
    Flag("log-dir", usage="directory for the workers' log files; alone it means --tee 3"),
    Flag("redirects", usage="streams that go to log files only: 1 stdout, 2 stderr, 3 both, or 0:3,1:2", short="r"),
    Flag("tee", usage="streams that go to log files and to the console, as for --redirects", short="t"),
    Flag("local-ranks-filter", usage="local ranks whose output is on the console; without it all"),
    Flag("no-prefix", BOOL, usage="print lines of workers without the [rankN] before them"),
    Flag("quiet", BOOL, usage="print nothing but what the workers print", short="q"),
)
_EXEC_DETAILS = """Starts the workers when enough nodes are there, with their ranks and the address of rank 0 in their
environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_*, TF_CONFIG, HOROVOD_*, RAFTKV_*).  Stops them and starts
them again when nodes come or go, or when a worker fails anywhere.

When all workers have ended well everywhere, the run is closed and the exit code is 0.  Otherwise it is the exit code of
the failed worker, 128 and the signal's number if a signal ended it, or 1 if another node closed the run."""


def _run_commands() -> Branch:
    flags = (_JSON,)
    sure = _ours(
        Flag("yes", BOOL, usage="do not ask for confirmation", short="y"),
        Flag("force", BOOL, usage="delete the run even while nodes are alive in it"),
    )
    delete = "Its faults and generations are forgotten; the next run of that id begins with generation 1."
    children = [
        _leaf("list", "runs.commands:list_all", "", "List the runs", flags)("run list"),
        _leaf(
            "show", "runs.commands:show", "RUN", "Print who is in a run, who waits and why, and the last faults", flags
        )("run show job7"),
        _leaf(
            "timeline",
            "runs.commands:timeline",
            "RUN",
            "Print what happened: generations, ranks, causes, seconds",
            flags,
        )("run timeline job7"),
        _leaf("watch", "runs.commands:watch", "RUN", "Print what happens until SIGINT or SIGTERM arrives", flags)(
            "run watch job7"
        ),
        _leaf(
            "queue",
            "runs.commands:queue",
            "[CLUSTER]",
            "Print who holds the slots that runs share, and who waits",
            flags,
        )("run queue", "run queue gpu"),
        _leaf("exec", "runs.exec:execute", "-- COMMAND ...", "Take part in a run", _EXEC_FLAGS, _EXEC_DETAILS)(
            "run exec --job job7 --nnodes 2:4 -- python train.py"
        ),
        _leaf("delete", "runs.commands:delete", "RUN", "Delete all keys of a run", (*flags, *sure), delete)(
            "run delete job7 --yes"
        ),
    ]
    return Branch("run", "See, start and delete training runs", children, (*GLOBAL_FLAGS, _JSON))


_TOP_FLAGS = _ours(
    Flag("interval", DURATION, 2.0, "time between two looks"),
    Flag("once", BOOL, usage="look for one interval, print the table, end"),
    Flag("json", BOOL, usage="print JSON, one object a line"),
)
_TOP_DETAILS = """Shows each member's role, term, log index and lag, revision, size, rates, watchers and how far they
are behind, leader changes and alarms.  Rates come from the members' metrics.  q or Ctrl-C ends it."""


def _about_commands() -> list[click.Command]:
    shells = "bash|zsh|fish|powershell"
    commands: list[click.Command] = [
        _leaf("top", "top.command:top", "", "Show the cluster live", _TOP_FLAGS, _TOP_DETAILS)("top", "top --once"),
        _leaf("options", "ctl.about:options", "", "Describe the options that every command has")("options"),
        _leaf("version", "ctl.about:version", "", "Print the version")("version"),
        _leaf("completion", "ctl.about:completion", shells, "Print a completion script for a shell")(
            "completion bash > /etc/bash_completion.d/raftkvctl"
        ),
    ]
    commands.append(External("bench", "raftkv.cli.bench.command:bench", "Measure a cluster"))
    return commands


def _leaf(
    name: str, target: str, usage: str, short: str, flags: Sequence[Flag] = (), details: str = ""
) -> Callable[..., Leaf]:
    """Return a command that only lacks its examples: the words after the program's name."""

    def with_examples(*examples: str) -> Leaf:
        return Leaf(
            name,
            f"raftkv.cli.{target}",
            usage=usage,
            short=short,
            flags=flags,
            shared=GLOBAL_FLAGS,
            details=details,
            examples=examples,
        )

    return with_examples


def make_tree() -> Branch:
    """Make the tree of all commands."""
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
    return Branch(NAME, "Talk to a raftkv or etcd cluster", children, GLOBAL_FLAGS)
