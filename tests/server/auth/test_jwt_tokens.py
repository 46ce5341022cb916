"""Signed tokens: validity, refused settings, and exchange of tokens between raftkv and etcd in both directions."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from raftkv.apply.wire import Caller
from raftkv.errors import ConfigError, TokenNotSignedError
from raftkv.pb import rpc_pb2
from raftkv.server.auth import jwt_tokens
from raftkv.server.auth.jwt_tokens import JWTTokens, parse_options
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, Cluster
from tests.security import users

METHODS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "HS256", "HS512"]
CURVES: dict[str, Callable[[], ec.EllipticCurve]] = {"256": ec.SECP256R1, "384": ec.SECP384R1, "512": ec.SECP521R1}
SECRET = b"a secret of a cluster, 32 bytes!" * 2


@functools.cache
def rsa_key() -> rsa.RSAPrivateKey:
    """One for all tests, made only where they run: it takes a tenth of a second."""
    return rsa.generate_private_key(65537, 2048)


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def write_key(path: Path, method: str) -> str:
    """Write the keys of a method; return the value of --auth-token."""
    if method.startswith("HS"):
        private, pem = path / "secret", SECRET
    else:
        if method.startswith("ES"):
            key: Any = ec.generate_private_key(CURVES[method[2:]]())
        elif method == "EdDSA":
            key = ed25519.Ed25519PrivateKey.generate()
        else:
            key = rsa_key()
        private, pem = path / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (path / "key.pub").write_bytes(public)
    private.write_bytes(pem)
    private.chmod(0o600)
    public_option = "" if method.startswith("HS") else f"pub-key={path / 'key.pub'},"
    return f"jwt,{public_option}priv-key={private},sign-method={method},ttl=10m"


def make(text: str, clock: Callable[[], float]) -> JWTTokens:
    options = parse_options(text)
    assert options is not None
    return JWTTokens(options, clock)


def signed(path: Path, **claims: Any) -> bytes:
    return jwt.encode(claims, SECRET, algorithm="HS256").encode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def secret(tmp_path: Path, clock: Clock) -> JWTTokens:
    return make(write_key(tmp_path, "HS256"), clock)


@pytest.mark.parametrize("method", METHODS)
def test_signed_token_is_valid_until_it_expires(tmp_path: Path, clock: Clock, method: str) -> None:
    tokens = make(write_key(tmp_path, method), clock)
    token = tokens.sign(b"alice", 7, b"").encode()
    for _ in range(2):
        found = tokens.find(token)
        assert found is not None
        assert found.caller(9) == Caller(b"alice", 7)
    head, body, tail = token.split(b".")
    assert tokens.find(b".".join((head, body, tail[:10] + bytes((tail[10] ^ 1,)) + tail[11:]))) is None
    clock.now_s += 601
    assert tokens.find(token) is None


def test_a_member_without_the_private_key_verifies_and_does_not_sign(tmp_path: Path, clock: Clock) -> None:
    text = write_key(tmp_path, "ES256")
    token = make(text, clock).sign(b"alice", 7, b"").encode()
    tokens = make(f"jwt,pub-key={tmp_path / 'key.pub'},sign-method=ES256", clock)
    assert tokens.find(token) is not None
    with pytest.raises(TokenNotSignedError):
        tokens.sign(b"alice", 7, b"")


@pytest.mark.parametrize(
    "claims",
    [
        {"username": "alice", "revision": 7},
        {"username": "alice", "revision": 7, "exp": 1_800_000_000 - 1},
        {"username": "alice", "revision": 7, "exp": "soon"},
        {"username": "alice", "revision": 7, "exp": 1e400},
        {"username": "alice", "revision": 7, "exp": -1},
        {"username": "alice", "exp": 1_900_000_000},
        {"username": "alice", "revision": "7", "exp": 1_900_000_000},
        {"username": "alice", "revision": True, "exp": 1_900_000_000},
        {"username": "alice", "revision": -1, "exp": 1_900_000_000},
        {"username": "", "revision": 7, "exp": 1_900_000_000},
        {"username": "alice", "revision": 7, "exp": 1_900_000_000, "nbf": 1_890_000_000},
        {"username": "alice", "revision": 7, "exp": 1_900_000_000, "nbf": "later"},
        {"username": ["alice"], "revision": 7, "exp": 1_900_000_000},
        {"username": "alice", "revision": 7, "exp": 1_900_000_000, "raftkv_password": 5},
        {"revision": 7, "exp": 1_900_000_000},
    ],
)
def test_claims_that_are_missing_or_nonsense_make_no_token(tmp_path, secret, claims):
    assert secret.find(signed(tmp_path, **claims)) is None


def test_other_claims_have_no_owner(tmp_path: Path, secret: JWTTokens) -> None:
    more = {"aud": "x", "iss": "y", "nbf": 1_800_000_000, "iat": 1_900_000_000, "sub": 5, "jti": 6}
    assert secret.find(signed(tmp_path, username="alice", revision=7, exp=1_900_000_000, **more)) is not None


def test_the_algorithm_is_the_flags_and_never_the_tokens(tmp_path: Path, clock: Clock) -> None:
    tokens = make(write_key(tmp_path, "RS256"), clock)
    claims = {"username": "root", "revision": 7, "exp": 1_900_000_000}
    public = (tmp_path / "key.pub").read_bytes()

    def part(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    assert tokens.find(part({"alg": "none", "typ": "JWT"}) + b"." + part(claims) + b".") is None
    assert tokens.find(part({"alg": "None", "typ": "JWT"}) + b"." + part(claims) + b".") is None
    nested = base64.urlsafe_b64encode(b"[" * 6000).rstrip(b"=")  # PyJWT 2.13 raises RecursionError
    assert tokens.find(nested + b"." + part(claims) + b".x") is None
    # The public key, which is no secret, taken for the secret of HS256.
    import hashlib
    import hmac

    start = part({"alg": "HS256", "typ": "JWT"}) + b"." + part(claims)
    tag = base64.urlsafe_b64encode(hmac.digest(public, start, hashlib.sha256)).rstrip(b"=")
    assert tokens.find(start + b"." + tag) is None
    other = jwt.encode(claims, rsa_key(), algorithm="RS512").encode()
    assert tokens.find(other) is None
    assert tokens.find(jwt.encode(claims, rsa_key(), algorithm="RS256").encode()) is not None


@pytest.mark.parametrize("token", [b"", b".", b"..", b"a.b.c", b"\xff\xfe.\x00.\x01", b"x" * 100_000, b"x.1"])
def test_invalid_token_names_no_user(secret: JWTTokens, token: bytes) -> None:
    assert secret.find(token) is None


def test_verified_tokens_are_remembered_up_to_a_number(secret: JWTTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "VERIFIED_MAX", 5)
    for number in range(20):
        secret.find(secret.sign(b"alice", number, b"").encode())
    assert len(secret._verified) == 5


def test_refused_token_is_refused_again_without_a_signature_check(tmp_path, secret, clock, monkeypatch):
    """Look once: that takes up to a millisecond of the loop, and one stream asks for each of its watches."""
    looks: list[bytes] = []
    decode = jwt.decode

    def counted(token: bytes, *more: Any, **options: Any) -> Any:
        looks.append(token)
        return decode(token, *more, **options)

    monkeypatch.setattr(jwt, "decode", counted)
    claims = {"username": "alice", "revision": 7}
    forged = jwt.encode({**claims, "exp": 1_900_000_000}, b"x" * 32, algorithm="HS256").encode()
    over, early = (
        signed(tmp_path, **claims, exp=clock.now_s - 1),
        signed(tmp_path, **claims, exp=clock.now_s + 20, nbf=clock.now_s + 10),
    )
    for token in (forged, over, early):
        for _ in range(3):
            assert secret.find(token) is None
        assert looks == [token]
        looks.clear()
    clock.now_s += 10
    assert secret.find(early) is not None
    clock.now_s += 10
    assert secret.find(early) is None
    assert looks == []
    monkeypatch.setattr(jwt_tokens, "REFUSED_MAX", 5)
    good = secret.sign(b"alice", 7, b"").encode()
    assert secret.find(good) is not None
    for number in range(20):
        assert secret.find(b"%d.b.c" % number) is None
    assert len(secret._refused) == 5
    looks.clear()
    assert secret.find(good) is not None
    assert looks == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("other", "--auth-token must be simple or jwt"),
        ("simple,x=y", "--auth-token must be simple or jwt"),
        ("jwt", "sign-method '' is none of"),
        ("jwt,sign-method=none,priv-key=x", "sign-method 'none' is none of"),
        ("jwt,sign-method=RS256", "a key is missing"),
        ("jwt,sign-method=HS256,pub-key=x", "a key is missing"),
        ("jwt,sign-method=RS256,priv-key=x,ttl=soon", "'soon' is not a duration"),
        ("jwt,sign-method=RS256,priv-key=x,ttl=0s", "ttl must be >0"),
        ("jwt,sign-method=RS256,sign-method=RS512,priv-key=x", "'sign-method' is not an option, has no value, or"),
        ("jwt,sign-method=RS256,priv-key=/nowhere/at/all", "/nowhere/at/all: No such file or directory"),
    ],
)
def test_invalid_flag_is_explained(clock: Clock, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(text, clock)
    assert says in str(error.value)


def test_a_key_of_another_kind_is_refused_without_a_byte_of_it(tmp_path: Path, clock: Clock) -> None:
    text = write_key(tmp_path, "RS256")
    with pytest.raises(ConfigError, match="is not one for ES256"):
        make(text.replace("RS256", "ES256"), clock)
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\nCanary\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"key\.pem holds no usable private key") as error:
        make(text, clock)
    assert "Canary" not in str(error.value)
    (tmp_path / "key.pem").write_bytes(b"short")
    with pytest.raises(ConfigError, match="less than 32 bytes"):
        make(f"jwt,priv-key={tmp_path / 'key.pem'},sign-method=HS256", clock)


@pytest.mark.long
@pytest.mark.parametrize("method", ["RS256", "PS384", "ES256", "HS256"])
def test_tokens_of_etcd_are_good_here_and_ours_are_good_there(tmp_path: Path, method: str) -> None:
    import time

    text = write_key(tmp_path, method)
    tokens = make(text, time.time)
    with Cluster(ETCD_FAST, flags=("--auth-token", text)) as cluster, Wire(cluster.endpoints) as wire:
        theirs = users.make_users(wire)["alice"]
        found = tokens.find(theirs.encode())
        assert found is not None
        assert found.user == b"alice"
        revision = found.caller(0).auth_revision
        ours = tokens.sign(b"alice", revision, b"")
        answer = wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"foo"), metadata=(("token", ours),))
        assert (answer.code, answer.message.count) == ("OK", 1)
        stale = tokens.sign(b"alice", revision - 1, b"")
        answer = wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"foo"), metadata=(("token", stale),))
        # Here, as in etcd 3.6: "etcdserver: revision of auth store is old".
        assert answer.text == "auth: revision in header is old"
