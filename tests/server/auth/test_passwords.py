"""bcrypt in threads: refused passwords, equal costs for unknown names, and passwords beyond 72 bytes as in etcd."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import bcrypt
import pytest

from raftkv import errors
from raftkv.server.auth import passwords as module
from raftkv.server.auth.passwords import (
    NICENESS,
    PROMPT_BURST_S,
    PROMPT_SHARE,
    PROMPT_SHARE_UNKNOWN,
    Allowance,
    Passwords,
    costs_of,
    decoy_cost,
    is_hash,
)
from tests.rpc.loop import until

COST = 4


async def test_a_hash_is_one_that_etcd_takes() -> None:
    passwords = Passwords(COST)
    hashed = await passwords.hash("secret")
    assert hashed.startswith(b"$2a$04$")
    assert is_hash(hashed)
    assert await passwords.matches("secret", hashed)
    assert not await passwords.matches("Secret", hashed)
    assert not await passwords.matches("", hashed)


async def test_72_bytes_count_as_in_go() -> None:
    passwords = Passwords(COST)
    hashed = await passwords.hash("x" * 72)
    # etcd 3.5.1 admitted passwords with the right first 72 bytes, and so its hashes are compared.
    assert await passwords.matches("x" * 72 + "more", hashed)
    assert not await passwords.matches("x" * 71, hashed)
    for password in ("x" * 73, "ä" * 37):
        with pytest.raises(errors.PasswordTooLongError, match=r"^bcrypt: password length exceeds 72 bytes$"):
            await passwords.hash(password)


async def test_a_password_has_a_length() -> None:
    passwords = Passwords(COST, 8)
    with pytest.raises(errors.InvalidPasswordError, match="must have at least 8 characters") as error:
        await passwords.hash("canary7")
    assert "canary" not in str(error.value)
    await passwords.hash("canary78")


async def test_a_name_without_a_hash_is_refused_after_the_work_of_one_hash() -> None:
    passwords, worked = Passwords(COST), []
    hashed = await passwords.hash("secret")
    compare, make = bcrypt.checkpw, bcrypt.hashpw

    def comparing(password: bytes, hashed: bytes) -> bool:
        worked.append(int(hashed[4:6]))
        return compare(password, hashed)

    def making(password: bytes, salt: bytes) -> bytes:
        worked.append(int(salt[4:6]))
        return make(password, salt)

    bcrypt.checkpw, bcrypt.hashpw = comparing, making
    try:
        assert await passwords.matches("secret", hashed)
        assert not await passwords.matches("secret", 5)
        assert not await passwords.matches("x" * 100, 6)
        assert not await passwords.matches("secret", b"no hash at all")
        # A hash of a cost that takes hours is not looked at.
        assert not await passwords.matches("secret", b"$2a$31$" + hashed[7:])
    finally:
        bcrypt.checkpw, bcrypt.hashpw = compare, make
    assert worked == [4, 5, 6, 4, 4]


def test_unknown_names_have_stable_cost_of_known_ones() -> None:
    hashed = b"$2a$%02d$" + b"x" * 53
    costs = costs_of([hashed % 14, hashed % 10, b"", hashed % 31, hashed % 10, hashed % 10])
    assert costs == [10, 10, 10, 14]
    found = [decoy_cost(b"n%d" % number, b"secret", costs) for number in range(4000)]
    assert found == [decoy_cost(b"n%d" % number, b"secret", costs) for number in range(4000)]
    assert set(found) == {10, 14}
    assert 2800 < found.count(10) < 3200
    assert found != [decoy_cost(b"n%d" % number, b"another", costs) for number in range(4000)]
    assert decoy_cost(b"name", b"", [12]) == 12
    assert decoy_cost(b"name", b"secret" * 20, []) is None


async def test_waiting_logins_are_bounded_and_cancelled_ones_make_room() -> None:
    go = threading.Event()
    passwords = Passwords(COST, threads=1)
    waiting: list[asyncio.Task[Any]] = []
    try:
        waiting += [asyncio.create_task(passwords._run(go.wait)) for _ in range(module.WAITING_MAX)]
        await until(lambda: passwords.waiting == module.WAITING_MAX)
        with pytest.raises(errors.TooManyRequestsError):
            await passwords.matches("secret", COST)
        waiting[-1].cancel()
        await asyncio.wait([waiting[-1]])
        again = asyncio.create_task(passwords.matches("secret", COST))
        await until(lambda: passwords.waiting == module.WAITING_MAX)
    finally:
        go.set()
    assert not await again
    await asyncio.gather(*waiting, return_exceptions=True)
    assert passwords.waiting == 0
    passwords.close()


async def test_a_storm_of_made_up_names_keeps_no_user_or_other_address_out() -> None:
    go, passwords = threading.Event(), Passwords(COST, threads=1)
    passwords._allowance_all.spend(
        PROMPT_BURST_S + 60.0
    )  # one thread, so passwords are served in the order of the line
    served: list[str] = []

    def work(name: str) -> str:
        go.wait()
        served.append(name)
        return name

    def login(label: str, address: str, name: bytes = b"") -> asyncio.Task[str]:
        return asyncio.create_task(passwords._run(lambda: work(label), address, name))

    storm = [login("made up", "address 10.0.0.6") for _ in range(module.WAITING_MAX)]
    await until(lambda: passwords.waiting == module.WAITING_MAX)
    honest = [login("alice", "address 10.0.0.6", b"alice"), login("made up elsewhere", "address 10.0.0.7")]
    late = login("made up", "address 10.0.0.6")
    await until(lambda: late.done() and sum(task.done() for task in storm) == 2)
    assert all(task.done() for task in storm[-2:]), "the newest of the greediest give way"
    text = "raftkv: address 10.0.0.6 has its share of the 64 passwords that may wait at one member"
    for refused in (late, *storm[-2:]):
        with pytest.raises(errors.ShareError, match=text):
            await refused
    go.set()
    await asyncio.gather(*honest)
    assert max(served.index("alice"), served.index("made up elsewhere")) < 4, "each in turn is served"
    await asyncio.gather(*storm, return_exceptions=True)
    assert passwords.waiting == 0
    passwords.close()


NICENESS_MAX = 19
"""The system's."""


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_few_logins_have_the_priority_of_the_loop_and_a_storm_has_not() -> None:
    passwords, own = Passwords(COST, threads=1), _niceness()
    lower = min(own + NICENESS, NICENESS_MAX)  # these tests may run at a low priority themselves
    assert [await passwords._run(_niceness) for _ in range(3)] == [own] * 3
    go = threading.Event()
    first = asyncio.create_task(passwords._run(go.wait))
    await until(lambda: passwords._is_prompt_busy)
    assert await passwords._run(_niceness) == lower
    go.set()
    await first
    assert await passwords._run(_niceness) == own
    passwords.close()


async def test_login_storm_uses_up_only_its_own_prompt_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    passwords, own = Passwords(COST, threads=1), _niceness()
    lower = min(own + NICENESS, NICENESS_MAX)

    async def niceness_after(address: str, name: bytes, used_s: float) -> int:
        with monkeypatch.context() as patch:
            times = iter((0.0, used_s))
            patch.setattr(module.time, "thread_time", lambda: next(times))
            return await passwords._run(_niceness, address, name)

    made_up, alice = ("address 10.0.0.6", b""), ("address 10.0.0.6", b"alice")
    assert await niceness_after(*made_up, PROMPT_BURST_S) == own
    assert await niceness_after(*made_up, 0.0) == lower
    now += 0.1  # what all may use together is back
    assert await niceness_after(*alice, 0.1) == own
    now += 1.0
    assert await niceness_after(*alice, 0.2) == own, "a user may log in often"
    assert await niceness_after(*alice, 0.2) == own
    now += PROMPT_BURST_S / PROMPT_SHARE_UNKNOWN
    assert await niceness_after(*made_up, 0.0) == own
    passwords.close()


async def test_work_cancelled_before_start_frees_its_thread() -> None:
    go, passwords = threading.Event(), Passwords(COST, threads=1)
    first = asyncio.create_task(passwords._run(go.wait))
    await until(lambda: passwords._is_prompt_busy)
    first.cancel()
    await asyncio.wait([first])
    go.set()
    await until(lambda: not passwords._is_prompt_busy)
    passwords.close()


def test_an_allowance_grows_again_to_the_burst_and_not_beyond() -> None:
    allowance = Allowance(100.0, PROMPT_SHARE)
    allowance.spend(PROMPT_BURST_S + 1.0)
    assert allowance.left_s(100.0) <= 0
    assert allowance.left_s(100.0 + 0.99 / PROMPT_SHARE) <= 0
    assert allowance.left_s(100.0 + 1.01 / PROMPT_SHARE) > 0
    assert allowance.left_s(100_000.0) > 0
    allowance.spend(PROMPT_BURST_S)
    assert not allowance.left_s(100_000.0) > 0
