"""The relays between members: they know the dialling member, cut one direction, and heal by passing or resetting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from jepsen.db import Cluster, DbError, Settings, free_ports
from jepsen.faults.network import CLIENTS, Network, Target, close_server
from jepsen.faults.partitions import FAULTS, both_ways
from jepsen.runner import Options, run

SOON_S = 0.2
LONG_S = 10.0
FIRST_TERM = {"etcd": 2, "raftkv": 1}
"""The term of a cluster whose first election succeeds."""


@contextlib.asynccontextmanager
async def echoing(seed: int) -> AsyncIterator[tuple[Network, int]]:
    """A network with one relay port that leads to member 2, which echoes. This process is member 1."""
    relay_port, port = free_ports(2)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoes.append(asyncio.get_running_loop().create_task(echo(reader, writer)))
        echoes[-1].add_done_callback(lambda done: writer.transport.abort())

    echoes: list[asyncio.Task[None]] = []

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    network = Network({relay_port: Target(2, port, True)}, lambda: {1: os.getpid()}, seed)
    await network.open()
    try:
        yield network, relay_port
    finally:
        await network.close()
        await close_server(server)
        await asyncio.gather(*echoes)


def seed_where_heal(resets: bool) -> int:
    """Return a seed whose first heal resets cut connections, or one whose first heal does not."""

    def does(seed: int) -> bool:
        async def tried() -> bool:
            async with echoing(seed) as (network, relay_port):
                reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
                await said(reader, writer, b"x")
                network.cut([(1, 2)])
                network.heal()
                try:
                    return await said(reader, writer, b"y") != b"y"
                except ConnectionError:
                    return True
                finally:
                    writer.close()

        return asyncio.run(tried())

    return next(seed for seed in range(50) if does(seed) is resets)


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Return the echo."""
    writer.write(data)
    return await asyncio.wait_for(reader.read(100), LONG_S)


@pytest.mark.parametrize("pair", [(1, 2), (2, 1)], ids=["there", "back"])
def test_a_cut_holds_one_direction_and_a_heal_lets_it_pass(pair: tuple[int, int]) -> None:
    async def scenario(seed: int) -> None:
        async with echoing(seed) as (network, relay_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
            assert await said(reader, writer, b"one") == b"one"
            network.cut([pair])
            writer.write(b"two")
            held = asyncio.create_task(reader.read(100))
            await asyncio.wait([held], timeout=SOON_S)
            assert not held.done()
            network.heal()
            assert await asyncio.wait_for(held, LONG_S) == b"two"
            writer.close()

    asyncio.run(scenario(seed_where_heal(resets=False)))


def test_heal_may_reset_cut_connections() -> None:
    assert seed_where_heal(resets=True) != seed_where_heal(resets=False)


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_ends_with_the_network_however_young_it_is(turns: int) -> None:
    """A relay cancelled before its first step used to leave its connection open."""
    async with echoing(1) as (network, relay_port):
        with socket.create_connection(("127.0.0.1", relay_port), LONG_S) as dialler:
            for _ in range(turns):
                await asyncio.sleep(0)
            await network.close()
            with contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(dialler.recv, 1) == b""


@pytest.mark.long
def test_heal_may_end_cut_connection_at_one_end() -> None:
    async def ends(seed: int) -> list[bool]:
        """Whether both ends, the dialler first, hear of the end."""
        relay_port, port = free_ports(2)
        dialled: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_server(lambda *both: dialled.put_nowait(both), "127.0.0.1", port)
        network = Network({relay_port: Target(2, port, True)}, lambda: {1: os.getpid()}, seed)
        await network.open()
        near, writer = await asyncio.open_connection("127.0.0.1", relay_port)
        writer.write(b"x")
        far, far_writer = await dialled.get()
        assert await far.read(1) == b"x"
        network.cut([(1, 2)])
        network.heal()
        heard = [await ended(reader) for reader in (near, far)]
        for end in (writer, far_writer):
            end.close()
        await asyncio.gather(writer.wait_closed(), far_writer.wait_closed(), return_exceptions=True)
        await network.close()
        await close_server(server)
        return heard

    async def ended(reader: asyncio.StreamReader) -> bool:
        try:
            return await asyncio.wait_for(reader.read(1), SOON_S) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    found = [asyncio.run(ends(seed)) for seed in range(10)]
    assert sorted(set(map(tuple, found))) == [(False, False), (True, False), (True, True)]


async def test_a_cut_between_others_lets_this_pass() -> None:
    async with echoing(1) as (network, relay_port):
        network.cut(both_ways([(2, 3), (2, CLIENTS)]))
        reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
        assert await said(reader, writer, b"one") == b"one"
        writer.close()


async def test_a_reset_breaks_connections_and_new_ones_work() -> None:
    async with echoing(1) as (network, relay_port):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
        assert await said(reader, writer, b"one") == b"one"
        network.reset()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(100), LONG_S) == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
        assert await said(reader, writer, b"two") == b"two"
        writer.close()


class Noted(Network):
    """Records the calls made to it."""

    def __init__(self) -> None:
        super().__init__({}, dict, 0)
        self.cuts: set[tuple[int, int]] = set()

    def cut(self, pairs: object) -> None:
        self.cuts |= set(pairs)


CUTS = {
    "cut": {(1, 2), (2, 1), (1, 3), (3, 1)},
    "offline": {(1, 2), (2, 1), (1, 3), (3, 1), (1, 0), (0, 1)},
    "deaf": {(2, 1), (3, 1)},
    "mute": {(1, 2), (1, 3)},
    "bridge": {(2, 3), (3, 2)},
}


@pytest.mark.parametrize("fault", CUTS)
async def test_partitions_cut_off_the_named_members(fault: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Settings(network=True))
    cluster.network = noted = Noted()
    FAULTS[fault]().inject(cluster, cluster.members[:1])
    assert noted.cuts == CUTS[fault]


def test_network_faults_need_relays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Settings())
    with pytest.raises(DbError, match="relays"):
        FAULTS["cut"]().inject(cluster, cluster.members[:1])


def leader_cut_off(system: str) -> Callable[[Path], None]:
    """A run in which the leader is cut off."""

    def go(runs: Path) -> None:
        settings = Settings(system=system, heartbeat_ms=20, election_ms=200)
        options = Options(settings, "register", "cut-leader", seed=3, faults=1, time_s=None, runs=runs)
        report = asyncio.run(run(options))
        assert report.verdict.lines() == []
        # Another member had to be elected, because the leader was cut off both ways.
        assert report.figures["terms"] > FIRST_TERM[system]

    return go


@pytest.mark.long
@pytest.mark.parametrize("system", ["etcd", "raftkv"])
def test_a_leader_that_is_cut_off_is_replaced_and_serves_nothing_stale(system: str, tmp_runs: Path) -> None:
    leader_cut_off(system)(tmp_runs)
