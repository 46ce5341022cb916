"""The checkpoint registry for asyncio: the same names as ``raftkv.checkpoint``, with awaitable methods.

registry = raftkv.checkpoint.aio.Registry(kv, "job", uri="s3://bucket/job")
"""

from __future__ import annotations

from raftkv.checkpoint.commit.attempt import Attempt
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.find import Commit, Commits
from raftkv.checkpoint.registry import Registry

__all__ = ["Attempt", "Claim", "Commit", "Commits", "Registry"]
