"""The hook that torch runs at ``import torch`` (entry point ``torch.backends: raftkv``); does nothing by default.

With ``RAFTKV_TORCH_AUTOLOAD=1`` the hook registers the scheme ``raftkv://`` in scripts that never import raftkv. An
entry point cannot be optional at installation, so the hook reads the environment each time;
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables all such hooks of torch. An error in the hook would make ``import torch``
fail, so it only gives a warning.
"""

from __future__ import annotations

import os

VARIABLE = "RAFTKV_TORCH_AUTOLOAD"


def autoload() -> None:
    """Register the backend; torch calls this."""
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        from raftkv.torch.init_method import register

        register()
    except Exception as error:  # of any kind: torch must stay importable
        import warnings

        warnings.warn(f"raftkv:// is not known to torch: {type(error).__name__}: {error}", stacklevel=1)
