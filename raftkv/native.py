"""Whether the modules of the hot path run compiled (``make native``, ``requirements/native.py``) or interpreted."""

from __future__ import annotations

import importlib.machinery

from raftkv.raft import progress


def is_compiled() -> bool:
    """Tell it by one module that is always among them."""
    return str(progress.__file__).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
