"""Metrics of the other members: bytes, failures, round trips."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from raftkv.histograms import counter, gauge, histogram_family
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport


def peer_metrics(member_id: int, transport: Transport, service: PeerService) -> Iterator[Metric]:
    """Yield the metrics of messages between members.

    Arguments:
        member_id: id of this member.
        transport: outgoing messages.
        service: incoming messages.
    """
    peers = {f"{peer_id:x}": peer for peer_id, peer in sorted(transport.peers.items())}
    pairs = {(f"{member_id:x}", name): peer for name, peer in peers.items()}
    sent = {(name,): peer.sent_bytes for name, peer in peers.items()}
    yield counter("etcd_network_peer_sent_bytes_total", "The total number of bytes sent to peers.", sent, ["To"])
    failed = {(name,): peer.send_failures for name, peer in peers.items()}
    text = "The total number of send failures from peers."
    yield counter("etcd_network_peer_sent_failures_total", text, failed, ["To"])
    received = {(f"{peer_id:x}",): count for peer_id, count in sorted(service.received_bytes.items())}
    text = "The total number of bytes received from peers."
    yield counter("etcd_network_peer_received_bytes_total", text, received, ["From"])
    failures = dict.fromkeys(service.received_bytes, 0) | service.received_failures
    failed = {(f"{peer_id:x}",): count for peer_id, count in sorted(failures.items())}
    text = "The total number of receive failures from peers."
    yield counter("etcd_network_peer_received_failures_total", text, failed, ["From"])
    labels = ["Local", "Remote"]
    active = {pair: peer.active_since is not None for pair, peer in pairs.items()}
    yield gauge("etcd_network_active_peers", "The current number of active peer connections.", active, labels)
    known = dict.fromkeys(pairs, 1)
    yield gauge("etcd_network_known_peers", "The current number of known peers.", known, labels)
    gone = {pair: peer.disconnects for pair, peer in pairs.items()}
    text = "The total number of disconnected peers."
    yield counter("etcd_network_disconnected_peers_total", text, gone, labels)
    trips = {(name,): peer.round_trips for name, peer in peers.items()}
    text = "Round-Trip-Time histogram between peers"
    yield histogram_family("etcd_network_peer_round_trip_time_seconds", text, trips, ["To"])
