"""Why an endpoint did not answer, in plain words, and what to do about it where the words alone do not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from raftkv.errors import ContextDeadlineExceededError

_OURS: Final = "--cert and --key, cert_file and key_file"
_AUTHORITY: Final = "name the file of the authority that signed it: --cacert, ca_file"
_ADVICE: Final = {
    "none was shown": f"show a client's: {_OURS}",
    "does not know the authority of our certificate": f"show one that its authority signed: {_OURS}",
    "our certificate has expired": f"renew it, or show another: {_OURS}",
    "our certificate is revoked": f"show another: {_OURS}",
    "refused our certificate": f"its log says why; to show another: {_OURS}",
    "unable to get local issuer certificate": _AUTHORITY,
    "self-signed certificate": _AUTHORITY,
    "certificate has expired": "renew it on that member; a clock that is ahead says so, too",
    "certificate is not yet valid": "set the clock, here or where it was made",
    "IP address mismatch": "use a name that the certificate has, or make it anew with this address",
    "Hostname mismatch": "use a name that the certificate has, or make it anew with this one",
    "does not speak TLS": "write http:// before it to reach it without TLS",
    "closed the connection before its HTTP/2 settings came": "if it speaks TLS, write https:// before it",
}
"""Words in a reason, and what to do; the first row that fits counts."""


def plain_failures(failures: Mapping[str, str]) -> dict[str, str]:
    """Reword why each endpoint did not answer, in plain words instead of those of Go's clients.

    Arguments:
        failures: endpoint to the text of its last failure.
    """
    return {endpoint: plain(text) for endpoint, text in failures.items()}


def plain(text: str) -> str:
    """Return a reason in plain words, with what to do in brackets.

    Arguments:
        text: of a failure to connect or to call.

    >>> plain('connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: refused"')
    'connect: refused'
    >>> plain("the other end does not speak TLS")
    'the other end does not speak TLS (write http:// before it to reach it without TLS)'
    """
    text = _unframed(text)
    advice = next((advice for words, advice in _ADVICE.items() if words in text), "")
    return f"{text} ({advice})" if advice else text


def _unframed(text: str) -> str:
    """Strip a failure to connect of the frame that Go's clients print round it."""
    text = re.sub(r"^rpc error: code = \w+ desc = ", "", text)
    if text == ContextDeadlineExceededError.text:
        return "connected, but did not answer"
    if not text.startswith('connection error: desc = "'):
        return text
    text = re.sub(r"^.*dial (?:tcp|unix) \S+: ", "", text[26:].removesuffix('"'))
    # Under TLS 1.3 a client learns only then what the other end thinks of its certificate.
    return re.sub(r"^transport: \S+ (?=closed)(closed the connection before its HTTP/2 settings came: )?", "", text)
