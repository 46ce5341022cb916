"""The commands of ``raftkv``, each with the module whose ``main`` runs it; ``raftkvctl`` and ``raftkvutl`` have trees.

An error line names the program of a command that was typed after the name of another, so this is known without imports.
Left out: ``serve``, ``version`` and ``help``, which are ways to call the server itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

API_VERSION: Final = "3.6"
"""Version of etcd's API that is spoken."""

COMMANDS: Final[Mapping[str, str]] = {
    "cluster": "raftkv.cli.cluster.command",
    "backup": "raftkv.cli.backup.command",
    "doctor": "raftkv.cli.doctor.command",
    "certs": "raftkv.cli.certs.command",
    "join": "raftkv.cli.server.join",
    "torchft-lighthouse": "raftkv.cli.daemons.torchft_lighthouse",
    "tcpstore-gateway": "raftkv.cli.daemons.tcpstore_gateway",
}
