"""A member's metrics, fetched and added up: samples of one name become their sum, over methods, say.

>>> sums('# HELP x\\nx{a="1"} 2\\nx{a="2"} 3.5e1\\ny 1\\n')
{'x': 37.0, 'y': 1.0}
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from raftkv.client.rpc.endpoints import parse_endpoints

if TYPE_CHECKING:
    import ssl


def sums(text: str) -> dict[str, float]:
    """Return the sum of the samples of each name.

    Raises:
        ValueError: the text is not in Prometheus's format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def fetch(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> dict[str, float]:
    """Ask a member.

    Arguments:
        endpoint: of the member.
        tls: what to trust and to show; None: plain HTTP, unless the endpoint says https.
        timeout_s: for the connection, and for each read.

    Returns:
        The sums of its samples, by name.

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
    try:
        return sums(body)
    except ValueError as error:
        raise OSError(f"{endpoint}: no metrics: {error}") from None
