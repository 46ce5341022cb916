"""A member's metrics, fetched and read.

Owns as much of Prometheus's text format as adding up needs: names, labels are dropped, samples of one name are added
(a counter with a label for each method becomes the sum over the methods).

>>> parse('# HELP x\\nx{a="1"} 2\\nx{a="2"} 3.5e1\\ny 1\\n')
{'x': 37.0, 'y': 1.0}
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from raftkv.client.rpc.endpoints import parse_endpoints

if TYPE_CHECKING:
    import ssl


def parse(text: str) -> dict[str, float]:
    """The sum of the samples of each name."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        try:
            samples[name] = samples.get(name, 0.0) + float(value)
        except ValueError:
            continue
    samples.pop("", None)
    return samples


def fetch(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> dict[str, float]:
    """Ask a member.

    Raises:
        OSError: it could not be reached, or did not answer with metrics.
    """
    parsed = parse_endpoints([endpoint])[0]
    secure = tls is not None if parsed.secure is None else parsed.secure
    connection = (
        http.client.HTTPSConnection(parsed.target, timeout=timeout_s, context=tls)
        if secure
        else http.client.HTTPConnection(parsed.target, timeout=timeout_s)
    )
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{endpoint}: {error}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise OSError(f"{endpoint}: status {answer.status}")
    return parse(body)
