"""The words of ``raftkv certs``: make the certificates of a cluster, list, renew and revoke them.

    raftkv certs tls a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 --client alice

Exit codes: 0 done, 1 it failed (one line says what, nothing was written over), 2 a flag that cannot be read.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.daemons import daemon
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.pflag import BOOL, LIST, UINT, Flag
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.errors import RaftKVError

if TYPE_CHECKING:
    from raftkv.cli.certs.folder import Folder, Made

CLIENT_PORT: Final = 2379
PEER_PORT: Final = 2380

_JSON = Flag("json", BOOL, usage="print JSON")
_DAYS = Flag("days", UINT, 365, usage="days that certificates are valid")
_MEMBERS = Flag("member", LIST, usage="members by name, comma-separated")
_CLIENTS = Flag("client", LIST, usage="clients by name, comma-separated")
FLAGS: Final[dict[str, tuple[Flag, ...]]] = {
    "": (
        Flag("client", LIST, usage="clients to make certificates for, comma-separated: each is the user of its name"),
        _DAYS,
        Flag("ca-days", UINT, 3650, usage="days that authorities are valid"),
        _JSON,
    ),
    "list": (_JSON,),
    "renew": (_MEMBERS, _CLIENTS, _DAYS, _JSON),
    "revoke": (_MEMBERS, _CLIENTS, _JSON),
}
_USAGE = """\
Usage:
  raftkv certs DIRECTORY NAME=HOST[,HOST...]... [flags]   make authorities, and certificates of members and clients
  raftkv certs list DIRECTORY                             print the certificates and when they end
  raftkv certs renew DIRECTORY [flags]                    replace certificates by new ones for the same names
  raftkv certs revoke DIRECTORY [flags]                   put certificates on the lists of revoked ones, and delete them

HOST is a name or IP address at which a member is reached, without a port; the first one is advertised. The
command prints the flags to start the members with. Called again it adds to what is there, and never writes over it;
members that are added join the others, for which each needs a client's certificate until it votes.
Copy DIRECTORY/members/NAME to the host of the member NAME, and keep ca.key and peer-ca.key away from all of them.
Members take up renewed files and lists (--client-crl-file, --peer-crl-file) while they run.

Examples:
  raftkv certs tls a=10.0.0.1 b=10.0.0.2 c=10.0.0.3,c.example.org --client root,alice
  raftkv certs tls --client bob
  raftkv certs renew tls --member a
  raftkv certs revoke tls --client alice"""


def main(words: Sequence[str]) -> int:
    """Run ``raftkv certs``.

    Arguments:
        words: the command line after ``certs``.

    Returns:
        The exit code.

    Raises:
        CommandError: it failed; one line.
    """
    command = words[0] if words and words[0] in FLAGS and words[0] else ""
    try:
        parsed = pflag.parse([replace(flag, ours=True) for flag in FLAGS[command]], words[1:] if command else words)
    except pflag.HelpRequested:
        return _help()
    except pflag.FlagError as error:
        raise CommandError(str(error), BAD_FLAGS) from None
    if not parsed.arguments or (command and len(parsed.arguments) > 1):
        raise CommandError(f"certs {command}".strip() + " takes a directory; see raftkv certs --help", BAD_FLAGS)
    members = _members(parsed.arguments[1:])
    _refuse_doubles(parsed.values)
    if command in ("renew", "revoke") and not (parsed.values["member"] or parsed.values["client"]):
        raise CommandError(f"certs {command}: --member or --client says which", BAD_FLAGS)
    if "days" in parsed.values and not 0 < min(parsed.values["days"], parsed.values.get("ca-days", 1)) < 100_000:
        raise CommandError("--days and --ca-days must be from 1 to 99999", BAD_FLAGS)
    from raftkv.cli.certs.folder import Folder

    try:
        return _run(command, Folder(parsed.arguments[0], is_new=not command), members, parsed.values)
    except RaftKVError as error:
        raise CommandError(f"certs: {' '.join(str(error).split())}", ERROR) from None


def _help() -> int:
    print(_USAGE)
    for command, flags in FLAGS.items():
        print(f"\nFlags{f' of {command}' if command else ''}:")
        daemon.print_flags(flags)
    return SUCCESS


def _members(words: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for word in words:
        name, separator, hosts = word.partition("=")
        found = [host.strip().strip("[]") for host in hosts.split(",") if host.strip()]
        if not separator or not found:
            raise CommandError(f"certs: {word!r} is not NAME=HOST[,HOST...]", BAD_FLAGS)
        if name in members:
            raise CommandError(f"certs: member {name} is given twice", BAD_FLAGS)
        members[name] = found
    return members


def _refuse_doubles(values: Mapping[str, Any]) -> None:
    for flag in ("member", "client"):
        for name, times in Counter(values.get(flag, ())).items():
            if times > 1:
                raise CommandError(f"certs: {flag} {name} is given twice", BAD_FLAGS)


def _run(command: str, folder: Folder, members: Mapping[str, Sequence[str]], values: Mapping[str, Any]) -> int:
    is_json = values["json"]
    if command == "list":
        _print(folder.all(), {}, is_json=is_json)
    elif command == "renew":
        _print(folder.renew(values["member"], values["client"], values["days"]), {}, is_json=is_json)
    elif command == "revoke":
        lists = [str(path) for path in folder.revoke(values["member"], values["client"])]
        folder.remove(values["member"], values["client"])
        print(json.dumps({"lists": lists}) if is_json else "\n".join(f"revoked by {path}" for path in lists))
    else:
        others = folder.hosts()
        made = folder.make(members, values["client"], values["days"], values["ca-days"])
        _print(made, {name: _start(folder, name, members, others) for name in members}, is_json=is_json)
        if not is_json:
            _print_notes(members, others)
    return SUCCESS


def _print_notes(members: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]) -> None:
    """Print what the commands above do not show."""
    if members and _contact(others):
        print(
            "\nUntil it votes, each needs a client's certificate (root's, if there are users): RAFTKV_CERT, RAFTKV_KEY"
        )
    alike = Counter(hosts[0] for hosts in members.values())
    if alike and max(alike.values()) > 1:
        print("\nMembers on the same host need ports of their own: change them in all the commands.")


def _contact(others: Mapping[str, Sequence[str]]) -> str:
    """Return a host by which members that are there already are reached; empty: there is none."""
    return next((host for hosts in others.values() for host in hosts if "*" not in host), "")


def _start(
    folder: Folder, name: str, members: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]
) -> list[str]:
    """The words that start a member with its certificates: as a founder, or to join those that are there already."""
    at = folder.member_folder(name)
    client = f"https://{_in_url(members[name][0])}:{CLIENT_PORT}"
    contact = _contact(others)
    peers = {member: f"https://{_in_url(hosts[0])}:{PEER_PORT}" for member, hosts in members.items()}
    flags = {
        "name": name,
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peers[name],
        "initial-advertise-peer-urls": peers[name],
        "initial-cluster": "" if contact else ",".join(f"{member}={url}" for member, url in peers.items()),
        "cert-file": at / "server.crt",
        "key-file": at / "server.key",
        "trusted-ca-file": at / "ca.crt",
        "peer-cert-file": at / "peer.crt",
        "peer-key-file": at / "peer.key",
        "peer-trusted-ca-file": at / "peer-ca.crt",
    }
    program = ["raftkv", "join", f"https://{_in_url(contact)}:{CLIENT_PORT}"] if contact else ["raftkv"]
    return [*program, *(word for flag, value in flags.items() if value for word in (f"--{flag}", str(value)))]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _print(made: Sequence[Made], starts: Mapping[str, Sequence[str]], *, is_json: bool) -> None:
    if is_json:
        certificates = [
            {
                "kind": one.kind,
                "name": one.name,
                "hosts": one.hosts,
                "expires": one.expires.isoformat(),
                "path": str(one.path),
            }
            for one in made
        ]
        print(
            json.dumps({"certificates": certificates, "start": {name: list(words) for name, words in starts.items()}})
        )
        return
    from raftkv.cli.output.table import render

    rows = [[one.kind, one.name, ",".join(one.hosts), one.expires.strftime("%Y-%m-%d"), str(one.path)] for one in made]
    print(render(["kind", "name", "hosts", "expires", "file"], rows))
    for words in starts.values():
        print(f"\n{shlex.join(words)}")
