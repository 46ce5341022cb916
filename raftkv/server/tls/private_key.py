"""Whether a private key is private: whom the mode of its file lets read it.

>>> is_open_to_others("/dev/null")
True

A key that others may read is used, with a line in the log: etcd takes it, volumes of secrets have mode 0644 unless told
otherwise, and whoever can read it already has it. ``--secure`` does not start with one.
"""

from __future__ import annotations

import os
import stat
from typing import Final

_OTHERS_READ: Final = stat.S_IRGRP | stat.S_IROTH


def is_open_to_others(path: str) -> bool:
    """Tell whether others than its owner may read a file. A group may read root's, as where the system keeps keys for
    its services; a file that cannot be looked at is open to nobody.

    Arguments:
        path: of the key.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    allowed = stat.S_IRGRP if found.st_uid == 0 != os.geteuid() else 0
    return bool(found.st_mode & _OTHERS_READ & ~allowed)
