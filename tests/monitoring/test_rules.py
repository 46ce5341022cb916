"""The alerts in deploy/prometheus: each fires on figures that it is about, alone, and says what to do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import installed
from tests.procs import ROOT

RULES = ROOT / "deploy" / "prometheus"
PAGE = ROOT / "docs" / "guides" / "monitoring.md"

Series = Mapping[str, str]
DAY_S = 86_400
MIB = 1 << 20


def _of(name: str, labels: str = "", instance: str = "a") -> str:
    return f'{name}{{job="raftkv",instance="{instance}"{"," if labels else ""}{labels}}}'


def _run(name: str, labels: str = "") -> str:
    return f'raftkv_{name}{{run="job"{"," if labels else ""}{labels}}}'


def _slow(name: str, fast_le: str, labels: str = "", slow_le: str = "+Inf") -> dict[str, str]:
    """A histogram in which everything takes longer than a bound, and nothing longer than another."""
    label = f"{labels}," if labels else ""
    return {
        _of(f"{name}_bucket", f'{label}le="{fast_le}"'): "0x60",
        _of(f"{name}_bucket", f'{label}le="{slow_le}"'): "0+100x60",
        _of(f"{name}_bucket", f'{label}le="+Inf"'): "0+100x60",
    }


CALL = 'grpc_service="etcdserverpb.KV",grpc_method="Put",grpc_type="unary"'

CASES: dict[str, tuple[Series, set[str]]] = {
    "etcdMembersDown": (
        {_of("up", instance="a"): "1x60", _of("up", instance="b"): "1x60", _of("up", instance="c"): "0x60"},
        {"warning"},
    ),
    "etcdInsufficientMembers": (
        {_of("up", instance="a"): "1x60", _of("up", instance="b"): "0x60", _of("up", instance="c"): "0x60"},
        {"critical"},
    ),
    "etcdNoLeader": ({_of("etcd_server_has_leader"): "0x60"}, {"critical"}),
    "etcdHighNumberOfLeaderChanges": ({_of("etcd_server_leader_changes_seen_total"): "0+1x60"}, {"warning"}),
    "etcdHighNumberOfFailedGRPCRequests": (
        {
            _of("grpc_server_handled_total", f'{CALL},grpc_code="OK"'): "0+90x60",
            _of("grpc_server_handled_total", f'{CALL},grpc_code="Unavailable"'): "0+10x60",
        },
        {"warning", "critical"},
    ),
    "etcdGRPCRequestsSlow": (_slow("grpc_server_handling_seconds", "0.25", CALL, "0.5"), {"critical"}),
    "etcdMemberCommunicationSlow": (
        _slow("etcd_network_peer_round_trip_time_seconds", "0.2048", 'To="b"', "0.4096"),
        {"warning"},
    ),
    "etcdHighNumberOfFailedProposals": ({_of("etcd_server_proposals_failed_total"): "0+1x60"}, {"warning"}),
    "etcdHighFsyncDurations": (
        _slow("etcd_disk_wal_fsync_duration_seconds", "0.512", slow_le="1.024"),
        {"warning", "critical"},
    ),
    "etcdHighCommitDurations": (
        _slow("etcd_disk_backend_commit_duration_seconds", "0.256", slow_le="0.512"),
        {"warning"},
    ),
    "etcdDatabaseQuotaLowSpace": (
        {
            _of("etcd_mvcc_db_total_size_in_use_in_bytes"): f"{96 * MIB}x60",
            _of("etcd_server_quota_backend_bytes"): f"{100 * MIB}x60",
        },
        {"critical"},
    ),
    "etcdExcessiveDatabaseGrowth": (
        {
            _of("etcd_mvcc_db_total_size_in_use_in_bytes"): f"0+{MIB}x60",
            _of("etcd_server_quota_backend_bytes"): f"{200 * MIB}x60",
        },
        {"warning"},
    ),
    "etcdDatabaseHighFragmentationRatio": (
        {
            _of("etcd_mvcc_db_total_size_in_use_in_bytes"): f"{200 * MIB}x60",
            _of("etcd_mvcc_db_total_size_in_bytes"): f"{500 * MIB}x60",
        },
        {"warning"},
    ),
    "raftkvLoopTurnsLong": (_slow("raftkv_loop_turn_seconds", "0.05", slow_le="0.1"), {"warning"}),
    "raftkvBudgetNearLimit": (
        {
            _of("raftkv_budget_used_bytes", 'budget="responses"'): f"{9 * MIB}x60",
            _of("raftkv_budget_limit_bytes", 'budget="responses"'): f"{10 * MIB}x60",
        },
        {"warning"},
    ),
    "raftkvConnectionsNearLimit": (
        {
            _of("raftkv_connections", 'port="client"'): "950x60",
            _of("raftkv_connections_limit", 'port="client"'): "1000x60",
        },
        {"warning"},
    ),
    "raftkvConnectionsEnded": ({_of("raftkv_connections_ended_total"): "0x54 1x5"}, {"warning"}),
    "raftkvDiskNearReserve": (
        {_of("raftkv_disk_free_bytes"): f"{200 * MIB}x60", _of("raftkv_disk_reserve_bytes"): f"{80 * MIB}x60"},
        {"critical"},
    ),
    "raftkvPrefixQuotaNearLimit": (
        {
            _of("raftkv_prefix_quota_used_bytes", 'prefix="/a"'): "95x60",
            _of("raftkv_prefix_quota_limit_bytes", 'prefix="/a"'): "100x60",
        },
        {"warning"},
    ),
    "raftkvAlarmRaised": (
        {_of("etcd_debugging_server_alarms", 'server_id="1",alarm_type="NOSPACE"'): "1x60"},
        {"critical"},
    ),
    "raftkvMembersDiffer": (
        {_of("raftkv_corruption_checks_total", 'kind="running",result="different"'): "0x50 1x10"},
        {"critical"},
    ),
    "raftkvDatabaseDamaged": ({_of("raftkv_database_damaged"): "1x60"}, {"critical"}),
    "raftkvCertificateExpires": (
        {_of("raftkv_certificate_expires_seconds", 'port="client",use="own"'): f"{2 * DAY_S}x90"},
        {"warning", "critical"},
    ),
    "raftkvWatchersBehind": ({_of("raftkv_watch_lag_revisions"): "200000x60"}, {"warning"}),
    "raftkvLoginsRefused": ({_of("raftkv_auth_logins_total", 'result="refused"'): "0+120x60"}, {"warning"}),
    "raftkvAuditIncomplete": ({_of("raftkv_audit_dropped_lines_total"): "0+1x60"}, {"critical"}),
    "raftkvArchiveBehind": ({_of("raftkv_wal_archive_waiting"): "5x60"}, {"critical"}),
    "raftkvRunExporterDown": ({'up{job="raftkv-runs",instance="a"}': "0x60"}, {"warning"}),
    "raftkvRunWithoutWorld": ({_run("run_without_world_seconds"): "0x20 301+60x40"}, {"critical"}),
    "raftkvRunBelowMaximum": ({_run("run_members"): "2x90", _run("run_max_nodes"): "4x90"}, {"info"}),
    "raftkvRunFaults": (
        {_run("run_faults_total", 'cause="signal"'): "0+0.2x60", _run("run_faults_total", 'cause="exit"'): "0+0.2x60"},
        {"warning"},
    ),
    "raftkvRunQueued": ({_run("run_queue_place", 'cluster="gpu"'): "2x90"}, {"info"}),
    "raftkvCheckpointTooOld": (
        {_run("checkpoint_age_seconds", 'kind="files"'): "3000+60x60", _run("run_world_size"): "8x60"},
        {"warning"},
    ),
    "raftkvCheckpointAttemptsAborted": (
        {_run("checkpoint_attempts_aborted_total", 'kind="files"'): "0+0.1x60"},
        {"warning"},
    ),
}

ALSO = {"etcdInsufficientMembers": {"etcdMembersDown": {"warning"}}}
"""Alerts that fire with others, because they are about more of the same."""

QUIET: Series = {
    **{_of("up", instance=name): "1x90" for name in "abc"},
    _of("etcd_server_has_leader"): "1x90",
    _of("etcd_server_leader_changes_seen_total"): "3x90",
    _of("etcd_mvcc_db_total_size_in_use_in_bytes"): f"{2 * MIB}x90",
    _of("etcd_mvcc_db_total_size_in_bytes"): f"{90 * MIB}x90",
    _of("etcd_server_quota_backend_bytes"): f"{2048 * MIB}x90",
    _of("raftkv_corruption_checks_total", 'kind="running",result="different"'): "0x90",
    _of("raftkv_certificate_expires_seconds", 'port="client",use="own"'): f"{300 * DAY_S}x90",
    _run("run_without_world_seconds"): "12x90",
    _run("checkpoint_age_seconds", 'kind="files"'): "4000x90",
    _run("run_world_size"): "0x90",
}


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _promtool(*arguments: str) -> str:
    done = subprocess.run([installed.program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _test(series: Series, firing: dict[str, set[str]], at: str = "59m") -> dict[str, Any]:
    samples = [
        {"labels": f'{{alertname="{name}",severity="{severity}"}}', "value": 1}
        for name, severities in firing.items()
        for severity in severities
    ]
    expression = 'max by (alertname, severity) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": samples}],
    }


def _play(tmp_path: Path, *tests: dict[str, Any]) -> None:
    path = tmp_path / "tests.yaml"
    files = [str(RULES / name) for name in ("rules.yaml", "alerts.yaml")]
    path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "4m", "tests": list(tests)}))
    _promtool("test", "rules", str(path))


def test_rules_are_well_formed() -> None:
    _promtool("check", "rules", str(RULES / "alerts.yaml"), str(RULES / "rules.yaml"))
    _promtool("check", "config", "--syntax-only", str(RULES / "prometheus.yaml"))


@pytest.mark.long
def test_each_alert_fires_and_no_other(tmp_path: Path) -> None:
    assert CASES.keys() == {rule["alert"] for rule in rules()}
    late = {"raftkvCertificateExpires", "raftkvRunBelowMaximum", "raftkvRunQueued"}
    _play(
        tmp_path,
        *(
            _test(series, {name: severities} | ALSO.get(name, {}), "80m" if name in late else "59m")
            for name, (series, severities) in CASES.items()
        ),
    )


@pytest.mark.long
def test_nothing_fires_for_a_cluster_that_is_well(tmp_path: Path) -> None:
    _play(tmp_path, _test(QUIET, {}, "80m"))


def test_texts_name_what_is_wrong(tmp_path: Path) -> None:
    series, _ = CASES["raftkvBudgetNearLimit"]
    alert = {
        "eval_time": "59m",
        "alertname": "raftkvBudgetNearLimit",
        "exp_alerts": [
            {
                "exp_labels": {"severity": "warning", "job": "raftkv", "instance": "a", "budget": "responses"},
                "exp_annotations": {
                    "summary": "A budget of memory is nearly used.",
                    "description": "The budget responses of a is used to 90%: at its limit calls fail and connections "
                    "are ended.",
                    "runbook_url": "docs/guides/monitoring.md#raftkvbudgetnearlimit",
                },
            }
        ],
    }
    _play(tmp_path, {**_test(series, {}), "promql_expr_test": [], "alert_rule_test": [alert]})


def test_alerts_say_what_to_do() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for notes in (rule["annotations"] for rule in rules()):
        assert notes.keys() == {"summary", "description", "runbook_url"}
        assert notes["summary"].endswith(".")
        assert notes["description"].endswith(".")
        path, _, anchor = notes["runbook_url"].partition("#")
        assert ROOT / path == PAGE
        assert anchor in {heading.lower() for heading in headings}
