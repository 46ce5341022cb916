"""The other members: bytes, failures, round trips."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raftkv.histograms import counter, gauge, histogram_family
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport


class PeerMetrics(Collector):
    """Messages between members.

    Arguments:
        member_id: of this member.
        transport: the outgoing half.
        service: the incoming one.
    """

    def __init__(self, member_id: int, transport: Transport, service: PeerService) -> None:
        self._member_id = member_id
        self._transport = transport
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All families."""
        peers = {f"{peer_id:x}": peer for peer_id, peer in sorted(self._transport.peers.items())}
        pairs = {(f"{self._member_id:x}", name): peer for name, peer in peers.items()}
        found: list[Metric] = []
        for name, text, values in (
            ("sent_bytes", "The total number of bytes sent to peers.", {n: p.sent_bytes for n, p in peers.items()}),
            (
                "sent_failures",
                "The total number of send failures from peers.",
                {n: p.send_failures for n, p in peers.items()},
            ),
        ):
            found.append(counter(f"etcd_network_peer_{name}_total", text, {(n,): v for n, v in values.items()}, ["To"]))
        for name, text, received in (
            ("received_bytes", "The total number of bytes received from peers.", self._service.received_bytes),
            (
                "received_failures",
                "The total number of receive failures from peers.",
                dict.fromkeys(self._service.received_bytes, 0) | self._service.received_failures,
            ),
        ):
            by_peer = {(f"{peer_id:x}",): count for peer_id, count in sorted(received.items())}
            found.append(counter(f"etcd_network_peer_{name}_total", text, by_peer, ["From"]))
        labels = ["Local", "Remote"]
        found += [
            gauge(
                "etcd_network_active_peers",
                "The current number of active peer connections.",
                {pair: peer.active_since is not None for pair, peer in pairs.items()},
                labels,
            ),
            gauge("etcd_network_known_peers", "The current number of known peers.", dict.fromkeys(pairs, 1), labels),
            counter(
                "etcd_network_disconnected_peers_total",
                "The total number of disconnected peers.",
                {pair: peer.disconnects for pair, peer in pairs.items()},
                labels,
            ),
            histogram_family(
                "etcd_network_peer_round_trip_time_seconds",
                "Round-Trip-Time histogram between peers",
                {(name,): peer.round_trips for name, peer in peers.items()},
                ["To"],
            ),
        ]
        yield from found
