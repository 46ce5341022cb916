"""The package's names are imported when used: a client does not load the server."""

from __future__ import annotations

import subprocess
import sys

import pytest

import raftkv.rpc
from tests.procs import ROOT


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(name for name in sys.modules if name.startswith('raftkv.rpc')))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_a_client_does_not_load_the_server() -> None:
    modules = _modules_after("from raftkv.rpc import Channel")
    assert "raftkv.rpc.client.channel" in modules
    assert not {"raftkv.rpc.server.server", "raftkv.rpc.server.core", "raftkv.rpc.server.accept"} & modules


def test_the_package_alone_loads_nothing() -> None:
    assert _modules_after("import raftkv.rpc") == {"raftkv.rpc"}


@pytest.mark.parametrize("name", raftkv.rpc.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(raftkv.rpc, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = raftkv.rpc.nothing
