"""Configuration shared by all tests: long tests, rewriting of golden files, Hypothesis without wall-clock deadlines.

A slow test is marked `long`, and runs only on request:

    $ pytest                        # all unmarked tests: `make test`
    $ pytest -m long                # the others: `make test-all`
    $ pytest --all                  # both
    $ pytest FILE::TEST             # a named test runs, marked or not

An async test runs by its module's ``run_async``, or on a plain loop; async context managers that are its fixtures are
entered there.

A test that replaces a part of the hot path is marked `interpreted`, and skipped where that part is compiled (`make
native`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import raftkv.native
from tests import forked, procs
from tests.rpc import loop

# A busy machine is not a bug: examples are limited by count, never by time. They are the same in each run, so that only
# a change makes it fail; `--hypothesis-profile=explore` plays others. The parent is named because Hypothesis uses
# another one where CI is set.
settings.register_profile(
    "explore",
    settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("raftkv", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("raftkv")

forked.is_used = True

HERE = Path(__file__).resolve().parent
MARKS = {"long", "interpreted"}

# A shell lets its background processes ignore SIGINT, but tests send it to themselves and to the processes they start.
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
    """Let each of several processes start its imports at another file.

    Each process imports all files. In a fresh clone it would also compile all of them, at the same time as the others;
    now each finds most of them compiled by another process. What imports make is kept: no garbage is looked for.
    """
    told = getattr(session.config, "workerinput", None)
    if told is None:
        return
    gc.disable()
    root = session.config.rootpath
    folders = [path for word in session.config.args if (path := Path(word).absolute()).is_dir()]
    found = {path for folder in folders for path in folder.rglob("test_*.py")}
    files = sorted(path for path in found if not pytest_ignore_collect(path, session.config))
    first = len(files) * int(told["workerid"].removeprefix("gw")) // told["workercount"]
    for path in files[first:] + files[:first]:
        # pytest imports the file again, and then reports a file that fails or is skipped.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files in which no test has the marks of `-m long` or `-m "long and interpreted"`."""
    marks = str(config.getoption("markexpr")).split(" and ")
    if not set(marks) <= MARKS or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return None if all(_names(collection_path, mark) for mark in marks) else True


@functools.cache
def _names(path: Path, mark: str) -> bool:
    """Return whether a file, or a conftest.py below this one, names a mark."""
    within = [folder / "conftest.py" for folder in path.parents if HERE in folder.parents]
    texts = (file.read_text(encoding="utf-8") for file in (path, *within) if file.exists())
    return any(re.search(rf"\b(mark|tests)\.{mark}\b", text) for text in texts)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests, unless requested by `--all`, by `-m` or by name, and tests that cannot run here.

    Raises:
        pytest.UsageError: a test has a mark that neither its file nor a conftest.py names.
    """
    hidden = {
        item.path for item in items for mark in MARKS if item.get_closest_marker(mark) and not _names(item.path, mark)
    }
    if hidden:
        raise pytest.UsageError(f"`-m` passes over files that do not name the marks of their tests: {hidden}")
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
    """Add to a failure the last log lines of servers that ended unexpectedly."""
    report = yield
    if report.failed:
        report.sections += [("a server has ended", words) for words in procs.ended_members()]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on a loop."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def entered() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, contextlib._AsyncGeneratorContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await test(**arguments)

    getattr(pyfuncitem.module, "run_async", loop.run_async)(entered())
    return True


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(autouse=True)
def _no_words_left() -> Iterator[None]:
    """Remove environment variables that an agent in this process has set for its workers, before the next test."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAFTKV_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAFTKV_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


def pytest_collection_finish() -> None:
    """Freeze the objects that exist before the first test, so that garbage collections skip them."""
    gc.freeze()
    gc.enable()
