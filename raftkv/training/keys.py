"""The layout of a run's keys.

::

    /raftkv/train/<run id>/arbiter                 leased; id of the node that decides
    /raftkv/train/<run id>/boot/<generation>       what rank 0 publishes for the generation
    /raftkv/train/<run id>/fault/<generation>/..   faults as they were reported
    /raftkv/train/<run id>/node/<node id>          leased; one for each node that is there
    /raftkv/train/<run id>/round                   the present generation and its members; written when one begins
    /raftkv/train/<run id>/state                   what is going on in it
    /raftkv/train/<run id>/store/<generation>/..   a torch.distributed.Store
    /raftkv/train/<run id>/sync/<generation>/..    barriers, counters, values of user code

The order of the names matters: every node watches the two intervals ``calls`` and ``record`` only, for any size of
the run; the arbiter alone watches ``node/`` and ``fault/``. ``round`` and ``state`` outlive a run, so that the
generations of an id never go back; all else is deleted with it, and the members of a large generation too.
"""

from __future__ import annotations

import re
from typing import Final

from raftkv.errors import ConfigError

ROOT: Final = "/raftkv/train/"
CLUSTER_ROOT: Final = "/raftkv/train-cluster/"
STORE_ROOT: Final = "/raftkv/store/"
"""Prefix of the stores of torch that are no generation's."""
RUN_ID_MAX: Final = 200
PARTS: Final = frozenset(
    ("arbiter", "boot", "deny", "elect", "fault", "node", "round", "state", "store", "strike", "sync")
)
"""Names below a run; no part of a run id may be one, or a run would lie inside another."""
_PART: Final = r"(?!\.\.?(?:/|\Z))[^\x00-\x20/\\\x7f\ud800-\udfff]+"
_RUN_ID: Final = re.compile(f"{_PART}(/{_PART})*")
"""What raftkv.checkpoint takes too, or a run would begin and have no registry. Half of a surrogate pair is what Python
makes of an argument that is no UTF-8."""


def check_run_id(run_id: str) -> str:
    """Return a run id if it can be used.

    Raises:
        ConfigError: it is empty, too long, or has white space, backslashes, parts that are empty, ``.`` or ``..``, or a
            name that the layout uses itself.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"a run id is a text, not {run_id!r}")
    if not run_id:
        raise ConfigError("the run id is empty; name the job, as with --rdzv-id=JOB")
    if not _RUN_ID.fullmatch(run_id) or len(run_id.encode()) > RUN_ID_MAX or PARTS & set(run_id.split("/")):
        raise ConfigError(
            f"run id {run_id!r} cannot be used: at most {RUN_ID_MAX} bytes of Unicode text, without white space and "
            f"backslashes, with slashes only between names, none of them '.', '..', {', '.join(sorted(PARTS))}"
        )
    return run_id


def check_cluster(cluster: str) -> str:
    """Return the name of a cluster if it can be used.

    Raises:
        ConfigError: it is empty, too long, or has slashes or white space.
    """
    usable = cluster and cluster.isprintable() and not set(cluster) & {"/", " "} and len(cluster.encode()) <= RUN_ID_MAX
    if not usable:
        raise ConfigError(
            f"cluster {cluster!r} cannot be used: 1 to {RUN_ID_MAX} bytes, without slashes and white space"
        )
    return cluster


class RunKeys:
    """The keys of one run.

    Attributes:
        base: before everything of the run.
        arbiter: the node that decides.
        round: the present generation; its mod_revision is the fence.
        state: the phase of the run.
        nodes: prefix of the nodes that are there.
        calls: the interval of ``arbiter`` and ``boot/``.
        record: the interval of ``round`` and ``state``, and nothing else.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.base = f"{ROOT}{run_id}/"
        self.arbiter = f"{self.base}arbiter"
        self.round = f"{self.base}round"
        self.state = f"{self.base}state"
        self.nodes = f"{self.base}node/"
        self.calls = (self.arbiter, f"{self.base}boot0")
        self.record = (self.round, f"{self.state}\0")

    def node(self, node_id: str) -> str:
        """Return the key of one node."""
        return f"{self.nodes}{node_id}"

    def boot(self, generation: int) -> str:
        """Return the key of what rank 0 of a generation publishes."""
        return f"{self.base}boot/{generation}"

    def faults(self, generation: int) -> str:
        """Prefix of the faults of a generation."""
        return f"{self.base}fault/{generation}/"

    def store(self, generation: int) -> str:
        """Prefix of the torch store of a generation."""
        return f"{self.base}store/{generation}/"

    def sync(self, generation: int) -> str:
        """Prefix of what user code shares in a generation."""
        return f"{self.base}sync/{generation}/"

    def exits(self, generation: int) -> str:
        """Prefix of the nodes of a generation whose work has ended well, each by its place in the generation."""
        return f"{self.sync(generation)}exit/"
