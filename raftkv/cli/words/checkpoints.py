"""The words of ``checkpoint``: commands, flags, help and examples; what they do is in ``cli.checkpoints``."""

from __future__ import annotations

from dataclasses import replace

from raftkv.checkpoint.kinds import KINDS
from raftkv.cli.goflags.command import Leaf, MakeLeaf
from raftkv.cli.goflags.pflag import BOOL, DURATION, INT, LIST, Flag

_KIND = Flag("kind", usage="only checkpoints of this kind; without it of all", choices=tuple(KINDS))
_JSON = Flag("json", BOOL, usage="print JSON")
_URI = Flag("uri", BOOL, usage="print only where the checkpoint lies, for scripts")

_WHICH = """WHICH is latest (without it), a step, tag:NAME, or the best by a metric: min:METRIC or max:METRIC."""
_WATCH = """Each commit is printed once, in the order of commits; those that were deleted meanwhile are left out if the
history is compacted. It goes on through outages and at another member when its own is lost. At the end, it prints the
revision to go on from; with --json each commit is an object on a line of its own, and has it as next_revision."""


def _ours(*flags: Flag) -> tuple[Flag, ...]:
    return tuple(replace(flag, ours=True) for flag in flags)


def finding_commands(leaf: MakeLeaf) -> list[Leaf]:
    """Make the commands that only read the registry.

    Arguments:
        leaf: makes a command that only lacks its examples.
    """
    both = _ours(_KIND, _JSON)
    limit = _ours(Flag("limit", INT, usage="of each kind only so many, the newest first; 0 means all"))
    files = _ours(Flag("files", BOOL, usage="also print the files, with sizes and digests"))
    best_flags = _ours(
        Flag("mode", default="min", usage="which values are better", choices=("min", "max")),
        Flag("count", INT, 1, "how many"),
        Flag("all-runs", BOOL, usage="of all runs, at most one of each run and kind; give METRIC alone"),
    )
    watch_flags = _ours(
        Flag("from-revision", INT, usage="begin with the commits of this revision; 1 means all, 0 from now on"),
        Flag("count", INT, usage="end after so many commits; 0 means never"),
    )
    at = "checkpoints.finding"
    return [
        leaf("runs", f"{at}:runs", "", "List the runs that have checkpoints, with their latest", _ours(_JSON))(
            "checkpoint runs"
        ),
        leaf("list", f"{at}:list_all", "RUN", "List the checkpoints of a run by kind and step", (*both, *limit))(
            "checkpoint list bert", "checkpoint list bert --kind dcp --limit 10"
        ),
        leaf("show", f"{at}:show", "RUN [WHICH]", "Describe one checkpoint", (*both, *files), _WHICH)(
            "checkpoint show bert", "checkpoint show bert 1000 --files", "checkpoint show bert min:loss --json"
        ),
        leaf("latest", f"{at}:latest", "RUN", "Print the newest checkpoint of a run", (*both, *_ours(_URI)))(
            "checkpoint latest bert", "checkpoint latest bert --uri"
        ),
        leaf("best", f"{at}:best", "RUN METRIC", "Print the best by a metric", (*both, *best_flags, *_ours(_URI)))(
            "checkpoint best bert loss", "checkpoint best accuracy --mode max --all-runs --count 3"
        ),
        leaf("lineage", f"{at}:lineage", "RUN [WHICH]", "Print what a checkpoint descends from", both, _WHICH)(
            "checkpoint lineage bert-tuned"
        ),
        leaf(
            "watch",
            "checkpoints.watching:watch",
            "RUN",
            "Print commits as they happen, each once",
            (*both, *watch_flags, *_ours(_URI)),
            _WATCH,
        )("checkpoint watch bert", "checkpoint watch bert --from-revision 4711 --json"),
    ]


_VERIFY = """Every file is read and its digest compared with the one that its rank prepared; the store vouches for the
list of files. Exit code 1 names each file that is missing, has another size, or other contents."""

_EXPORT = f"""{_WHICH} DIRECTORY is a path or a URL; it gets the files, their list, and the record, which is written
last. The checkpoint is pinned meanwhile, and every digest is checked. Run it again after an interruption."""
_IMPORT = """DIRECTORY is an export, or has checkpoints of the HF Trainer, Lightning, DCP, DeepSpeed, Megatron, Orbax,
TensorFlow, or safetensors. What is whole is copied and committed, the lowest step first; what is not is refused with a
reason, and the exit code is 1. What the run has already is skipped. It claims the run: a job that trains on is
refused its next checkpoint."""
_COPY = f"""{_WHICH} The original stays as long as the copy does. It claims INTO-RUN, as every writer does."""


def contents_commands(leaf: MakeLeaf) -> list[Leaf]:
    """Make the commands that read or write the bytes of checkpoints.

    Arguments:
        leaf: makes a command that only lacks its examples.
    """
    both = _ours(_KIND, _JSON)
    every = _ours(Flag("all", BOOL, usage="verify all checkpoints of the run"))
    place, step, dry_run = _ours(
        Flag("place", usage="directory or URL below which the run's checkpoints lie; without it beside its latest"),
        Flag("step", INT, usage="instead of the step that it has"),
        Flag("dry-run", BOOL, usage="only print what is there, and what of it is whole"),
    )
    return [
        leaf(
            "verify",
            "checkpoints.contents:verify",
            "RUN [WHICH]",
            "Compare the files of a checkpoint with what was committed",
            (*both, *every),
            f"{_WHICH} {_VERIFY}",
        )("checkpoint verify bert", "checkpoint verify bert --all --json"),
        leaf(
            "export",
            "checkpoints.moving:export",
            "RUN WHICH DIRECTORY",
            "Copy a checkpoint out, with what the store knows of it",
            both,
            _EXPORT,
        )("checkpoint export bert latest s3://archive/bert", "checkpoint export bert tag:release /mnt/usb/bert"),
        leaf(
            "import",
            "checkpoints.moving:take_in",
            "RUN DIRECTORY",
            "Copy checkpoints in: an export, or what other tools have saved",
            (*both, place, step, dry_run),
            _IMPORT,
        )("checkpoint import bert /mnt/usb/bert", "checkpoint import old-job /shared/output --dry-run"),
        leaf(
            "copy",
            "checkpoints.moving:copy",
            "RUN WHICH INTO-RUN",
            "Copy a checkpoint into another run, which descends from it",
            (*both, place, step),
            _COPY,
        )("checkpoint copy bert tag:release tuned --place /shared/tuned"),
    ]


_PIN = """Nothing deletes a pinned checkpoint. A program that reads one pins it by itself (Registry.pin); this is for
people, and for programs that cannot."""
_GC = """The latest of each kind stays, and so does what has a tag, a pin or a child in another run, whatever the rules
say. --keep-... protect: what none of them names goes at once, unless there is a limit (--max-...): then it stays until
the limit is passed. Without any rule only what dead attempts have left is deleted. A gc may be interrupted at any
point and run by several at once."""


def keeping_commands(leaf: MakeLeaf) -> list[Leaf]:
    """Make the commands that say how long checkpoints stay.

    Arguments:
        leaf: makes a command that only lacks its examples.
    """
    at = "checkpoints.keeping"
    both = _ours(_KIND, _JSON)
    (reader,) = _ours(Flag("reader", usage="name of who reads it; without it USER-HOST"))
    (duration,) = _ours(Flag("for", DURATION, usage="how long, as 90m or 24h; 0 means until unpin"))
    return [
        leaf("pin", f"{at}:pin", "RUN [WHICH]", "Keep a checkpoint", (*both, reader, duration), f"{_WHICH} {_PIN}")(
            "checkpoint pin bert 1000 --for 24h", "checkpoint pin bert min:loss --reader paper"
        ),
        leaf("unpin", f"{at}:unpin", "RUN [WHICH]", "Take a reader's pins away", (*both, reader), _WHICH)(
            "checkpoint unpin bert 1000"
        ),
        leaf("tag", f"{at}:tag", "RUN NAME [WHICH]", "Put a tag on a checkpoint, or move it there", both, _WHICH)(
            "checkpoint tag bert release", "checkpoint tag bert release 1000"
        ),
        leaf("untag", f"{at}:untag", "RUN NAME", "Take a tag away", _ours(_JSON))("checkpoint untag bert release"),
        leaf("gc", f"{at}:collect", "RUN", "Delete what no rule keeps", (*_ours(_JSON), *_GC_FLAGS), _GC)(
            "checkpoint gc bert --keep-last 3 --keep-every 1000 --dry-run",
            "checkpoint gc bert --place /shared --max-bytes 2TiB",
        ),
    ]


_GC_FLAGS = _ours(
    Flag("dry-run", BOOL, usage="change nothing: print what would go, and why"),
    Flag("keep-last", INT, usage="the newest so many of each kind stay"),
    Flag("keep-every", INT, usage="the first of every so many steps stays"),
    Flag("keep-best", LIST, usage="the best stay: METRIC, METRIC:MODE or METRIC:MODE:COUNT; min and 1 without them"),
    Flag("keep-for", DURATION, usage="those that are younger stay"),
    Flag("max-age", DURATION, usage="those that are older go, as 720h"),
    Flag("max-bytes", usage="the oldest go until the rest fits: 500GiB, 2TB"),
    Flag("place", usage="where the run's checkpoints lie: files are deleted below it and nowhere else"),
)
