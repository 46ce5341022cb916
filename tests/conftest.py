"""What all tests share: the long set, the option that rewrites golden files, Hypothesis without wall-clock deadlines.

A test that takes long is marked `long`, and runs when it is asked for:

    $ pytest                        # all but what is marked: `make test`
    $ pytest -m long                # the rest: `make test-all`
    $ pytest --all                  # both
    $ pytest FILE::TEST             # a test that is named runs, marked or not

One that replaces a part of the hot path is marked `interpreted`, and left out where that is compiled (`make native`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import raftkv.native
from tests import forked, procs

# A busy machine is not a bug: examples are bounded by count, never by time.
# The parent is named because Hypothesis has another one where CI is set, which would play the same examples each time.
settings.register_profile("raftkv", settings.get_profile("default"), deadline=None, print_blob=True, max_examples=60)
settings.load_profile("raftkv")

forked.is_used = True

# A shell has what it starts in the background ignore SIGINT; tests send it to themselves, and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked `long`")
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what golden scenarios really print into their files; commit it only if you understand every change",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each of several processes begin its imports at another file.

    Each imports all files. In a fresh clone it would also compile all of them, at the same time as the others: now each
    finds most of them compiled by another.
    """
    told = getattr(session.config, "workerinput", None)
    if told is None:
        return
    root = session.config.rootpath
    folders = [path for word in session.config.args if (path := Path(word).absolute()).is_dir()]
    files = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
    first = len(files) * int(told["workerid"].removeprefix("gw")) // told["workercount"]
    for path in files[first:] + files[:first]:
        # A file that cannot be imported, or is to be left out, is pytest's to report, which imports it again.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, unless they are asked for by `--all`, by `-m` or by name, and what cannot run here."""
    absent = ["interpreted"] if raftkv.native.is_compiled() else []
    if not config.getoption("--all") and not config.getoption("markexpr"):
        absent.append("long")
    names = [name for argument in config.args if (name := argument.partition("::")[2])]
    left_out = [item for item in items if any(map(item.get_closest_marker, absent)) and not _is_named(item, names)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        removed = set(left_out)
        items[:] = [item for item in items if item not in removed]


def _is_named(item: pytest.Item, names: list[str]) -> bool:
    own = item.nodeid.partition("::")[2]
    return any(own == name or own.startswith((f"{name}[", f"{name}::")) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a failure tell of servers that ended without being asked to: their last words say why."""
    report = yield
    if report.failed:
        report.sections += [("a server has ended", words) for words in procs.ended_members()]
    return report


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(autouse=True)
def _no_words_left() -> Iterator[None]:
    """What an agent within this process tells its workers in the environment is not meant for the tests after it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAFTKV_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAFTKV_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: collections of garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()
