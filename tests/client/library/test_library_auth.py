"""Users, expiring tokens and TLS on real servers."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from raftkv import errors
from raftkv.aio import AuthenticationFailed, EndpointsFailed, connect
from raftkv.client.rpc.methods import Method
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from tests.procs import ETCD_FAST, Cluster


class Store(grpc.GenericRpcHandler):
    """Answers Range with the key it was asked for, Put with an error, Status never."""

    def service(self, details):
        handler = {"/etcdserverpb.KV/Range": self.range, "/etcdserverpb.KV/Put": self.put}.get(details.method)
        return grpc.unary_unary_rpc_method_handler(handler) if handler else None

    def range(self, request, context):
        key = rpc_pb2.RangeRequest.FromString(request).key
        pair = rpc_pb2.RangeResponse().kvs.add(key=key)
        return rpc_pb2.RangeResponse(kvs=[pair], count=1).SerializeToString()

    def put(self, request, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, errors.NoSpaceError.text)


def auth(name):
    method = SERVICES["etcdserverpb.Auth"][name]
    return Method(method.path, method.response, False), method.request


async def call(kv, method_name, /, **fields):
    method, request = auth(method_name)
    return await kv.scope.core.call(method, request(**fields), timeout_s=10)


async def enable(kv):
    """Enable auth with root and a user who may read and write keys below ``own/``."""
    await call(kv, "UserAdd", name="root", password="secret")
    await call(kv, "UserGrantRole", user="root", role="root")
    await call(kv, "UserAdd", name="worker", password="pw")
    await call(kv, "RoleAdd", name="own")
    permission = {"permType": "READWRITE", "key": b"own/", "range_end": b"own0"}
    await call(kv, "RoleGrantPermission", name="own", perm=permission)
    await call(kv, "UserGrantRole", user="worker", role="own")
    await call(kv, "AuthEnable")


@pytest.mark.long
def test_users_and_tokens_that_end():
    async def scenario(endpoints):
        async with connect(endpoints) as kv:
            await enable(kv)
            with pytest.raises(errors.StatusError, match="user name is empty"):
                await kv.put("own/k", "v")
        async with connect(endpoints, user="worker", password="wrong") as kv:
            for use in (lambda: kv.get("own/k"), lambda: kv.watch("own/k").ready(), lambda: kv.lease(ttl=5).grant()):
                with pytest.raises(AuthenticationFailed, match="invalid user ID or password"):
                    await use()
        async with connect(endpoints, user="root", password="secret") as root:
            await with_new_tokens(root, endpoints)

    with Cluster(ETCD_FAST) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster.endpoints), 120))


async def with_new_tokens(root, endpoints):
    """All tokens of the user end: calls and new watches go on with a new one, unnoticed."""
    own = connect(endpoints, user="worker", password="pw", namespace="own/")
    async with own as kv, kv.watch("k") as watch, kv.lock("name") as lock:
        await kv.put("k", "1", fence=lock)
        await refused(endpoints)
        await call(root, "UserChangePassword", name="worker", password="pw")
        await kv.put("k", "2", fence=lock)
        await call(root, "UserChangePassword", name="worker", password="pw")
        async with kv.watch("k", start_revision=1) as late:
            assert [(await anext(late)).value for _ in range(2)] == [b"1", b"2"]
        assert [(await anext(watch)).value for _ in range(2)] == [b"1", b"2"]


async def refused(endpoints):
    async with connect(endpoints, user="worker", password="pw") as kv:
        for use in (lambda: kv.put("others", "v"), lambda: kv.watch("others").ready()):
            with pytest.raises(errors.PermissionDeniedError):
                await use()


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


@pytest.mark.long
def test_tls(certificate):
    cert, key = certificate
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Store(),))
    pair = (Path(key).read_bytes(), Path(cert).read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()

    async def scenario():
        context = ssl.create_default_context(cafile=cert)
        for settings in ({"ca_file": cert}, {"tls": context}, {"ca_file": cert, "cert_file": cert, "key_file": key}):
            async with connect(f"127.0.0.1:{port}", **settings) as kv:
                assert (await kv.get("k")).key == b"k"
        for settings in ({"tls": True}, {}):
            async with connect(f"https://127.0.0.1:{port}", timeout_s=2, **settings) as kv:
                with pytest.raises(EndpointsFailed, match="certificate verify failed"):
                    await kv.get("k")

    try:
        asyncio.run(scenario())
    finally:
        server.stop(None).wait()
