"""The commands of raftkvctl: their names, flags, help and examples, and the functions that they run.

Defines the command tree. A command's function has the command's name, in the module of its branch; see ``cli.command``.
A command that only prints its help must not load the modules that talk to a cluster, so none is imported here.
"""

from __future__ import annotations

from dataclasses import replace

from raftkv.checkpoint.keys import KINDS
from raftkv.cli.command import Branch, Invocation, Page, flag_row
from raftkv.cli.common import FORMATS_FLAG, add_about_commands, add_file_commands
from raftkv.cli.pflag import BOOL, DURATION, FLOAT, INT, LIST, Flag

NAME = "raftkvctl"
ENVIRONMENT_PREFIX = "ETCDCTL_"


def _ours(*flags: Flag) -> tuple[Flag, ...]:
    """Mark flags that etcdctl does not have; their errors use plain words."""
    return tuple(replace(flag, ours=True) for flag in flags)


def _inherited(*flags: Flag) -> tuple[Flag, ...]:
    """Mark flags that an environment variable can also set."""
    variables = (ENVIRONMENT_PREFIX + flag.name.upper().replace("-", "_") for flag in flags)
    return tuple(replace(flag, variable=variable) for flag, variable in zip(flags, variables, strict=True))


GLOBAL_FLAGS = _inherited(
    Flag("endpoints", LIST, ("127.0.0.1:2379",), "members to talk to: host:port or URLs, separated by commas"),
    FORMATS_FLAG,
    Flag("hex", BOOL, usage="print keys and values in hexadecimal"),
    Flag("command-timeout", DURATION, 5.0, "time limit of a command, without the time to connect"),
    Flag("dial-timeout", DURATION, 2.0, "time limit of one connection attempt"),
    Flag("keepalive-time", DURATION, 2.0, "idle time after which a connection is probed; below 10s means 10s"),
    Flag("keepalive-timeout", DURATION, 6.0, "time limit for the answer to a probe"),
    Flag("max-request-bytes", INT, usage="largest request to send, in bytes; 0 means 2 MiB"),
    Flag("max-recv-bytes", INT, usage="largest response to accept, in bytes; 0 means 2 GiB"),
    Flag("user", usage="NAME or NAME:PASSWORD; a missing password is asked for"),
    Flag("password", usage="the user's password; --user is then the name alone"),
    Flag("auth-jwt-token", usage="JSON web token to authenticate with, instead of --user"),
    Flag("cacert", usage="file with the CA certificates that sign the members' certificates"),
    Flag("cert", usage="file with the client certificate"),
    Flag("key", usage="file with the private key of the client certificate"),
    Flag("insecure-transport", BOOL, True, "allow connections without TLS"),
    Flag("insecure-skip-tls-verify", BOOL, usage="accept any certificate; use it in tests only"),
    Flag("insecure-discovery", BOOL, True, "accept endpoints without TLS from DNS"),
    Flag("discovery-srv", usage="domain whose SRV records name the endpoints, instead of --endpoints", short="d"),
    Flag("discovery-srv-name", usage="suffix of the name of the service in SRV records"),
    Flag("debug", BOOL, usage="print the settings in effect to standard error"),
)

_LEVELS = "read consistency: l is linearizable, s is serializable"
_CONSISTENCY = Flag("consistency", default="l", usage=_LEVELS, choices=("l", "s"))
_SORTED_BY = ("CREATE", "KEY", "MODIFY", "VALUE", "VERSION")
GET_FLAGS = (
    _CONSISTENCY,
    Flag("order", usage="order of the result, ascending if not given", choices=("ASCEND", "DESCEND")),
    Flag("sort-by", usage="what to sort by, the key if not given", choices=_SORTED_BY),
    Flag("limit", INT, usage="largest number of keys to return; 0 means all"),
    Flag("prefix", BOOL, usage="read all keys that begin with KEY"),
    Flag("from-key", BOOL, usage="read all keys from KEY on, in byte order"),
    Flag("rev", INT, usage="read the keys as of this revision; 0 means the newest"),
    Flag("keys-only", BOOL, usage="print the keys without their values"),
    Flag("count-only", BOOL, usage="print only the number of keys; needs --write-out=fields"),
    Flag("print-value-only", BOOL, usage="print only the values; needs --write-out=simple"),
    Flag("stream", BOOL, usage="receive the keys in chunks, for many or large keys (RangeStream)"),
    Flag("min-create-rev", INT, usage="leave out keys created before this revision"),
    Flag("max-create-rev", INT, usage="leave out keys created after this revision; 0 means no limit"),
    Flag("min-mod-rev", INT, usage="leave out keys last changed before this revision"),
    Flag("max-mod-rev", INT, usage="leave out keys last changed after this revision; 0 means no limit"),
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
    Flag("keys-only", BOOL, usage="omit values; raftkv members do not send them", ours=True),
    Flag("max-value-bytes", INT, usage="omit puts with larger values; 0 means no limit", ours=True),
    Flag("progress-notify", BOOL, usage="also print the watch's progress from time to time"),
)
_ASK_ALL = "ask all members in the member list instead of the endpoints"
(_CLUSTER,) = _inherited(Flag("cluster", BOOL, usage=_ASK_ALL))

_PUT_DETAILS = """Without VALUE, the value is read from standard input. Write "--" before a VALUE that begins with
"-"."""
_TXN_DETAILS = """Reads three parts from standard input, each ended by an empty line: comparisons, the requests to make
if all of them hold, and the requests to make otherwise.

\b
mod("k") = "3"         or create, version, value, lease; = may be != < >
put k "new value"
get k

\b
del k"""
_WATCH_DETAILS = """The COMMAND runs for each change and finds it in its environment: ETCD_WATCH_REVISION,
ETCD_WATCH_EVENT_TYPE, ETCD_WATCH_KEY and ETCD_WATCH_VALUE. KEY and END may also be given by the environment variables
ETCDCTL_WATCH_KEY and ETCDCTL_WATCH_RANGE_END.

With -i each line of standard input is "watch" with flags and command, or "progress".

If a member is lost, the watch continues at another endpoint; no change is lost or printed twice."""
_LOCK_DETAILS = """Without COMMAND, raftkvctl holds the lock until SIGINT or SIGTERM arrives. COMMAND finds
ETCD_LOCK_KEY and ETCD_LOCK_REV in its environment, and its exit code becomes that of raftkvctl. If the lock is lost,
raftkvctl ends COMMAND. Write "--" before a COMMAND that has flags of its own."""


def _add_kv(root: Branch) -> None:
    stale = "let one member, even a learner, answer alone if its data is at most this old; 0 means never"
    (staleness,) = _ours(Flag("max-staleness", DURATION, usage=stale))
    interactive = Flag("interactive", BOOL, usage="ask for each part", short="i")
    physical = Flag(
        "physical", BOOL, usage="wait until the member that answers has deleted the history from its database"
    )
    root.module = "ctl.kv:"
    root.leaf("get", "KEY [END]", "Read a key, or the keys from KEY up to END", (*GET_FLAGS, staleness)).like(
        "greeting", "jobs/ --prefix --keys-only", "greeting --rev=4 -w json", "greeting --max-staleness=500ms"
    )
    root.leaf("put", "KEY [VALUE]", "Write a key", PUT_FLAGS, _PUT_DETAILS).like(
        "greeting hello", "offset -- -1", "config < config.json"
    )
    root.leaf("del", "KEY [END]", "Delete a key, or the keys from KEY up to END", DELETE_FLAGS, run="delete").like(
        "greeting", "jobs/ --prefix"
    )
    root.leaf("txn", "", "Compare and change keys in one step", (interactive,), _TXN_DETAILS).like(
        "--interactive", "< transaction.txt"
    )
    root.leaf("compaction", "REVISION", "Delete the history before a revision", (physical,)).like("1000")
    root.module = "ctl.watch:"
    changes = "Print the changes of keys as they happen"
    root.leaf("watch", "KEY [END] [-- COMMAND ...]", changes, WATCH_FLAGS, _WATCH_DETAILS).like(
        "jobs/ --prefix", "greeting --rev=1", "config -- ./reload.sh"
    )


def _add_leases(root: Branch) -> None:
    lease = root.branch("lease", "Make, renew and end leases (LEASE is an id in hexadecimal)", "ctl.contest:")
    once = Flag("once", BOOL, usage="renew the lease once and end")
    keys = Flag("keys", BOOL, usage="also print the keys that are attached to the lease")
    lease.leaf("grant", "TTL", "Make a lease that lives for TTL seconds").like("60")
    lease.leaf("revoke", "LEASE", "End a lease and delete its keys").like("32695410dcc0ca06")
    lease.leaf("timetolive", "LEASE", "Print how many seconds a lease has left", (keys,), run="time_to_live").like(
        "32695410dcc0ca06 --keys"
    )
    lease.leaf("list", "", "List all leases", run="list_leases")
    lease.leaf("keep-alive", "LEASE", "Renew a lease until it ends", (once,)).like("32695410dcc0ca06")


def _add_coordination(root: Branch) -> None:
    ttl = Flag("ttl", INT, 10, "seconds after which a dead holder loses the lock")
    listen = Flag("listen", BOOL, usage="only print who leads", short="l")
    elect_details = """With PROPOSAL the command is a candidate: when it leads it prints its key, and leads until SIGINT
or SIGTERM; then it resigns. Its lease has a TTL of 60 seconds."""
    root.module = "ctl.contest:"
    root.leaf("lock", "NAME [COMMAND ...]", "Hold a lock", (ttl,), _LOCK_DETAILS).like(
        "backup", "backup -- ./backup.sh --full"
    )
    root.leaf(
        "elect", "NAME [PROPOSAL]", "Run for leader in an election, or observe it", (listen,), elect_details
    ).like("scheduler 10.0.0.1:80", "-l scheduler")


_ADD_DETAILS = """Prints the settings for the first start of the new member, which must have no data yet."""
_REMOVE_DETAILS = """The member stops, and its id cannot be used again. To use the host again, delete its data and add
it as a new member."""
_REPLACE = "Replace a voter by a learner"
_REPLACE_DETAILS = """NEW is a learner that has the data: start it with `raftkv join URL --learner`.
NEW gets the vote and OLD leaves in one change, so the number of voters never drops (not in etcdctl)."""


def _add_members(root: Branch) -> None:
    member = root.branch("member", "List, add, move and remove members", "ctl.members:member_")
    peer_urls = Flag("peer-urls", usage="peer URLs of the member, separated by commas")
    learner = Flag("learner", BOOL, usage="the member gets all data but does not vote, until it is promoted")
    member.leaf("list", "", "List the members", (_CONSISTENCY,)).like("-w table")
    member.leaf("add", "NAME", "Add a member", (peer_urls, learner), _ADD_DETAILS).like(
        "d --peer-urls=http://10.0.0.4:2380", "d --learner --peer-urls=http://10.0.0.4:2380"
    )
    member.leaf("remove", "MEMBER", "Remove a member permanently", (), _REMOVE_DETAILS).like("8e9e05c52164694d")
    member.leaf("update", "MEMBER", "Change the peer URLs of a member", (peer_urls,)).like(
        "8e9e05c52164694d --peer-urls=http://10.0.0.5:2380"
    )
    member.leaf("promote", "MEMBER", "Promote a learner to a voter").like("8e9e05c52164694d")
    member.leaf("replace", "OLD NEW", _REPLACE, (), _REPLACE_DETAILS).like("8e9e05c52164694d fd422379fda50e48")


def _add_roll(root: Branch) -> None:
    cluster = root.branch("cluster", "Restart all members, one after another (not in etcdctl)", "ctl.roll:cluster_")
    flags = (
        Flag("restart", usage="command that restarts a member; {host}, {name} and {id} are replaced by its values"),
        Flag("wait", DURATION, 300.0, "time limit for a restarted member to be in sync again"),
        Flag("dry-run", BOOL, usage="only print the steps, and whether the first one is safe"),
    )
    details = (
        "The leader is restarted last, after it has handed over its leadership. The roll ends before a step that would "
        "leave no quorum of members in sync. The restart command must return after the old process has ended."
    )
    cluster.leaf("roll", "", "Restart all members, one after another", flags, details).like(
        "--dry-run --restart 'ssh {host} restart-raftkv'", "--restart 'ssh {host} systemctl restart raftkv'"
    )


def _add_endpoints(root: Branch) -> None:
    purpose = "Ask members for their health, status and hash"
    endpoint = root.branch("endpoint", purpose, "ctl.members:endpoint_", (_CLUSTER,))
    revision = Flag("rev", INT, usage="hash the history up to this revision; 0 means all of it")
    endpoint.leaf("health", "", "Check that endpoints answer linearizable reads, and raise no alarm").like("--cluster")
    endpoint.leaf("status", "", "Print version, size, leader and term").like("--cluster -w table")
    endpoint.leaf("hashkv", "", "Print the hash of the history", (revision,)).like("--cluster")


_INTERACTIVE = Flag(
    "interactive", BOOL, True, "ask for the password on the terminal; false: read it from standard input"
)
_INTERVAL = (
    Flag("prefix", BOOL, usage="the permission for all keys that begin with KEY"),
    Flag("from-key", BOOL, usage="the permission for all keys from KEY on, in byte order"),
)
_ENABLE_DETAILS = """The user root must exist; the command grants it the role root if necessary. Afterwards
members refuse requests without a user, and requests that the user is not permitted to make."""
_USER_DETAILS = """Asks for the password, unless NAME:PASSWORD or --new-user-password sets it; all users of this
machine can read a command line. A user without a password logs in by a certificate with its name as common name."""
_PERMISSION_DETAILS = """KIND is read, write or readwrite. Without END and flags the permission covers KEY alone."""


def _add_users(root: Branch) -> None:
    auth = root.branch("auth", "Enable, disable or show authentication", "ctl.maintenance:auth_")
    auth.leaf("enable", "", "Enable authentication", (), _ENABLE_DETAILS)
    auth.leaf("disable", "", "Disable authentication").like("--user root")
    auth.leaf("status", "", "Print whether authentication is enabled").like("--user root")
    user = root.branch("user", "Add, change and delete users", "ctl.maintenance:user_")
    add = (
        _INTERACTIVE,
        Flag(
            "new-user-password", usage="the password; other users of this machine can read it in the list of processes"
        ),
        Flag("no-password", BOOL, usage="create the user without a password: it authenticates by its certificate"),
    )
    detail = Flag("detail", BOOL, usage="also print the permissions of its roles")
    user.leaf("add", "NAME[:PASSWORD]", "Add a user", add, _USER_DETAILS).like("alice", "agent7 --no-password")
    user.leaf("delete", "NAME", "Delete a user").like("alice")
    user.leaf("get", "NAME", "Print the roles of a user", (detail,)).like("alice --detail")
    user.leaf("list", "", "List all users")
    user.leaf("passwd", "NAME", "Change the password of a user", (_INTERACTIVE,)).like(
        "alice", "alice --interactive=false < password.txt"
    )
    user.leaf("grant-role", "NAME ROLE", "Grant a role to a user").like("alice jobs")
    user.leaf("revoke-role", "NAME ROLE", "Revoke a role from a user").like("alice jobs")


def _add_roles(root: Branch) -> None:
    role = root.branch("role", "Manage roles and key permissions", "ctl.maintenance:role_")
    role.leaf("add", "ROLE", "Add a role").like("jobs")
    role.leaf("delete", "ROLE", "Delete a role, and revoke it from its users").like("jobs")
    role.leaf("get", "ROLE", "Print the permissions of a role").like("jobs")
    role.leaf("list", "", "List all roles")
    role.leaf(
        "grant-permission",
        "ROLE KIND KEY [END]",
        "Grant a role permission to read or write keys",
        _INTERVAL,
        _PERMISSION_DETAILS,
    ).like("jobs readwrite jobs/ --prefix", "jobs read config")
    role.leaf(
        "revoke-permission", "ROLE KEY [END]", "Revoke the permission of exactly this interval from a role", _INTERVAL
    ).like("jobs jobs/ --prefix")


_FILES = """

The command asks no member. As in etcdctl, it takes --write-out but no other global option, and no environment
variable. `raftkvutl snapshot` does the same."""


def _add_maintenance(root: Branch) -> None:
    save = """FILE is a database in etcd's own format with its SHA-256: raftkvutl snapshot and etcdutl snapshot read
it. It is written as FILE.part, and renamed when it is complete. There is no time limit without
--command-timeout."""
    purpose = "Save the state of a member to a file; inspect and restore such files"
    snapshot = root.branch("snapshot", purpose, "ctl.maintenance:")
    snapshot.leaf("save", "FILE", "Save the state of a member to a file", (), save, run="snapshot_save").like(
        "/backup/raftkv.db", "--endpoints=10.0.0.1:2379 raftkv.db"
    )
    add_file_commands(snapshot, "hash, revision, total keys, total size", _FILES)
    alarm = root.branch("alarm", "List and disarm alarms", "ctl.maintenance:alarm_")
    alarm.leaf("list", "", "List all alarms")
    alarm.leaf("disarm", "", "Disarm all alarms")
    defrag = """Each member rewrites its database without the pages that compactions have freed, and serves clients
meanwhile. With --data-dir the command rewrites the database of a stopped member, as `raftkvutl defrag` does."""
    directory = Flag("data-dir", usage="data directory of a stopped member, instead of the endpoints")
    move = "MEMBER is an id in hexadecimal. The leader must be among the endpoints."
    root.module = "ctl.maintenance:"
    root.leaf("defrag", "", "Shrink the databases of members to the space in use", (_CLUSTER, directory), defrag).like(
        "", "--cluster", "--data-dir default.etcd"
    )
    root.leaf("move-leader", "MEMBER", "Transfer leadership to a member", (), move).like(
        "8e9e05c52164694d --endpoints=10.0.0.1:2379"
    )
    downgrade = root.branch("downgrade", "Prepare the cluster for an older version", "ctl.maintenance:downgrade_")
    target = """VERSION is one minor version below the cluster's, which is a version of etcd (3.7). Snapshots are then
saved for etcd's tools of VERSION. Members of raftkv run on unchanged."""
    downgrade.leaf("validate", "VERSION", "Check whether a downgrade is possible").like("3.6")
    downgrade.leaf("enable", "VERSION", "Begin a downgrade", (), target).like("3.6")
    downgrade.leaf("cancel", "", "Cancel the downgrade in progress")


def _add_mirror(root: Branch) -> None:
    flags = (
        Flag("prefix", usage="copy only keys that begin with this"),
        Flag("rev", INT, usage="skip the copy, and begin with the changes of this revision; 0 means copy first"),
        Flag("max-txn-ops", INT, 128, "largest number of keys written in one transaction"),
        Flag("dest-prefix", usage="prefix that replaces --prefix at the destination"),
        Flag("no-dest-prefix", BOOL, usage="remove --prefix at the destination"),
        Flag("dest-cert", usage="file of the certificate to present to the destination"),
        Flag("dest-key", usage="file with the private key of --dest-cert"),
        Flag("dest-cacert", usage="file of the authorities that sign the destination's certificates"),
        Flag("dest-insecure-transport", BOOL, True, "allow a connection without TLS to the destination"),
        Flag("dest-user", usage="NAME or NAME:PASSWORD at the destination"),
        Flag("dest-password", usage="password at the destination; --dest-user is then the name alone"),
    )
    details = "Prints the number of keys written every 30 seconds, and runs until a signal or an error."
    root.module = "ctl.mirror:"
    root.leaf(
        "make-mirror", "DESTINATION", "Copy keys to another cluster, and keep copying changes", flags, details
    ).like("10.0.1.1:2379", "10.0.1.1:2379 --prefix jobs/ --dest-prefix old-jobs/")


def _add_checks(root: Branch) -> None:
    check = root.branch("check", "Test the performance and memory use of a cluster", "bench.check:")

    def flags(prefix: str) -> tuple[Flag, ...]:
        loads = ("s", "m", "l", "xl")
        return (
            Flag("load", default="s", usage="size of the load: small, medium, large, very large", choices=loads),
            Flag("prefix", default=prefix, usage="place of the keys that are written; they are deleted afterwards"),
            Flag("auto-compact", BOOL, usage="compact the history afterwards"),
            Flag("auto-defrag", BOOL, usage="defragment the members afterwards"),
        )

    perf_flags, scale_flags = flags("/etcdctl-check-perf/"), flags("/etcdctl-check-datascale/")
    perf = """The loads are 150, 1000, 8000 and 15000 puts a second. PASS needs nine tenths of that, no put slower than
0.5 s, and a standard deviation below 0.1 s. Ctrl-C prints what was measured until then."""
    scale = "The loads are 10,000, 100,000, 1,000,000 and 3,000,000 keys of 1 KiB."
    check.leaf("perf", "", "Put at a steady rate for 60 s, and print PASS or FAIL", perf_flags, perf).like(
        "", "--load=m --auto-compact"
    )
    check.leaf("datascale", "", "Write many keys, and print the memory that they take", scale_flags, scale).like(
        "--load=s"
    )


(_JSON,) = _ours(Flag("json", BOOL, usage="print JSON"))
_QUOTA_FLAGS = _ours(
    Flag("bytes", default="0", usage="largest size in the database: 1000, 64KiB, 2GB; 0 means no limit"),
    Flag("keys", INT, usage="largest number of keys; 0 means no limit"),
)

_LIMIT_FLAGS = _ours(
    Flag("requests", INT, usage="requests per second at each member; 0 means no limit"),
    Flag("requests-burst", INT, usage="burst allowed at once; 0 means one second's worth"),
    Flag(
        "bytes",
        default="0",
        usage="bytes of requests and responses per second at each member, as 64KiB; 0 means no limit",
    ),
    Flag("bytes-burst", default="0", usage="burst allowed at once; 0 means one second's worth"),
    Flag("watches", INT, usage="open watches at each member; 0 means no limit"),
    Flag(
        "weight",
        INT,
        100,
        usage="part of each member's time while others wait, 1 to 10000; others have 100",
        least=1,
        most=10_000,
    ),
)


def _add_quotas(root: Branch) -> None:
    quota = root.branch(
        "quota", "Limit the use of prefixes, users and addresses (not in etcdctl)", "ctl.maintenance:quota_", (_JSON,)
    )
    details = """--keys counts existing keys, --bytes also the history. A write beyond a limit is refused as a
whole. Deletions free keys, compactions free the bytes of old revisions. Prefixes
may overlap."""
    limits = """Each member applies the limit on its own. A request above the limit is refused with the time to
wait, and the client library waits that long. KIND is user, certificate, address (a network, as 10.0.0.0/24), role,
prefix, or each: every identity without a limit of its own. Keep-alives and calls of operators are not limited."""
    limited = "Limit the rate of requests of a user, certificate, address, role or prefix, or of each"
    quota.leaf("set", "PREFIX", "Limit the keys and bytes of a prefix", _QUOTA_FLAGS, details).like(
        "jobs/ --bytes=64MiB --keys=10000"
    )
    quota.leaf("remove", "PREFIX", "Remove the limits of a prefix").like("jobs/")
    quota.leaf("list", "", "Print all limits of prefixes, and their use")
    quota.leaf("limit", "KIND [NAME]", limited, _LIMIT_FLAGS, limits).like("user alice --requests=100 --bytes=1MiB")
    quota.leaf("unlimit", "KIND [NAME]", "Remove a limit of requests").like("user alice")
    quota.leaf("limits", "", "Print all limits of requests")


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_EXEC_FLAGS = _ours(
    Flag("job", usage="id of the run, the same on all nodes (required)"),
    Flag("nnodes", default="1", usage="number of nodes that take part: N, or MIN:MAX"),
    Flag("nproc-per-node", INT, 1, "number of workers on this node", least=1),
    Flag("max-restarts", INT, 0, "number of times that this node's workers may fail before it gives up", least=0),
    Flag("env-style", LIST, usage="variables set for workers: torch,pet,tf,horovod or none; default: all"),
    Flag(
        "conf", LIST, usage="settings of the run, NAME=VALUE: lease_ttl, last_call_timeout, join_timeout (seconds), ..."
    ),
    Flag(
        "local-addr",
        usage="address at which other nodes reach this one; default: this node's address towards the cluster",
    ),
    Flag("node-name", usage="name of this machine; default: the host's name"),
    Flag(
        "prefork", LIST, usage="modules to import before workers are forked, as torch; COMMAND must be a Python script"
    ),
    Flag("stop-grace", DURATION, 10.0, "time from SIGTERM to SIGKILL when workers are stopped", least=0),
    Flag("signals-to-handle", default=_SIGNALS, usage="signals to pass to the workers before this node ends"),
    Flag("log-dir", usage="directory for the workers' log files; without --redirects and --tee it means --tee 3"),
    Flag("redirects", usage="streams to write to log files only: 1 stdout, 2 stderr, 3 both, or 0:3,1:2", short="r"),
    Flag("tee", usage="streams to write to log files and the console, as for --redirects", short="t"),
    Flag("local-ranks-filter", usage="local ranks to show on the console; default: all"),
    Flag("no-prefix", BOOL, usage="print the workers' lines without the prefix [rankN]"),
    Flag("quiet", BOOL, usage="print only the output of the workers", short="q"),
)
_EXEC_DETAILS = """Starts the workers when enough nodes have joined, with their ranks and the address of rank 0 in their
environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_*, TF_CONFIG, HOROVOD_*, RAFTKV_*). Stops them and starts
them again when nodes join or leave, or when a worker fails on any node.

When all workers on all nodes succeed, the run is closed and the exit code is 0. Otherwise it is the exit code of
the failed worker, 128 and the signal's number if a signal ended it, or 1 if another node closed the run.

A signal named by --signals-to-handle is passed to the workers, then this node leaves. SIGUSR1 and SIGUSR2 are passed
on, and the node continues."""


def _add_access(run: Branch) -> None:
    shared = _ours(
        Flag("cluster", LIST, usage="in addition the right to write the ledger of this cluster's slots"),
        Flag("dataset", LIST, usage="in addition the right to read this dataset's manifests"),
        Flag("read", BOOL, usage="only the right to read the runs and their checkpoints"),
    )
    grant = """RUNS is the id of a run, or a prefix of ids and a star. Creates the role run:RUNS, with the keys of
only these runs and their checkpoints, and grants it to USER. A user with --cluster
can change the ledger's entries of other runs, but not read or change their keys or checkpoints."""
    revoke = "Revokes the roles that run grant granted with the same arguments. A role without users is deleted."
    run.leaf("grant", "USER RUNS", "Allow a user to join runs", shared, grant).like(
        "alice 'bert-*'", "alice 'bert-*' --cluster gpu --dataset imagenet"
    )
    run.leaf("revoke", "USER RUNS", "Revoke runs from a user", shared, revoke).like("alice 'bert-*'")


_METRICS_DETAILS = """The program watches the keys of all runs and checkpoints, so a scrape sends no request to the
cluster. One such program is enough for a cluster. Every program that can reach the address can read the run names."""


def _add_runs(root: Branch) -> None:
    run = root.branch("run", "Show, start and delete training runs", "runs:", (_JSON,))
    sure = _ours(
        Flag("yes", BOOL, usage="do not ask for confirmation", short="y"),
        Flag("force", BOOL, usage="delete the run even if it has live nodes"),
    )
    delete = "The history of faults and generations is deleted; the next run with this id begins with generation 1."
    served = _ours(
        Flag("listen", default="127.0.0.1:9379", usage="HOST:PORT of /metrics"),
        Flag("interval", DURATION, 15.0, "time between searches for new runs"),
    )
    run.leaf("list", "", "List the runs", run="list_all")
    run.leaf("show", "RUN", "Print the nodes of a run, which wait and why, and the last faults").like("job7")
    run.leaf("timeline", "RUN", "Print the history: generations, ranks, causes, seconds").like("job7")
    happens = "With --json each event is one JSON object on one line."
    metrics = "Serve metrics of runs and checkpoints to Prometheus until SIGINT or SIGTERM"
    run.leaf("watch", "RUN", "Print events of a run until SIGINT or SIGTERM", (), happens).like("job7")
    run.leaf("metrics", "", metrics, served, _METRICS_DETAILS, run="serve", is_alike=False).like("", "--listen :9379")
    run.leaf("queue", "[CLUSTER]", "Print which runs hold shared slots, and which wait for them").like("", "gpu")
    run.leaf(
        "exec",
        "-- COMMAND ...",
        "Join a run and start its workers on this node",
        _EXEC_FLAGS,
        _EXEC_DETAILS,
        run="execute",
        is_alike=False,
    ).like("--job job7 --nnodes 2:4 -- python train.py")
    _add_access(run)
    run.leaf("delete", "RUN", "Delete all keys of a run", sure, delete).like("job7 --yes")


_BOTH = _ours(Flag("kind", usage="only checkpoints of this kind; default: of all kinds", choices=tuple(KINDS)))
_URI = _ours(Flag("uri", BOOL, usage="print only the URI of the checkpoint, for scripts"))

_WHICH = """WHICH is latest (the default), a step, tag:NAME, or the best by a metric: min:METRIC or max:METRIC."""
_COMMITS_DETAILS = """Prints each commit once, in order. If the history was compacted, commits of checkpoints deleted
since are missing. The watch survives outages, and moves to another member when its member is lost. At the end it prints
the revision to continue from. With --json each commit is one JSON object on one line, with next_revision."""


def _add_finding(checkpoint: Branch) -> None:
    """Add the commands that only read the registry."""
    limit = _ours(Flag("limit", INT, usage="list at most this many of each kind, newest first; 0 means all", least=0))
    files = _ours(Flag("files", BOOL, usage="also print the files, with sizes and digests"))
    best_flags = _ours(
        Flag("mode", default="min", usage="which values are better", choices=("min", "max")),
        Flag("count", INT, 1, "how many", least=1),
        Flag("all-runs", BOOL, usage="search all runs, and print the best of each run and kind; give METRIC alone"),
    )
    watch_flags = _ours(
        Flag("from-revision", INT, usage="begin with this revision; 1 means all commits, 0 from now on", least=0),
        Flag("count", INT, usage="end after this many commits; 0 means never", least=0),
    )
    checkpoint.leaf("runs", "", "List the runs that have checkpoints, with their latest")
    checkpoint.leaf(
        "list", "RUN", "List the checkpoints of a run by kind and step", (*_BOTH, *limit), run="list_all"
    ).like("bert", "bert --kind dcp --limit 10")
    checkpoint.leaf("show", "RUN [WHICH]", "Describe one checkpoint", (*_BOTH, *files), _WHICH).like(
        "bert", "bert 1000 --files", "bert min:loss --json"
    )
    checkpoint.leaf("latest", "RUN", "Print the newest checkpoint of a run", (*_BOTH, *_URI)).like("bert", "bert --uri")
    checkpoint.leaf("best", "RUN METRIC", "Print the best by a metric", (*_BOTH, *best_flags, *_URI)).like(
        "bert loss", "accuracy --mode max --all-runs --count 3"
    )
    checkpoint.leaf("lineage", "RUN [WHICH]", "Print the ancestors of a checkpoint", _BOTH, _WHICH).like("bert-tuned")
    checkpoint.leaf(
        "watch", "RUN", "Print commits as they happen", (*_BOTH, *watch_flags, *_URI), _COMMITS_DETAILS
    ).like("bert", "bert --from-revision 4711 --json")


_VERIFY = """Reads every file and compares its digest with the one that its rank recorded; the list of files comes from
the store. The command names each file that is missing or differs in size or contents, and exits with 1."""

_EXPORT = f"""{_WHICH} DIRECTORY is a path or a URL. The command writes the files and their list there, and
the record last. It pins the checkpoint meanwhile, and checks every digest. After an interruption, run it again."""
_IMPORT = """DIRECTORY is an export, or has checkpoints of the HF Trainer, Lightning, DCP, DeepSpeed, Megatron, Orbax,
TensorFlow, or safetensors. The command copies and commits whole checkpoints, the lowest step first, and skips those
that the run already has. For an incomplete one it prints the reason, and exits with 1. It claims the run: a job
that still trains in this run cannot commit its next checkpoint."""


def _add_contents(checkpoint: Branch) -> None:
    """Add the commands that read or write the files of checkpoints."""
    every = _ours(Flag("all", BOOL, usage="verify all checkpoints of the run"))
    place, step, dry_run = _ours(
        Flag("place", usage="directory or URL for the run's checkpoints; default: beside its latest"),
        Flag("step", INT, usage="commit it as this step, instead of its own"),
        Flag("dry-run", BOOL, usage="only print the checkpoints found, and which are complete"),
    )
    compare = "Compare the files of a checkpoint with the committed digests"
    checkpoint.leaf("verify", "RUN [WHICH]", compare, (*_BOTH, *every), f"{_WHICH} {_VERIFY}").like(
        "bert", "bert --all --json"
    )
    checkpoint.leaf(
        "export", "RUN WHICH DIRECTORY", "Copy a checkpoint and its record to a directory", _BOTH, _EXPORT
    ).like("bert latest s3://archive/bert", "bert tag:release /mnt/usb/bert")
    take_in = (*_BOTH, place, step, dry_run)
    found = "Copy checkpoints into a run, from an export or from other tools"
    checkpoint.leaf("import", "RUN DIRECTORY", found, take_in, _IMPORT, run="take_in").like(
        "bert /mnt/usb/bert", "old-job /shared/output --dry-run"
    )


_PIN = """A pinned checkpoint is never deleted. Programs that use the library pin the checkpoints they read
(Registry.pin); this command is for operators and other programs."""
_GC = """gc keeps the latest checkpoint of each kind, and those with a tag, a pin or a child in another run. It
deletes the others that match no --keep-... rule; with limits (--max-...) only those beyond a limit. Without any
rule it deletes only the files of dead attempts. It is safe to interrupt gc, and to run several at once."""


def _add_keeping(checkpoint: Branch) -> None:
    """Add the commands that decide how long checkpoints are kept."""
    (reader,) = _ours(Flag("reader", usage="name of the reader; default: USER-HOST"))
    (duration,) = _ours(Flag("for", DURATION, usage="duration of the pin, as 90m or 24h; 0 means until unpin"))
    checkpoint.leaf(
        "pin", "RUN [WHICH]", "Protect a checkpoint from deletion", (*_BOTH, reader, duration), f"{_WHICH} {_PIN}"
    ).like("bert 1000 --for 24h", "bert min:loss --reader paper")
    checkpoint.leaf("unpin", "RUN [WHICH]", "Remove the pins of a reader", (*_BOTH, reader), _WHICH).like("bert 1000")
    checkpoint.leaf("tag", "RUN NAME [WHICH]", "Put a tag on a checkpoint, or move it there", _BOTH, _WHICH).like(
        "bert release", "bert release 1000"
    )
    checkpoint.leaf("untag", "RUN NAME", "Remove a tag").like("bert release")
    checkpoint.leaf("gc", "RUN", "Delete the checkpoints that no rule keeps", _GC_FLAGS, _GC, run="collect").like(
        "bert --keep-last 3 --keep-every 1000 --dry-run", "bert --place /shared/bert --max-bytes 2TiB"
    )


_GC_FLAGS = _ours(
    Flag("dry-run", BOOL, usage="change nothing: print which would be deleted, and why"),
    Flag("keep-last", INT, usage="keep this many of each kind, the newest"),
    Flag("keep-every", INT, usage="keep the first checkpoint of every N steps"),
    Flag("keep-best", LIST, usage="keep the best COUNT (1) by METRIC[:MODE[:COUNT]]; MODE is min (the default) or max"),
    Flag("keep-for", DURATION, usage="keep checkpoints younger than this, as 720h"),
    Flag("max-age", DURATION, usage="delete checkpoints older than this, as 720h"),
    Flag("max-bytes", usage="delete the oldest until the rest fits: 500GiB, 2TB"),
    Flag("place", usage="directory of the run's checkpoints: only files below it are deleted, and without it nothing"),
)


_TOP_FLAGS = _ours(
    Flag("interval", DURATION, 2.0, "time between updates"),
    Flag("once", BOOL, usage="measure for one interval, print the table and exit"),
    Flag("json", BOOL, usage="print JSON, one object a line"),
    Flag("by", default="member", usage="print one line for each member, or for each user", choices=("member", "user")),
)
_TOP_DETAILS = """Shows role, term, log index and lag, revision, size, rates, watchers and their lag, leader changes and
alarms of each member. Rates come from the members' metrics. q or Ctrl-C ends it.

With --by user it shows the load of each user (else certificate, else network) on all members: requests and bytes
per second, share of the members' time, longest wait of its writes, watches, leases. The smallest are "other"."""


def _number(name: str, default: int, usage: str, least: int = 1) -> Flag:
    return Flag(name, INT, default, usage, ours=True, least=least)


_MEASURED = (
    _number("clients", 1, "number of clients; each has one call in progress"),
    _number("conns", 1, "number of connections that the clients share"),
    _number("processes", 1, "number of processes that generate the load"),
    _number("total", 10_000, "number of calls to make"),
)
_VALUE = _number("val-size", 256, "size of a value in bytes", least=0)
_KEEP = Flag("keep-keys", BOOL, usage="keep the written keys below raftkv-bench/", ours=True)
_WRITES = (
    _number("key-size", 8, "size of a key in bytes"),
    _VALUE,
    _number("key-space-size", 10_000, "number of different keys"),
    _KEEP,
)
_PUT_RATE = Flag("put-rate", FLOAT, 0.0, "largest number of puts a second; 0 means no limit", ours=True, least=0)
_BENCH_WATCH = """Every watcher is checked. --clients is the number of puts in progress (from the main process), --conns
the number of connections of the watchers, which run in their own --processes. The rate is that of events, from the
first put to the last event."""
_BENCH_LOCK = """The clients contend for --locks names, each process for its own. A call is an acquisition with the
release that follows; its latency is that of the acquisition. The command checks that no two clients hold a name at the
same time."""


def _add_bench_writes(bench: Branch) -> None:
    """Add the measurements of reads and writes of keys."""
    in_turn, limit, share, operations = _ours(
        Flag("sequential-keys", BOOL, usage="go through the keys in order"),
        Flag("limit", INT, usage="largest number of keys that one read returns; 0 means all", least=0),
        Flag("read-share", FLOAT, 0.75, "share of reads", least=0, most=1),
        Flag("txn-ops", INT, 1, "number of puts in a txn", least=1, most=128),
    )
    ranges = "Each read is of KEY (to END); without KEY, of single keys that are written first."
    bench.leaf("put", "", "Put keys", (*_WRITES, in_turn)).like(
        "", "--clients 100 --conns 10 --total 100000 --val-size 1024"
    )
    bench.leaf("range", "[KEY [END]]", "Read keys", (*_WRITES, _CONSISTENCY, limit), ranges, run="read").like(
        "--clients 100 --consistency s", "jobs/ jobs0 --limit 10"
    )
    bench.leaf("txn-put", "", "Put keys in txns", (*_WRITES, operations)).like("--txn-ops 10 --clients 100")
    bench.leaf("mixed", "", "Read (linearizably) and put single keys", (*_WRITES, share)).like(
        "--read-share 0.9 --clients 100"
    )


def _add_bench(root: Branch) -> None:
    purpose = "Benchmark a cluster: raftkv, etcd, or another with the etcd v3 API"
    bench = root.branch("bench", purpose, "bench.command:", (*_MEASURED, _JSON))
    puts = (_VALUE, _PUT_RATE, _KEEP)
    streams = (
        _number("streams", 10, "number of watch streams"),
        _number("watch-per-stream", 100, "number of watchers on each stream"),
        _number("watched-key-total", 1, "number of different keys that are watched, in turn"),
    )
    (idle,) = _ours(Flag("idle", BOOL, usage="put keys without watchers"))
    leases = _number("leases", 0, "number of leases in all; 0 means one for each client", least=0)
    locks = _number("locks", 1, "number of names that the clients contend for")
    latency, renewals = "Each client has a key and a watcher.", "Each client is a stream with one renewal in progress."
    events, delay = "Put keys and deliver each event to all its watchers", "Measure the time from a put to its event"
    _add_bench_writes(bench)
    bench.leaf("watch", "", events, (*puts, *streams, idle), _BENCH_WATCH).like(
        "--streams 10 --watch-per-stream 100 --total 1000"
    )
    bench.leaf("watch-latency", "", delay, puts, latency).like("--clients 10 --put-rate 500")
    bench.leaf("lease-keepalive", "", "Renew leases", (leases,), renewals).like("--clients 100 --leases 1000")
    bench.leaf("lock", "", "Acquire and release locks", (locks,), _BENCH_LOCK).like("--clients 10 --locks 2")


def _add_about(root: Branch) -> None:
    root.leaf("top", "", "Show the cluster live", _TOP_FLAGS, _TOP_DETAILS, run="ctl.top:top").like(
        "", "--once", "--by user"
    )
    root.leaf("options", "", "Describe the options that every command has", run="ctl.tree:print_options")
    add_about_commands(root)
    _add_bench(root)


def print_options(invocation: Invocation) -> None:
    """Print the options that every command has."""
    invocation.refuse_surplus()
    formatter = Page(max_width=80)
    formatter.write_text("Every command of raftkvctl takes these options, before or after its name.")
    formatter.write_text("An option that is not given is taken from its environment variable.")
    formatter.write_paragraph()
    formatter.write_dl([flag_row(flag) for flag in GLOBAL_FLAGS], col_max=26)
    formatter.write_paragraph()
    formatter.write_text("A DURATION is a number with a unit: 300ms, 1.5s, 2m. A LIST is separated by commas.")
    print(formatter.getvalue(), end="")


def make_tree() -> Branch:
    """Return the tree of all commands."""
    root = Branch(NAME, "Talk to a raftkv or etcd cluster", shared=GLOBAL_FLAGS)
    for add in (_add_kv, _add_leases, _add_coordination, _add_mirror, _add_members, _add_roll, _add_endpoints):
        add(root)
    for add in (_add_users, _add_roles, _add_maintenance, _add_quotas, _add_checks, _add_runs):
        add(root)
    purpose = "Find, keep and delete checkpoints of training runs"
    checkpoint = root.branch("checkpoint", purpose, "checkpoints:", (_JSON,))
    for add_to in (_add_finding, _add_keeping, _add_contents):
        add_to(checkpoint)
    _add_about(root)
    return root
