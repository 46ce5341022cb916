"""What strangers show to be let in: simple tokens, signed tokens, names in certificates, and the flag that says which.

The oracle of tokens: only users that the samples name are let in.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from raftkv.errors import ConfigError, InvalidAuthTokenError, StatusError
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.tls import common_name_of
from raftkv.server.auth.callers import Callers, TokenAheadError
from raftkv.server.auth.jwt_tokens import JWTTokens, parse_options
from raftkv.server.auth.simple_tokens import SimpleTokens, digest_of
from raftkv.server.tls.certificates import Revocations
from tests.fuzz.target import Parse, Target

NOW_S = 1_700_000_000.0
SECRET = b"a secret of thirty-two bytes, or more"
SIMPLE = b"abcdefghijklmnopqrstuvwx"
NO_PEER = Peer("127.0.0.1:1", identity="address 127.0.0.1")


def _signed(directory: Path) -> JWTTokens:
    path = directory / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    options = parse_options(f"jwt,priv-key={path},sign-method=HS256,ttl=5m")
    assert options is not None
    return JWTTokens(options, lambda: NOW_S, lambda user, revision: b"")


def _jwt(directory: Path) -> Parse:
    tokens = _signed(directory)
    callers = Callers(tokens, lambda: 5)

    def parse(data: bytes) -> str:
        credential = callers.credential(((b"token", data),), NO_PEER)
        assert credential is not None
        assert credential.caller(9).user == b"alice", "somebody is let in whom nobody has signed for"
        return "alice"

    return parse


def _jwts() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        signed = _signed(Path(directory))
        token = signed.sign(b"alice", 7, b"").encode()
    unsigned = (
        b"eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.eyJ1c2VybmFtZSI6InJvb3QiLCJyZXZpc2lvbiI6MSwiZXhwIjo5OTk5OTk5OTk5fQ."
    )
    return [token, b"Bearer " + token, unsigned]


def _simple(directory: Path) -> Parse:
    tokens = SimpleTokens(lambda: 1.0, 300.0)
    tokens.grant(b"alice", digest_of(SIMPLE))
    callers = Callers(tokens, lambda: 5)

    def parse(data: bytes) -> str:
        name, _, value = data.partition(b"\n")
        with contextlib.suppress(TokenAheadError):
            credential = callers.credential(((name, value), (b"authorization", value)), NO_PEER)
            if credential is not None:
                assert credential.caller(9).user == b"alice"
                assert SIMPLE in value
        return ""

    return parse


def _name(data: bytes) -> str:
    """Input: lines ``field=value``, the subject of a verified certificate."""
    lines = (line.partition(b"=") for line in data.split(b"\n"))
    subject = tuple(((key.decode("latin-1"), value.decode("utf-8", "replace")),) for key, _, value in lines)
    certificate = {"subject": subject}
    peer = Peer("x", certificate, tls=True, identity="certificate x")
    found = Callers(SimpleTokens(lambda: 1.0, 300.0), lambda: 5).credential((), peer)
    # Who has no name would be a member.
    assert (found is None) == (common_name_of(certificate) == "")
    assert found is None or found.caller(9).user
    return "named" if found else "nobody"


def _options(data: bytes) -> object:
    return parse_options(data.decode("utf-8", "surrogateescape"))


DEEP = b"eyJhbGciOiI" + b"W1tb" * 400
REFUSED: tuple[type[BaseException], ...] = (InvalidAuthTokenError, StatusError)


def _revoked(directory: Path) -> Parse:
    """Input: a list of revoked certificates, in PEM or DER."""
    path, authority = directory / "list", directory / "ca"
    authority.write_bytes((TESTDATA / "authority.pem").read_bytes())

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        Revocations(str(path), str(authority))

    return parse


def _lists() -> list[bytes]:
    pem = (TESTDATA / "revoked.pem").read_bytes()
    return [pem, x509.load_pem_x509_crl(pem).public_bytes(Encoding.DER)]


TESTDATA = Path(__file__).with_name("testdata")
"""An authority whose key is gone, and a list that it signed: samples are the same in every run, so a seed is too."""

FLAGS = [
    b"simple",
    b"jwt,pub-key=a,priv-key=b,sign-method=RS256,ttl=5m",
    b"jwt,priv-key=b,sign-method=EdDSA,ttl=1h2.5m",
]

TARGETS = (
    Target("jwt", _jwt, _jwts, REFUSED, tokens=(b".", b"eyJhbGciOiJub25lIn0", DEEP, b"e30", b"bnVsbA", b"Bearer ")),
    Target("simple-token", _simple, lambda: [b"token\n" + SIMPLE + b".5", b"x\n" + SIMPLE + b".9"], REFUSED),
    Target(
        "certificate-name", lambda directory: _name, lambda: [b"commonName=alice\nO=b", b"O=x"], tokens=(b"=", b"\n")
    ),
    Target("revoked-list", _revoked, _lists, (ConfigError,), tokens=(b"-----BEGIN X509 CRL-----", b"\x30\x84")),
    Target(
        "auth-token-flag",
        lambda directory: _options,
        lambda: FLAGS,
        (ConfigError,),
        tokens=(b",ttl=", b"ns", b"HS512", b"="),
    ),
)
