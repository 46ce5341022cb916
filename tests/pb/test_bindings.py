"""The paths of HTTP are etcd's, and each has its method."""

from __future__ import annotations

from raftkv.pb.bindings import BINDINGS
from raftkv.pb.services import SERVICES

LEFT_OUT = {"/etcdserverpb.KV/RangeStream"}
"""etcd has no path for it either."""


def test_every_method_of_etcd_has_a_path() -> None:
    services = [name for name in SERVICES if name.startswith(("etcdserverpb.", "v3lockpb.", "v3electionpb."))]
    methods = {method.path for name in services for method in SERVICES[name].values()}
    assert {method.path for method in BINDINGS.values()} == methods - LEFT_OUT
    assert len(BINDINGS) == 51
    assert all(path.startswith("/v3/") for path in BINDINGS)


def test_older_paths_of_leases_are_kept() -> None:
    for name in ("revoke", "timetolive", "leases"):
        assert BINDINGS[f"/v3/kv/lease/{name}"] is BINDINGS[f"/v3/lease/{name}"]
