"""``--discovery-srv``: endpoints that the SRV records of a domain name, as etcdctl finds them.

    _etcd-client-ssl._tcp.DOMAIN   ->  https://host:port
    _etcd-client._tcp.DOMAIN       ->  http://host:port, unless --insecure-discovery=false

``--discovery-srv-name X`` appends ``-X`` to the names of the services. If only one of the two has records, that is
enough. Read again by each command; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from raftkv.cli.exits import ERROR, CommandError
from raftkv.cli.goflags.values import quote

TIMEOUT_S: Final = 5.0
"""For both lookups, each."""
_MISSING: Final = "--discovery-srv needs the package dnspython: pip install 'raftkv[dns]'"


def discover(domain: str, service_name: str, *, insecure: bool, remark: Callable[[str], None]) -> list[str]:
    """Return the endpoints of a cluster.

    Arguments:
        domain: whose records are asked for.
        service_name: suffix of the names of the services; empty: none.
        insecure: whether endpoints without TLS are taken.
        remark: told of each that is not.

    Raises:
        CommandError: neither service has records, or nobody can be asked.
    """
    try:
        from dns.exception import DNSException
        from dns.resolver import NoAnswer, resolve
    except ImportError:
        raise CommandError(_MISSING, ERROR) from None
    found: list[str] = []
    failures: list[str] = []
    for kind, scheme in (("etcd-client-ssl", "https"), ("etcd-client", "http")):
        service = f"{kind}-{service_name}" if service_name else kind
        name = f"_{service}._tcp.{domain}"
        try:
            answer = resolve(name, "SRV", lifetime=TIMEOUT_S)
        except NoAnswer:
            failures.append(f"{name} has no SRV records")
        except (DNSException, OSError) as error:
            failures.append(f"lookup {name}: {str(error).rstrip('.')}")
        else:
            records = sorted(answer, key=lambda record: (record.priority, -record.weight))
            hosts = ((record.target.to_text(omit_final_dot=True), record.port) for record in records)
            found += [f"{scheme}://{host}:{port}" for host, port in hosts]
    if len(failures) == 2:
        raise CommandError(f"dns lookup errors: {failures[0]} and {failures[1]}", ERROR)
    if insecure:
        return found
    for endpoint in found:
        if endpoint.startswith("http://"):
            remark(f"ignoring discovered insecure endpoint {quote(endpoint)}")
    return [endpoint for endpoint in found if endpoint.startswith("https://")]
