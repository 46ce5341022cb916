"""What torch runs at ``import torch`` (entry point ``torch.backends: raftkv``): nothing, unless it is asked for.

With ``RAFTKV_TORCH_AUTOLOAD=1`` the scheme ``raftkv://`` is known in scripts that never import raftkv. An entry point
cannot be chosen when raftkv is installed, so the environment is asked each time; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``
switches off all of torch's, this one too. A failure here would be a failure of ``import torch``: it becomes a warning.
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
