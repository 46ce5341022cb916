"""``python -m jepsen``: run workloads under faults, or check a stored history again."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from jepsen import held_write, ledger
from jepsen.checker import Verdict, check_history
from jepsen.db import DbError, Settings, programs
from jepsen.faults import nemesis
from jepsen.history import load
from jepsen.runner import Options, Report, run
from jepsen.workloads import WORKLOADS

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0 when every verdict is valid, 1 when one is not, 2 when nothing could be run."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.command(args))
    except (DbError, ValueError) as error:
        print(f"jepsen: {error}", file=sys.stderr)
        return 2


def duration_s(text: str) -> float:
    """Return the seconds in a duration such as ``30s`` or ``5m``."""
    for unit, seconds in _UNITS_S.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit():
            return float(number) * seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 30s, 5m, 1h")


def _run(args: argparse.Namespace) -> int:
    failed = 0
    for workload in args.workload.split(","):
        if workload not in WORKLOADS:
            raise ValueError(f"unknown workload {workload!r}: have {', '.join(WORKLOADS)}")
        for number in range(args.count):
            failed += not _run_once(_options(args, workload, args.seed + number))
    return 1 if failed else 0


def _run_once(options: Options) -> bool:
    settings = options.settings
    print(
        f"{settings.system}, {settings.size} members, {options.workload} under {options.nemesis or 'no faults'}, "
        f"seed {options.seed}",
        flush=True,
    )
    report = asyncio.run(run(options))
    _show(report.verdict)
    print("  " + ", ".join(f"{name} {value}" for name, value in report.figures.items() if value is not None))
    if not report.verdict.valid:
        print(f"  kept: {report.folder}")
    _enter(options, report)
    return report.verdict.valid


def _enter(options: Options, report: Report) -> None:
    found = sum(map(len, report.verdict.violations.values()))
    ledger.add(
        {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "kind": "process",
            "system": options.settings.system,
            "members": options.settings.size,
            **({"also": len(options.settings.others)} if options.settings.others else {}),
            "workload": options.workload,
            "nemesis": options.nemesis,
            "seeds": [options.seed],
            **report.figures,
            "verdict": "valid" if report.verdict.valid else "invalid",
            "violations": found,
        }
    )


STORM: tuple[str, ...] = (
    "--workload mixed,append --nemesis power --faults 10 --snapshot-count 50 --compact-every 150",
    "--workload mixed,register --nemesis liar --faults 4 --snapshot-count 50 --compact-every 150",
    "--workload mixed,set --nemesis rewind --faults 4",
    "--workload mixed,append --nemesis erring,power-one --faults 9 --snapshot-count 50 --compact-every 150",
    "--workload mixed,watch --nemesis stalling,power-leader --faults 6",
    "--workload lease,lock --nemesis rates --faults 6",
    "--workload mixed,lease --nemesis thin --faults 3 --election-timeout 2000 --heartbeat-interval 200 --timeout 3s",
    "--workload mixed,lock --nemesis freeze --faults 2",
    "--workload mixed,watch --nemesis rot --faults 4 --snapshot-count 50",
    "--workload mixed,lease --nemesis starve --faults 6 --compact-every 150",
)
"""The matrix of ``storm``: each line is run with every workload that it names. The very last run must fail."""
CONTROL = "--workload mixed --nemesis liars --faults 1"


def _storm(args: argparse.Namespace) -> int:
    failed = sum(main(["run", *line.split(), "--seed", str(args.seed)]) for line in STORM)
    print("the control, which must fail:")
    return 1 if failed or main(["run", *CONTROL.split(), "--seed", str(args.seed)]) != 1 else 0


def _check(args: argparse.Namespace) -> int:
    checkers = WORKLOADS[args.workload]().checkers if args.workload else {}
    verdict = check_history(load(args.history), checkers)
    _show(verdict)
    return 0 if verdict.valid else 1


def _held_write(args: argparse.Namespace) -> int:
    sound = True
    for what in held_write.CALLS:
        answer = asyncio.run(held_write.ask(args.sut, what))
        acked = "not acknowledged" if answer.acked_s is None else f"acknowledged after {answer.acked_s * 1e3:.0f} ms"
        print(f"{args.sut}, log {what} held: put {acked}, {'there' if answer.kept else 'gone'} after kill -9")
        ledger.add(
            {
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "kind": f"held-{what}",
                "system": args.sut,
                "members": 1,
                "acked": answer.acked_s is not None,
                "kept": answer.kept,
                "verdict": "valid" if answer.sound else "invalid",
            }
        )
        sound = sound and answer.sound
    return 0 if sound else 1


def _show(verdict: Verdict) -> None:
    for line in verdict.lines():
        print("  " + line)
    print("  valid" if verdict.valid else "  INVALID", flush=True)


def _options(args: argparse.Namespace, workload: str, seed: int) -> Options:
    settings = Settings(
        system=args.sut,
        size=args.members,
        heartbeat_ms=args.heartbeat_interval,
        election_ms=args.election_timeout,
        snapshot_count=args.snapshot_count,
        flags=tuple(args.flag),
        others=tuple(args.also),
    )
    nemesis.parse(args.nemesis, args.members)
    return Options(
        settings=settings,
        workload=workload,
        nemesis=args.nemesis,
        seed=seed,
        faults=args.faults,
        time_s=args.time if args.time is not None or args.faults is not None else 30.0,
        clients=args.clients,
        rate=args.rate,
        timeout_s=args.timeout,
        quiet_every=args.quiet_every,
        compact_every=args.compact_every,
        keep=args.keep,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jepsen", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run a workload under faults and check its history")
    runs.set_defaults(command=_run)
    runs.add_argument("--sut", choices=sorted(programs()), default="raftkv", help="system under test")
    runs.add_argument("--workload", default="mixed", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    runs.add_argument("--nemesis", default="kill", help="comma-separated faults; empty for none")
    runs.add_argument("--members", type=int, default=3)
    runs.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    runs.add_argument("--count", type=int, default=1, help="runs, with seeds counted up")
    runs.add_argument("--time", type=duration_s, help="load for so long (30s unless --faults is given)")
    runs.add_argument("--faults", type=int, help="stop after so many faults")
    runs.add_argument("--clients", type=int, default=10)
    runs.add_argument("--rate", type=float, default=300.0, help="operations per second, all clients")
    runs.add_argument("--timeout", type=duration_s, default=0.5, help="of one request, such as 500ms")
    runs.add_argument("--quiet-every", type=int, default=10, help="faults between quiet points")
    runs.add_argument("--compact-every", type=int, default=0, metavar="N", help="compact after each N writes")
    runs.add_argument("--heartbeat-interval", type=int, default=50, metavar="MS")
    runs.add_argument("--election-timeout", type=int, default=500, metavar="MS")
    runs.add_argument("--snapshot-count", type=int, default=1000)
    runs.add_argument("--flag", action="append", default=[], help="another flag for every member")
    runs.add_argument(
        "--also", action="append", default=[], metavar="COMMAND", help="an earlier build, which members are by turns"
    )
    runs.add_argument("--keep", action="store_true", help="keep the folder of a run that passed too")
    held = commands.add_parser("held-write", help="is a put acknowledged before the log holds it? (needs strace)")
    held.set_defaults(command=_held_write)
    held.add_argument("--sut", choices=sorted(programs()), default="raftkv", help="system under test")
    storm = commands.add_parser("storm", help="the matrix: every fault of disks, clocks and networks, and the control")
    storm.set_defaults(command=_storm)
    storm.add_argument("--seed", type=int, default=1)
    check = commands.add_parser("check", help="check a kept history again")
    check.set_defaults(command=_check)
    check.add_argument("history", type=Path)
    check.add_argument("--workload", choices=sorted(WORKLOADS), help="whose own checkers to add")
    return parser


if __name__ == "__main__":
    sys.exit(main())
