"""Tokens: when a client logs in, shared waiting, refusals survived, and secrecy."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from pathlib import Path

import pytest

import raftkv
from raftkv import errors
from raftkv.client import Client, ClientOptions
from raftkv.client.credentials import Secret, announce_settings, client_settings
from raftkv.client.errors import AuthenticationFailed, EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fakes import FakeCluster

GOT = rpc_pb2.RangeResponse(count=1).SerializeToString()
READ = rpc_pb2.RangeRequest(key=b"k")
INVALID = RpcError(errors.UNAUTHENTICATED, errors.InvalidAuthTokenError.text)
OLD = RpcError(errors.INVALID_ARGUMENT, errors.AuthOldRevisionError.text)
WRONG = RpcError(errors.INVALID_ARGUMENT, errors.AuthFailedError.text)
USER = ClientOptions(user="alice", password="canary-pw")


def jwt(name: str, ends_in_s: float) -> str:
    claims = json.dumps({"username": name, "exp": time.time() + ends_in_s, "revision": 3}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.{name}"


class Members:
    """One member that hands out ``t1``, ``t2``, ... and takes the tokens of ``good``; all are good at first."""

    def __init__(self, make=lambda count: f"t{count}"):
        self.cluster = FakeCluster(a=[self.answer])
        self.logins = []
        self.carried = []
        self.refusals = []
        self.bad = set()
        self.make = make

    def answer(self, path, message, metadata):
        if path == methods.AUTHENTICATE.path:
            self.logins.append(rpc_pb2.AuthenticateRequest.FromString(message).password)
            assert metadata == ()
            return rpc_pb2.AuthenticateResponse(token=self.make(len(self.logins))).SerializeToString()
        token = dict(metadata).get("token", "")
        self.carried.append(token)
        if self.refusals:
            raise self.refusals.pop(0)
        if token in self.bad:
            raise RpcError(INVALID.code, INVALID.text)
        return GOT

    def client(self, options=USER):
        return Client(["a"], options, open_transport=self.cluster.open)


async def get(client, timeout_s=5.0, method=methods.RANGE, request=READ):
    return await client.call(method, request, timeout_s=timeout_s)


async def test_a_token_that_says_when_it_ends_is_renewed_before():
    members = Members(lambda count: jwt(f"t{count}", 0.2 if count == 1 else 600))
    async with members.client() as client:
        await get(client)
        client._login.renew_at -= 0.2  # as 0.2 s later
        await get(client)
    assert [token.rpartition(".")[2] for token in members.carried] == ["t1", "t2"]


async def test_a_token_that_seems_to_have_ended_is_used_until_a_member_refuses_it():
    members = Members(lambda count: jwt("t", -600))
    async with members.client() as client:
        for _ in range(3):
            await get(client)
    assert len(members.logins) == 1


async def test_a_token_of_brackets_without_end_is_carried_as_it_is():
    token = f"e30.{base64.urlsafe_b64encode(b'[' * 99_999).decode()}.x"
    members = Members(lambda count: token)
    async with members.client() as client:
        await get(client)
    assert members.carried == [token]


async def test_an_unanswered_renewal_leaves_the_valid_token():
    members = Members(lambda count: jwt("t", 600))
    async with members.client() as client:
        await get(client)
        client._login.renew_at = 0.0
        answer = members.cluster.members["a"].answers[0]
        gone = RpcError(errors.UNAVAILABLE, "gone")

        def script(path, *rest):
            if path == methods.AUTHENTICATE.path:
                raise gone
            return answer(path, *rest)

        members.cluster.members["a"].answers[0] = script
        await get(client, 0.2)
    assert len(members.carried) == 2


async def test_changed_rights_cause_no_new_login():
    members = Members()
    members.refusals = [RpcError(OLD.code, OLD.text) for _ in range(3)]
    async with members.client() as client:
        await get(client, method=methods.PUT, request=rpc_pb2.PutRequest(key=b"k"))
    assert (members.carried, len(members.logins)) == (["t1"] * 4, 1)


async def test_a_jwt_that_has_old_rights_in_it_is_renewed():
    members = Members(lambda count: jwt(f"t{count}", 600))
    members.refusals = [RpcError(OLD.code, OLD.text) for _ in range(2)]
    async with members.client() as client:
        await get(client)
    assert [token.rpartition(".")[2] for token in members.carried] == ["t1", "t2", "t3"]


async def test_rights_that_never_settle_end_the_call_at_its_deadline():
    members = Members()
    members.refusals = [RpcError(OLD.code, OLD.text) for _ in range(99)]
    async with members.client() as client:
        with pytest.raises((errors.AuthOldRevisionError, EndpointsFailed)):
            await get(client, 0.2)


async def test_client_with_a_certificate_tries_again_when_rights_change_without_login():
    members = Members()
    members.refusals = [RpcError(OLD.code, OLD.text)]
    async with members.client(ClientOptions()) as client:
        await get(client)
    members.refusals = [INVALID]
    async with members.client(ClientOptions()) as client:
        with pytest.raises(errors.InvalidAuthTokenError):
            await get(client)
    assert (members.carried, members.logins) == (["", "", ""], [])


async def test_token_function_is_called_again_after_refusal():
    members, made = Members(), []
    members.bad = {"j1"}

    async def vault():
        made.append(f"j{len(made) + 1}")
        return made[-1]

    async with members.client(ClientOptions(token=Secret(vault))) as client:
        await get(client)
    assert (members.carried, members.logins) == (["j1", "j2"], [])


async def test_failing_token_function_is_named_without_its_message():
    def vault():
        raise OSError("canary-pw")

    async with Members().client(ClientOptions(user="alice", password=Secret(vault))) as client:
        with pytest.raises(AuthenticationFailed, match=r"^the function that returns a secret failed: OSError$"):
            await get(client)


async def test_a_password_in_a_file_is_read_for_each_login(tmp_path: Path):
    file = tmp_path / "pw"
    file.write_text("one\n")
    members = Members()
    async with members.client(ClientOptions(user="alice", password=Secret(file))) as client:
        await get(client)
        file.write_text("two\n")
        members.bad = {"t1"}
        await get(client)
    assert members.logins == ["one", "two"]


async def test_wait_for_the_login_of_another_call_ends_with_the_own_deadline():
    release = asyncio.Event()

    class Slow:
        async def unary(self, path, message, timeout_s=None, metadata=()):
            if path == methods.AUTHENTICATE.path:
                await release.wait()
                return rpc_pb2.AuthenticateResponse(token="t").SerializeToString()
            return GOT

        async def close(self):
            return

    async with Client(["a"], USER, open_transport=lambda endpoint, options: Slow()) as client:
        first = asyncio.create_task(get(client, 5.0))
        await asyncio.sleep(0)
        with pytest.raises(EndpointsFailed) as caught:
            await get(client, 0.05)
        assert caught.value.definite
        release.set()
        await first


async def test_a_caller_that_gives_up_does_not_take_the_login_of_the_others_with_it():
    members = Members()
    async with members.client() as client:
        first = asyncio.create_task(get(client))
        others = [asyncio.create_task(get(client)) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*others)
    asked = [path for path, *_ in members.cluster.members["a"].calls if path == methods.AUTHENTICATE.path]
    assert (len(asked), members.carried) == (2, ["t1"] * 3)


async def test_wrong_password_costs_one_request_for_all_waiters():
    cluster = FakeCluster(a=[WRONG])
    async with Client(["a"], USER, open_transport=cluster.open) as client:
        done = await asyncio.gather(*(get(client) for _ in range(9)), return_exceptions=True)
        assert [type(one) for one in done] == [AuthenticationFailed] * 9
    assert len(cluster.members["a"].calls) == 1


async def test_the_token_of_one_stream_does_not_end_the_newer_one():
    members = Members()
    async with members.client() as client:
        await get(client)
        assert client.forget_token(errors.InvalidAuthTokenError(), "t1")
        await get(client)
        assert client.forget_token(errors.InvalidAuthTokenError(), "t1")  # of another stream, which was slower
        await get(client)
    assert members.carried == ["t1", "t2", "t2"]


def shown(error: BaseException, seen: set[int]) -> str:
    """All that a tool may print of an exception: texts and variables of all frames in the chain."""
    if id(error) in seen:
        return ""
    seen.add(id(error))
    parts, trace = [repr(error), repr(error.__dict__)], error.__traceback__
    while trace is not None:
        if "raftkv/client" in trace.tb_frame.f_code.co_filename:
            parts.append(repr(trace.tb_frame.f_locals))
        trace = trace.tb_next
    following = (error.__context__, error.__cause__, getattr(error, "cause", None))
    return "\n".join(parts + [shown(one, seen) for one in following if one is not None])


@pytest.mark.parametrize("script", [[WRONG], [RpcError(errors.UNAVAILABLE, "gone")], [lambda *_: b"\xff"]])
async def test_no_error_and_no_frame_of_it_holds_the_password(script):
    async with Client(["a"], USER, open_transport=FakeCluster(a=script).open) as client:
        (caught,) = await asyncio.gather(get(client, 0.1), return_exceptions=True)
        assert isinstance(caught, Exception)
        assert "canary-pw" not in shown(caught, set())


def test_no_object_shows_a_password_or_a_token():
    kv = raftkv.connect("h:1", user="alice", password="canary-pw")
    both = ClientOptions(user="a", password=Secret("canary-pw"), token="canary-pw")
    for thing in (kv, kv._make, kv.target()[1].scope.core.options, both, Secret("canary-pw"), kv.__reduce__()):
        assert "canary-pw" not in f"{thing!r} {thing}"
    copy = pickle.loads(pickle.dumps(kv))
    assert copy.target()[1].scope.core.options.password == "canary-pw"
    kv.close()
    copy.close()
    with pytest.raises(raftkv.ConfigError) as caught:
        raftkv.connect("h:1", password="canary-pw")
    assert "canary-pw" not in shown(caught.value, set())


ENVIRONMENTS = [
    ({"RAFTKV_USER": "ann:se:cret"}, {"user": "ann", "password": Secret("se:cret")}),
    ({"RAFTKV_USER": "ann", "RAFTKV_PASSWORD": "pw"}, {"user": "ann", "password": Secret("pw")}),
    ({"RAFTKV_USER": "ann", "RAFTKV_PASSWORD_FILE": "/f"}, {"user": "ann", "password": Secret(Path("/f"))}),
    ({"RAFTKV_TOKEN_FILE": "/f", "RAFTKV_CACERT": "ca"}, {"token": Secret(Path("/f")), "ca_file": "ca"}),
    ({"RAFTKV_CERT": "c", "RAFTKV_KEY": "k"}, {"cert_file": "c", "key_file": "k"}),
    ({"RAFTKV_USER": ""}, {}),
]


@pytest.mark.parametrize(("environment", "settings"), ENVIRONMENTS)
def test_environment_sets_identity_and_passes_it_on(environment, settings):
    assert client_settings(environment) == settings
    handed: dict[str, str] = {}
    announce_settings(settings, handed)
    assert client_settings(handed) == settings


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RAFTKV_PASSWORD": "canary-pw"}, "RAFTKV_USER is not"),
        ({"RAFTKV_USER": "a:canary-pw", "RAFTKV_PASSWORD": "canary-pw"}, "give it once"),
        ({"RAFTKV_TOKEN": "canary-pw", "RAFTKV_TOKEN_FILE": "f"}, "give one"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused_without_its_secrets(environment, text):
    with pytest.raises(errors.ConfigError, match=text) as caught:
        client_settings(environment)
    assert "canary-pw" not in str(caught.value)


def test_connect_uses_identity_of_environment_by_default(monkeypatch):
    monkeypatch.setenv("RAFTKV_USER", "ann:pw")
    with raftkv.connect("h:1") as kv:
        assert repr(kv) == "<raftkv Client of h:1 as ann>"
    with raftkv.connect("h:1", user="") as kv:
        assert repr(kv) == "<raftkv Client of h:1>"
    with raftkv.connect("h:1", user="bob", password="x") as kv:
        assert repr(kv) == "<raftkv Client of h:1 as bob>"


def test_a_file_that_cannot_be_read_is_refused_at_once(tmp_path):
    with pytest.raises(raftkv.ConfigError, match=r"cannot read the file of a secret, .*/none: no such file"):
        raftkv.connect("h:1", user="alice", password=tmp_path / "none")
