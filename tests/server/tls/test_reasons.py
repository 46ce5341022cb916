"""What a client says that TLS keeps from a member: one line with what, where, and what to do; no traceback."""

from __future__ import annotations

import asyncio

import pytest
from cryptography.hazmat.primitives import serialization

from raftkv.client.errors import EndpointsFailed
from raftkv.client.library import connect
from raftkv.errors import ConfigError
from raftkv.rpc import Server
from raftkv.server.tls.issue import self_signed
from tests.cli.runner import Ran, run_ctl
from tests.server.tls.room import HERE, Room

TROUBLES = [
    ("server", "https://", "other", "", "unable to get local issuer certificate (name the file of the authority"),
    ("own", "https://", "ca", "", "self-signed certificate (name the file of the authority that signed it: --cacert"),
    ("over", "https://", "ca", "", "certificate has expired (renew it on that member"),
    (
        "elsewhere",
        "https://",
        "ca",
        "",
        "certificate is not valid for '127.0.0.1' (use a name that the certificate has",
    ),
    ("mutual", "https://", "ca", "", "requires a certificate, and none was shown (show a client's: --cert and --key"),
    ("mutual", "https://", "ca", "stranger", "does not know the authority of our certificate (show one that its"),
    ("mutual", "https://", "ca", "old", "says that our certificate has expired (renew it, or show another"),
    (
        "server",
        "http://",
        "",
        "",
        "closed the connection before its HTTP/2 settings came (if it speaks TLS, write https",
    ),
    ("server", "", "", "", "closed the connection before its HTTP/2 settings came (if it speaks TLS, write https://"),
    ("plain", "https://", "ca", "", "the other end does not speak TLS (write http:// before it"),
    ("plain", "", "ca", "", "the other end does not speak TLS (write http:// before it to reach it without TLS)"),
]

PATIENCE_S = 4
"""All attempts fail, so each case takes so long; the first has to end before."""


def _words(room: Room, target: str, ca: str, shown: str) -> list[str]:
    words = ["--endpoints", target, *(["--cacert", room.path(f"{ca}.crt")] if ca else [])]
    return words + ([f"--cert={room.path(shown)}.crt", f"--key={room.path(shown)}.key"] if shown else [])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "scheme", "ca", "shown", "reason"), TROUBLES)
async def test_command_and_library_give_same_tls_error(room, kind, scheme, ca, shown, reason):
    room.authority("other")
    room.issue("over", days=0)
    room.issue("elsewhere", ["db.example"])
    room.issue("stranger", by="other", is_server=False)
    room.issue("old", days=0, is_server=False)
    room.write("own", self_signed(HERE, 5))
    server = Server()
    mutual = kind == "mutual"
    security = None if kind == "plain" else room.security("server" if mutual else kind, "ca" if mutual else "")
    ((host, port),) = await server.listen("127.0.0.1", 0, None if security is None else security.listening)
    target = f"{scheme}{host}:{port}"
    files = {"ca_file": room.path(f"{ca}.crt") if ca else ""}
    files |= {f"{part}_file": room.path(f"{shown}.{end}") for part, end in (("cert", "crt"), ("key", "key")) if shown}
    try:
        words = [*_words(room, target, ca, shown), f"--command-timeout={PATIENCE_S}s", "get", "k"]
        async with asyncio.TaskGroup() as group, connect(target, timeout_s=PATIENCE_S, **files) as kv:
            run: asyncio.Task[Ran] = group.create_task(asyncio.to_thread(run_ctl, words))
            with pytest.raises(EndpointsFailed) as raised:
                await kv.get("k")
    finally:
        await server.close()
    ran = run.result()
    *before, line = ran.errors.splitlines()
    assert (ran.code, ran.output, before) == (1, b"", ["Error: context deadline exceeded"])
    assert line.startswith(f"raftkvctl: no answer from {target}: ")
    assert reason in line
    assert line.endswith(str(raised.value).partition(f"from {target}: ")[2])


FILES = [
    ("none.crt", "", "", "{}/none.crt: No such file or directory"),
    ("a.key", "", "", "there is no certificate in PEM in {}/a.key"),
    ("", "a.crt", "none.key", "{}/none.key: No such file or directory"),
    ("", "a.crt", "b.key", "{0}/b.key is not the key of {0}/a.crt"),
    ("", "a.key", "a.key", "{0}/a.key and {0}/a.key are not a certificate and its key in PEM"),
    ("", "a.crt", "locked.key", "{}/locked.key is encrypted: only keys without a password can be used"),
]


@pytest.mark.parametrize(("ca", "cert", "key", "reason"), FILES)
def test_the_file_that_cannot_be_used_is_named(room: Room, ca: str, cert: str, key: str, reason: str) -> None:
    """A key with a password must ask for none: a program that runs by night has no terminal."""
    room.issue("b")
    pem, locked = serialization.Encoding.PEM, serialization.BestAvailableEncryption(b"secret")
    room.put("locked.key", room.issue("a").key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))
    text = "cannot use the certificates: " + reason.format(room.folder)
    given = {"cacert": ca, "cert": cert, "key": key}
    ran = run_ctl([*(f"--{flag}={room.path(name)}" for flag, name in given.items() if name), "get", "k"])
    assert (ran.code, ran.output, ran.errors) == (128, b"", f"Error: {text}\n")
    with pytest.raises(ConfigError) as raised:
        connect(ca_file=ca and room.path(ca), cert_file=cert and room.path(cert), key_file=key and room.path(key))
    assert str(raised.value) == text
