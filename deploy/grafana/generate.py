"""Writes the dashboards: ``python deploy/grafana/generate.py`` makes cluster.json and training.json beside itself.

A dashboard is rows of panels, a panel is a title, a unit and queries with legends. Everything else that Grafana wants
is the same for all and stands here once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
WIDTH: Final = 24
HEIGHT: Final = 8
MEMBER: Final = 'job="$job",instance=~"$instance"'
RUN: Final = 'run=~"$run"'
FAILED: Final = "Unknown|FailedPrecondition|ResourceExhausted|Internal|Unavailable|DataLoss|DeadlineExceeded"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: of it.
        unit: of Grafana, as ``s``, ``bytes``, ``reqps``.
        queries: expressions of PromQL, with legends.
        kind: of panel: ``timeseries`` or ``stat``.
        text: what it means, for people who point at it.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    text: str = ""


Row = tuple[str, tuple[Panel, ...]]


def _quantile(name: str, by: str = "instance", selector: str = MEMBER, share: float = 0.99) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({name}_bucket{{{selector}}}[$__rate_interval])))"


def _rate(name: str, by: str = "instance", selector: str = MEMBER) -> str:
    return f"sum by ({by}) (rate({name}{{{selector}}}[$__rate_interval]))"


def _difference(name: str, other: str) -> str:
    return f"{name}{{{MEMBER}}} - {other}{{{MEMBER}}}"


CLUSTER: Final[tuple[Row, ...]] = (
    (
        "Cluster",
        (
            Panel("Members up", "short", (('sum(up{job="$job"})', "up"),), "stat"),
            Panel("Has a leader", "short", ((f"etcd_server_has_leader{{{MEMBER}}}", "{{instance}}"),), "stat"),
            Panel("Leads", "short", ((f"etcd_server_is_leader{{{MEMBER}}}", "{{instance}}"),), "stat"),
            Panel(
                "Leader changes in a day",
                "short",
                ((f"increase(etcd_server_leader_changes_seen_total{{{MEMBER}}}[1d])", "{{instance}}"),),
                "stat",
            ),
            Panel(
                "Versions",
                "short",
                ((f"count by (server_version) (etcd_server_version{{{MEMBER}}})", "{{server_version}}"),),
                "stat",
            ),
            Panel(
                "Alarms",
                "short",
                ((f"sum(etcd_debugging_server_alarms{{{MEMBER}}}) or vector(0)", "raised"),),
                "stat",
            ),
        ),
    ),
    (
        "Calls",
        (
            Panel("Calls", "reqps", ((_rate("grpc_server_started_total", "grpc_method"), "{{grpc_method}}"),)),
            Panel(
                "Failed calls",
                "reqps",
                (
                    (
                        _rate(
                            "grpc_server_handled_total",
                            "grpc_method, grpc_code",
                            f'{MEMBER},grpc_code=~"{FAILED}"',
                        ),
                        "{{grpc_method}} {{grpc_code}}",
                    ),
                ),
            ),
            Panel(
                "Time of calls, 99 %",
                "s",
                (
                    (
                        _quantile("grpc_server_handling_seconds", "grpc_method", f'{MEMBER},grpc_type="unary"'),
                        "{{grpc_method}}",
                    ),
                ),
                text="Only with --metrics=extensive.",
            ),
            Panel(
                "Streams",
                "short",
                (
                    (f"etcd_debugging_mvcc_watch_stream_total{{{MEMBER}}}", "watch streams {{instance}}"),
                    (f"etcd_debugging_mvcc_watcher_total{{{MEMBER}}}", "watchers {{instance}}"),
                    (f"raftkv_leases{{{MEMBER}}}", "leases {{instance}}"),
                ),
            ),
            Panel(
                "Client traffic",
                "Bps",
                (
                    (_rate("etcd_network_client_grpc_received_bytes_total"), "in {{instance}}"),
                    (_rate("etcd_network_client_grpc_sent_bytes_total"), "out {{instance}}"),
                ),
            ),
            Panel(
                "Requests by version of the client",
                "reqps",
                (
                    (
                        _rate("etcd_server_client_requests_total", "client_api_version, type"),
                        "{{type}} {{client_api_version}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Raft",
        (
            Panel(
                "Proposals",
                "ops",
                (
                    (_rate("etcd_server_proposals_committed_total"), "committed {{instance}}"),
                    (_rate("etcd_server_proposals_applied_total"), "applied {{instance}}"),
                    (_rate("etcd_server_proposals_failed_total"), "failed {{instance}}"),
                ),
            ),
            Panel(
                "Committed and not applied, waiting",
                "short",
                (
                    (
                        _difference("etcd_server_proposals_committed_total", "etcd_server_proposals_applied_total"),
                        "not applied {{instance}}",
                    ),
                    (f"etcd_server_proposals_pending{{{MEMBER}}}", "pending {{instance}}"),
                ),
            ),
            Panel(
                "Applying, 99 %",
                "s",
                ((_quantile("etcd_server_apply_duration_seconds", "op"), "{{op}}"),),
            ),
            Panel(
                "Reads",
                "ops",
                (
                    (_rate("etcd_mvcc_range_total"), "ranges {{instance}}"),
                    (_rate("etcd_server_slow_read_indexes_total"), "rounds asked again {{instance}}"),
                    (_rate("etcd_server_read_indexes_failed_total"), "failed {{instance}}"),
                ),
            ),
            Panel(
                "Round trips between members, 99 %",
                "s",
                ((_quantile("etcd_network_peer_round_trip_time_seconds", "instance, To"), "{{instance}} to {{To}}"),),
            ),
            Panel(
                "Traffic between members",
                "Bps",
                (
                    (_rate("etcd_network_peer_sent_bytes_total"), "out {{instance}}"),
                    (_rate("etcd_network_peer_received_bytes_total"), "in {{instance}}"),
                ),
            ),
        ),
    ),
    (
        "Disk",
        (
            Panel("Sync of the log, 99 %", "s", ((_quantile("etcd_disk_wal_fsync_duration_seconds"), "{{instance}}"),)),
            Panel(
                "Commit of the database, 99 %",
                "s",
                ((_quantile("etcd_disk_backend_commit_duration_seconds"), "{{instance}}"),),
            ),
            Panel(
                "Database",
                "bytes",
                (
                    (f"etcd_mvcc_db_total_size_in_bytes{{{MEMBER}}}", "file {{instance}}"),
                    (f"etcd_mvcc_db_total_size_in_use_in_bytes{{{MEMBER}}}", "in use {{instance}}"),
                    (f"etcd_server_quota_backend_bytes{{{MEMBER}}}", "quota {{instance}}"),
                ),
            ),
            Panel(
                "Log",
                "Bps",
                ((f"rate(etcd_disk_wal_write_bytes_total{{{MEMBER}}}[$__rate_interval])", "{{instance}}"),),
            ),
            Panel(
                "Free disk",
                "bytes",
                (
                    (f"raftkv_disk_free_bytes{{{MEMBER}}}", "free {{instance}}"),
                    (f"raftkv_disk_reserve_bytes{{{MEMBER}}}", "reserve {{instance}}"),
                ),
            ),
            Panel(
                "Keys and revisions",
                "short",
                (
                    (f"etcd_debugging_mvcc_keys_total{{{MEMBER}}}", "keys {{instance}}"),
                    (
                        _difference("etcd_debugging_mvcc_current_revision", "etcd_debugging_mvcc_compact_revision"),
                        "revisions kept {{instance}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Process",
        (
            Panel(
                "Turns of the loop",
                "s",
                (
                    (_quantile("raftkv_loop_turn_seconds"), "99 % {{instance}}"),
                    (f"raftkv_loop_turn_longest_seconds{{{MEMBER}}}", "longest {{instance}}"),
                    (f"raftkv_loop_turn_longest_own_seconds{{{MEMBER}}}", "longest, own work {{instance}}"),
                ),
                text="While a turn lasts the member answers no request. None should be above 50 ms.",
            ),
            Panel(
                "Busy share of the loop",
                "percentunit",
                ((f"rate(raftkv_loop_turn_seconds_sum{{{MEMBER}}}[$__rate_interval])", "{{instance}}"),),
            ),
            Panel(
                "Budgets",
                "percentunit",
                (
                    (
                        f"raftkv_budget_used_bytes{{{MEMBER}}} / raftkv_budget_limit_bytes{{{MEMBER}}}",
                        "{{budget}} {{instance}}",
                    ),
                ),
            ),
            Panel(
                "Connections",
                "short",
                ((f"raftkv_connections{{{MEMBER}}}", "{{port}} {{instance}}"),),
            ),
            Panel("Memory", "bytes", ((f"process_resident_memory_bytes{{{MEMBER}}}", "{{instance}}"),)),
            Panel("Processor", "percentunit", ((_rate("process_cpu_seconds_total"), "{{instance}}"),)),
            Panel(
                "File descriptors",
                "short",
                (
                    (f"process_open_fds{{{MEMBER}}}", "open {{instance}}"),
                    (f"process_max_fds{{{MEMBER}}}", "limit {{instance}}"),
                ),
            ),
            Panel(
                "Watchers behind",
                "short",
                (
                    (f"raftkv_watch_lag_revisions{{{MEMBER}}}", "revisions {{instance}}"),
                    (f"etcd_debugging_mvcc_slow_watcher_total{{{MEMBER}}}", "watchers {{instance}}"),
                ),
            ),
            Panel(
                "Logins and refusals",
                "ops",
                (
                    (_rate("raftkv_auth_logins_total", "result"), "login {{result}}"),
                    (_rate("raftkv_auth_refused_calls_total", "code"), "{{code}}"),
                ),
            ),
        ),
    ),
)

TRAINING: Final[tuple[Row, ...]] = (
    (
        "Runs",
        (
            Panel("Runs", "short", (("raftkv_runs", "known"),), "stat"),
            Panel(
                "Without a world",
                "short",
                (("count(raftkv_run_without_world_seconds > 0) or vector(0)", "runs"),),
                "stat",
            ),
            Panel("Waiting for slots", "short", (("count(raftkv_run_queue_place) or vector(0)", "runs"),), "stat"),
            Panel("Workers", "short", (("sum(raftkv_run_world_size)", "workers"),), "stat"),
            Panel("World size", "short", ((f"raftkv_run_world_size{{{RUN}}}", "{{run}}"),)),
            Panel(
                "Nodes",
                "short",
                (
                    (f"raftkv_run_nodes{{{RUN}}}", "there {{run}}"),
                    (f"raftkv_run_waiting_nodes{{{RUN}}}", "waiting {{run}}"),
                    (f"raftkv_run_max_nodes{{{RUN}}}", "maximum {{run}}"),
                ),
            ),
            Panel("Generation", "short", ((f"raftkv_run_generation{{{RUN}}}", "{{run}}"),)),
            Panel("Phase", "short", ((f"raftkv_run_phase{{{RUN}}} == 1", "{{run}} {{phase}}"),)),
        ),
    ),
    (
        "Faults",
        (
            Panel("Without a world since", "s", ((f"raftkv_run_without_world_seconds{{{RUN}}}", "{{run}}"),)),
            Panel(
                "Time lost in an hour",
                "s",
                ((f"increase(raftkv_run_lost_seconds_total{{{RUN}}}[1h])", "{{run}}"),),
            ),
            Panel(
                "Faults in an hour",
                "short",
                ((f"sum by (run, cause) (increase(raftkv_run_faults_total{{{RUN}}}[1h]))", "{{run}} {{cause}}"),),
            ),
            Panel("Hosts left out", "short", ((f"raftkv_run_denied_hosts{{{RUN}}}", "{{run}}"),)),
        ),
    ),
    (
        "Queue",
        (
            Panel(
                "Slots",
                "short",
                (
                    ("raftkv_run_cluster_slots", "all {{cluster}}"),
                    ("raftkv_run_cluster_free_slots", "free {{cluster}}"),
                ),
            ),
            Panel(
                "Runs",
                "short",
                (
                    ("raftkv_run_cluster_admitted", "have slots {{cluster}}"),
                    ("raftkv_run_cluster_queued", "wait {{cluster}}"),
                ),
            ),
            Panel("Places", "short", ((f"raftkv_run_queue_place{{{RUN}}}", "{{run}}"),)),
        ),
    ),
    (
        "Checkpoints",
        (
            Panel("Age of the newest", "s", ((f"raftkv_checkpoint_age_seconds{{{RUN}}}", "{{run}} {{kind}}"),)),
            Panel("Step of the newest", "short", ((f"raftkv_checkpoint_last_step{{{RUN}}}", "{{run}} {{kind}}"),)),
            Panel(
                "Bytes",
                "bytes",
                (
                    (f"raftkv_checkpoint_last_size_bytes{{{RUN}}}", "newest {{run}} {{kind}}"),
                    (f"raftkv_checkpoint_size_bytes{{{RUN}}}", "all {{run}} {{kind}}"),
                ),
            ),
            Panel(
                "Time of a commit",
                "s",
                (
                    (
                        f"rate(raftkv_checkpoint_commit_seconds_sum{{{RUN}}}[1h])"
                        f" / rate(raftkv_checkpoint_commit_seconds_count{{{RUN}}}[1h])",
                        "{{run}} {{kind}}",
                    ),
                ),
            ),
            Panel(
                "Attempts",
                "short",
                (
                    (f"raftkv_checkpoint_attempts{{{RUN}}}", "under way {{run}} {{kind}}"),
                    (f"increase(raftkv_checkpoint_attempts_aborted_total{{{RUN}}}[1h])", "given up {{run}} {{kind}}"),
                ),
            ),
            Panel("Checkpoints", "short", ((f"raftkv_checkpoint_committed{{{RUN}}}", "{{run}} {{kind}}"),)),
        ),
    ),
)


def _variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": query,
        "refresh": 2,
        "sort": 1,
        "includeAll": name != "job",
        "multi": name != "job",
        "allValue": ".*",
    }


def _panel(number: int, panel: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT if panel.kind == "timeseries" else HEIGHT // 2},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"showLegend": True}, "tooltip": {"mode": "multi"}} if panel.kind == "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _laid_out(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows:
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        x, y, height = 0, y + 1, 0
        for panel in panels:
            width = 4 if panel.kind == "stat" else 8
            if x + width > WIDTH or (height and panel.kind == "timeseries" and height < HEIGHT):
                x, y, height = 0, y + height, 0
            found.append(_panel(len(found) + 1, panel, x, y, width))
            height = max(height, found[-1]["gridPos"]["h"])
            x += width
        y += height
    return found


def dashboard(title: str, uid: str, rows: tuple[Row, ...], variables: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a dashboard as Grafana imports it.

    Arguments:
        title, uid: of it.
        rows: of panels.
        variables: beside the data source.
    """
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}
    return {
        "title": title,
        "uid": uid,
        "tags": ["raftkv"],
        "editable": True,
        "schemaVersion": 38,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": _laid_out(rows),
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """Make all dashboards, by the names of their files."""
    members = [
        _variable("job", "label_values(etcd_server_has_leader, job)", "Cluster"),
        _variable("instance", 'label_values(etcd_server_has_leader{job="$job"}, instance)', "Member"),
    ]
    runs = [_variable("run", "label_values(raftkv_run_generation, run)", "Run")]
    return {
        "cluster.json": dashboard("raftkv: cluster", "raftkv-cluster", CLUSTER, members),
        "training.json": dashboard("raftkv: training", "raftkv-training", TRAINING, runs),
    }


def written(content: dict[str, Any]) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    for name, content in dashboards().items():
        (HERE / name).write_text(written(content), encoding="utf-8")
