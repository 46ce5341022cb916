"""Whether the modules of the hot path run compiled (``make native``, ``requirements/native.py``) or interpreted."""

from __future__ import annotations

import importlib.machinery

from raftkv.raft import tracker


def is_compiled() -> bool:
    """Tell it by one module that is always among them."""
    return str(tracker.__file__).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
