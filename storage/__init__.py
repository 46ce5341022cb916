"""Durable state of a member: write-ahead log, LMDB backend, key index, MVCC store.

Imported as ``raftkv.storage``; synchronous; knows nothing of asyncio, RPC or the server.
"""

if __name__ != "raftkv.storage":
    raise ImportError("import this package as raftkv.storage, not as storage")
