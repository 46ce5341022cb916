"""(see ARCHITECTURE.md)"""

from typing import Final

ETCD_VERSION: Final = "3.6.14"
"""The etcd version whose behaviour a member shows: clients choose what to send by it."""
ETCD_CLUSTER_VERSION: Final = "3.6.0"
ETCD_STORAGE_VERSION: Final = "3.6.0"
