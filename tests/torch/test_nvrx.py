"""The store of nvidia-resiliency-ext's wrapper. The real thing runs in ``tests/test_examples.py``: nvrx_inprocess."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raftkv.client.local import LocalCluster
from raftkv.errors import ConfigError
from tests.foreign.environments import interpreter

BARRIERS = """
import sys
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.store import BarrierOverflow, BarrierTimeout

from raftkv.torch.nvrx import NvrxStore

with NvrxStore(sys.argv[1], "nvrx", timedelta(seconds=60)) as store:
    arguments = {"group_name": "g", "rendezvous_count": 2, "timeout": timedelta(milliseconds=100)}
    try:
        store.barrier([0], **arguments)
    except BarrierTimeout:
        print("alone: timed out")
    store.barrier([1], **arguments)
    print("together: through")
    try:
        store.barrier([2], **arguments)
    except BarrierOverflow:
        print("one too many: refused")
    store.record_terminated_ranks([0, 2])
    store.record_terminated_ranks([1])
    print(sorted(store.get_terminated_ranks()), store.critical_ranks)
"""


@pytest.mark.long
def test_the_wrappers_barriers_and_records_work_on_it(raftkv_cluster: LocalCluster) -> None:
    command = [str(interpreter("nvrx")), "-c", BARRIERS, *raftkv_cluster.endpoints]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "alone: timed out",
        "together: through",
        "one too many: refused",
        "[0, 1, 2] ()",
    ]


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    monkeypatch.delitem(sys.modules, "raftkv.torch.nvrx", raising=False)
    with pytest.raises(ConfigError, match=r"pip install nvidia-resiliency-ext==0\.4\.1"):
        __import__("raftkv.torch.nvrx")
