"""Signed tokens (JWT): ``--auth-token jwt,pub-key=FILE,priv-key=FILE,sign-method=RS256,ttl=5m``.

    tokens = JWTTokens(parse_options("jwt,pub-key=a.pem,sign-method=ES256"), time.time)
    tokens.find(b"eyJ...")                 # a Signed, or None
    tokens.sign(b"alice", 7, hash)         # if the member has the private key

Claims are etcd's, so tokens of etcd with the same key are valid here, and vice versa: ``username``, ``revision`` of the
users when the token was signed, ``exp``. A token of an older revision is refused with "revision of auth store is old":
its owner has to get another. This check does not apply to calls that need root (``apply/auth/rights``), so a token
signed here also names the password that it was given for (``raftkv_password``), and ends when that password changes.

- Only the algorithm of the flag is allowed, and the token must name it. ``none`` is never allowed. A public key is
  never used as a secret: with HS256 the secret is the file ``priv-key``, as in etcd.
- ``exp`` is required, and must not have passed.
- A key file that others may read or write is refused; so is a secret shorter than its hash (RFC 7518, 3.2).
- Verified and refused tokens are remembered by their digests: verifying costs 30 to 700 us, a lookup 1 us.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from raftkv import errors
from raftkv.apply.wire import Caller
from raftkv.server.tls.certificates import decoding

T = TypeVar("T")

RSA: Final = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
ECDSA: Final = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}
HMAC: Final = frozenset(("HS256", "HS384", "HS512"))
EDDSA: Final = "EdDSA"
TTL_DEFAULT_S: Final = 300.0
TOKEN_BYTES_MAX: Final = 8 * 1024
"""Longer tokens are refused unread."""

VERIFIED_MAX: Final = 10_000
"""Verified tokens that are remembered."""

REFUSED_MAX: Final = 10_000
"""Refused tokens that are remembered because they can never be valid; kept apart, since any client can invent some."""

PASSWORD: Final = "raftkv_password"
"""The claim that names the password, by a digest of its salted hash: setting the same password again is a change."""

_DIGITS: Final = 32

HashOf = Callable[[bytes, int], bytes | None]
"""Returns the current hash of a user's password; None: the users here are older than the given revision."""

_KEYS: Final = frozenset(("pub-key", "priv-key", "sign-method", "ttl"))
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d*)?(?:ns|us|ms|s|m|h))+")
_PART: Final = re.compile(r"(\d+(?:\.\d*)?)(ns|us|ms|s|m|h)")


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed flag.

    Attributes:
        method: the only allowed algorithm.
        public_file, private_file: key files; empty: none.
        ttl_s: lifetime of tokens signed here.
    """

    method: str
    public_file: str = ""
    private_file: str = ""
    ttl_s: float = TTL_DEFAULT_S


def parse_options(text: str) -> Options | None:
    """Parse ``--auth-token``; None: simple tokens.

    Arguments:
        text: value of the flag.

    Raises:
        ConfigError: the value is invalid.
    """
    kind, *pairs = text.split(",")
    if kind == "simple" and not pairs:
        return None
    if kind != "jwt":
        raise errors.ConfigError(f"--auth-token must be simple or jwt,... (set to {kind!r})")
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in _KEYS or not equals or key in options:
            raise errors.ConfigError(f"--auth-token: {key!r} is not an option, has no value, or is given twice")
        options[key] = value
    method = options.get("sign-method", "")
    if method not in RSA | set(ECDSA) | HMAC | {EDDSA}:
        raise errors.ConfigError(f"--auth-token: sign-method {method!r} is none of RS, PS, ES, HS 256 to 512, EdDSA")
    if not (options.get("priv-key") or (options.get("pub-key") and method not in HMAC)):
        raise errors.ConfigError("--auth-token: a key is missing: priv-key (the secret of HS*), or pub-key to verify")
    return Options(method, options.get("pub-key", ""), options.get("priv-key", ""), _ttl_s(options.get("ttl", "5m")))


def _ttl_s(text: str) -> float:
    if not _DURATION.fullmatch(text):
        raise errors.ConfigError(f"--auth-token: ttl {text!r} is not a duration such as 5m")
    ttl_s = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if ttl_s <= 0:
        raise errors.ConfigError("--auth-token: ttl must be >0")
    return ttl_s


@dataclass(eq=False, repr=False, slots=True)
class Signed:
    """A user with a verified token.

    Attributes:
        user: name of the user.
        expires_at: when the token expires, in seconds since the epoch.
    """

    user: bytes
    _caller: Caller
    _begins_at: float
    expires_at: float | None
    _password: str
    _clock: Callable[[], float]
    _hash_of: HashOf
    _hash: bytes | None = None
    """The password hash that matched last, so that most calls compute no digest."""

    @property
    def is_over(self) -> bool:
        """Whether the token has expired, or its password has changed."""
        return (self.expires_at is not None and self._clock() >= self.expires_at) or not self._has_password()

    def _has_password(self) -> bool:
        if not self._password:
            return True  # another program has signed it, without this claim
        found = self._hash_of(self.user, self._caller.auth_revision)
        if found is None or found == self._hash:
            return True
        if digest_of(found) != self._password:
            return False
        self._hash = found
        return True

    @property
    def is_ahead(self) -> bool:
        """Whether a member signed the token for users newer than those here. Other programs choose any revision."""
        return self._password != "" and self._hash_of(self.user, self._caller.auth_revision) is None

    @property
    def is_good(self) -> bool:
        """Whether the token is valid now: it has begun and has not ended."""
        return not self.is_over and self._begins_at <= self._clock()

    def caller(self, auth_revision: int) -> Caller:
        """Return the user as a caller, under the revision at which the token was signed."""
        return self._caller

    def hold(self) -> None:
        """Do nothing: the token ends at its own time."""

    release = hold


class JWTTokens:
    """Verifies tokens, and signs them if there is a key for it.

    Arguments:
        options: options of the flag.
        clock: returns seconds since the epoch.
        hash_of: returns the current password hash of a user.

    Raises:
        ConfigError: a key cannot be used.
    """

    def __init__(
        self, options: Options, clock: Callable[[], float], hash_of: HashOf = lambda user, revision: None
    ) -> None:
        self._method = options.method
        self._ttl_s = options.ttl_s
        self._clock = clock
        self._hash_of = hash_of
        self._signing, self._verifying = _keys(options)
        # Imported at the start, and only if the flag needs it: a running member imports nothing.
        self._jwt = importlib.import_module("jwt")
        self._verified: OrderedDict[bytes, Signed] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def find(self, token: bytes) -> Signed | None:
        """Return the user of a token; None: the token is not valid, or no longer.

        Arguments:
            token: token sent by the client.
        """
        if len(token) > TOKEN_BYTES_MAX:
            return None
        digest = hashlib.sha256(token).digest()
        signed = self._verified.get(digest)
        if signed is None:
            if digest in self._refused:
                return None
            signed = self._verify(token)
            if signed is None:
                _remember(self._refused, digest, None, REFUSED_MAX)
                return None
            _remember(self._verified, digest, signed, VERIFIED_MAX)
        return signed if signed.is_good else None

    def _verify(self, token: bytes) -> Signed | None:
        """Return the content of a token, even before its begin or after its end; None: it can never be valid."""
        jwt = self._jwt
        try:
            claims = jwt.decode(
                token,
                self._verifying,
                algorithms=[self._method],
                # Times are checked below, with this object's clock (exp and nbf); other claims are not used.
                options={
                    "require": ["exp"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": False,
                    "verify_iss": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except (jwt.InvalidTokenError, ValueError, RecursionError):  # the last: nested, in PyJWT 2.13
            return None
        user, revision, expires_at = claims.get("username"), _number(claims, "revision"), _number(claims, "exp")
        if not isinstance(user, str) or not user or revision is None or expires_at is None:
            return None
        begins_at = _number(claims, "nbf") if "nbf" in claims else 0.0
        password = claims.get(PASSWORD, "")
        if begins_at is None or not isinstance(password, str):
            return None
        caller = Caller(user.encode("utf-8", "surrogatepass"), int(revision))
        return Signed(caller.user, caller, begins_at, expires_at, password, self._clock, self._hash_of)

    def sign(self, user: bytes, auth_revision: int, password_hash: bytes) -> str:
        """Return a token.

        Arguments:
            user: user with the right password.
            auth_revision: revision of the users when it was checked.
            password_hash: hash of that password.

        Raises:
            TokenNotSignedError: this member has no private key.
        """
        if self._signing is None:
            raise errors.TokenNotSignedError
        claims = {
            "username": user.decode("utf-8", "replace"),
            "revision": auth_revision,
            "exp": int(self._clock() + self._ttl_s),
            PASSWORD: digest_of(password_hash),
        }
        token: str = self._jwt.encode(claims, self._signing, algorithm=self._method)
        return token


def digest_of(password_hash: bytes) -> str:
    """Return the value of the password claim."""
    return hashlib.sha256(password_hash).hexdigest()[:_DIGITS]


def _remember(found: OrderedDict[bytes, T], digest: bytes, what: T, most: int) -> None:
    if len(found) >= most:
        found.popitem(last=False)
    found[digest] = what


def _number(claims: dict[str, Any], name: str) -> float | None:
    """Return a claim that is a number >= 0, else None. Infinity and NaN are numbers to Python's JSON parser."""
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        return None
    return float(value)


def _keys(options: Options) -> tuple[Any, Any]:
    """Return the keys to sign with (None: there is none) and to verify with."""
    private = _read(options.private_file) if options.private_file else b""
    public = _read(options.public_file) if options.public_file else b""
    if options.method in HMAC:
        size_min = int(options.method[2:]) // 8
        if len(private) < size_min:
            raise errors.ConfigError(
                f"--auth-token: the secret in {options.private_file} has less than {size_min} bytes"
            )
        return private, private
    signing = _load(options.private_file, private, options.method, is_private=True) if private else None
    verifying = _load(options.public_file, public, options.method, is_private=False) if public else None
    if signing is not None and verifying is not None and signing.public_key() != verifying:
        raise errors.ConfigError("--auth-token: pub-key is not the public part of priv-key")
    if verifying is None and signing is not None:
        verifying = signing.public_key()
    return signing, verifying


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise errors.ConfigError(f"--auth-token: {name}: {error.strerror}") from None


def _load(name: str, pem: bytes, method: str, *, is_private: bool) -> Any:
    """Return a key of the type that the method needs. Errors contain none of its bytes."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.x509 import load_pem_x509_certificate

    try:
        with decoding():
            if is_private:
                key: Any = serialization.load_pem_private_key(pem, None)
            elif b"CERTIFICATE" in pem:
                key = load_pem_x509_certificate(pem).public_key()
            else:
                key = serialization.load_pem_public_key(pem)
    except ValueError:
        kind = "private" if is_private else "public"
        raise errors.ConfigError(f"--auth-token: {name} holds no usable {kind} key") from None
    if method in RSA:
        fits = isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey)
    elif method in ECDSA:
        fits = (
            isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and key.curve.name == ECDSA[method]
        )
    else:
        fits = isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey)
    if not fits:
        raise errors.ConfigError(f"--auth-token: the key in {name} is not one for {method}")
    return key
