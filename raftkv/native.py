"""Whether the modules of the hot path are compiled (``make native``, ``requirements/native.py``) or interpreted."""

from __future__ import annotations

import importlib.machinery

from raftkv.raft import tracker


def is_compiled() -> bool:
    """Check one module that is always compiled in a native build."""
    return str(tracker.__file__).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
