"""A member's metrics, fetched and added up: samples of one name become their sum, over methods, say.

>>> sums('# HELP x\\nx{a="1"} 2\\nx{a="2"} 3.5e1\\ny 1\\n')
{'x': 37.0, 'y': 1.0}
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from raftkv.client.rpc.transport import for_http
from raftkv.urls import parse_endpoints

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


def quantile(text: str, family_name: str, share: float, count_min: int = 1) -> float | None:
    """Return a bound below which that share of a histogram's figures lie; of several series the largest.

    Arguments:
        text: in Prometheus's format.
        family_name: of the histogram.
        share: between 0 and 1.
        count_min: series of fewer figures do not count.

    Returns:
        The end of a bucket, perhaps infinity; None: there are too few figures.

    Raises:
        ValueError: the text is not in Prometheus's format.

    >>> quantile('# TYPE x histogram\\nx_bucket{le="1"} 5\\nx_bucket{le="2"} 9\\nx_bucket{le="+Inf"} 9\\n', "x", 0.5)
    1.0
    """
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == family_name else ():
            if sample.name == f"{family_name}_bucket":
                labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
    found = [_bound(sorted(buckets), share) for buckets in series.values() if max(buckets)[1] >= count_min]
    return max(found, default=None)


def _bound(buckets: list[tuple[float, float]], share: float) -> float:
    return next(end for end, count in buckets if count >= share * buckets[-1][1])


def fetch(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> dict[str, float]:
    """Ask a member for the sums of its samples, by name; as ``fetch_text``."""
    try:
        return sums(fetch_text(endpoint, tls, timeout_s))
    except ValueError as error:
        raise OSError(f"{endpoint}: no metrics: {error}") from None


def connect(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection for HTTP to a member, not opened yet.

    Arguments:
        endpoint, tls, timeout_s: as of ``fetch_text``.

    Raises:
        OSError: a certificate cannot be read any more, or it is a socket file.
    """
    parsed = parse_endpoints([endpoint])[0]
    if parsed.path:
        raise OSError(f"{endpoint}: HTTP is asked for at host:port only")
    if tls is not None if parsed.secure is None else parsed.secure:
        context = None if tls is None else for_http(tls)
        return http.client.HTTPSConnection(parsed.target, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(parsed.target, timeout=timeout_s)


def fetch_text(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> str:
    """Ask a member for its metrics.

    Arguments:
        endpoint: of the member.
        tls: what to trust and to show; None: plain HTTP, unless the endpoint says https.
        timeout_s: for the connection, and for each read.

    Raises:
        OSError: it could not be reached, or did not answer with metrics.
    """
    connection = connect(endpoint, tls, timeout_s)
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
    return body
