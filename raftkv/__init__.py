"""raftkv: a Raft-replicated MVCC key-value store that speaks the etcd v3 API."""

__version__ = "0.1.0"
