"""Files of Lightning: ``*.ckpt``, each a separate checkpoint, in one directory.

The name ``last.ckpt`` does not contain the step, which is read from the archive. Metrics come from the names that
``ModelCheckpoint`` gives (``epoch=3-step=400-val_loss=0.12.ckpt``). Directories with such names are DCP's
(``distributed``).
"""

from __future__ import annotations

import re
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import STEP_MAX, TORCH_SAVE
from raftkv.integrations.importers.candidate import Candidate, Facts, numeric
from raftkv.integrations.importers.formats import check_torch, number_in_torch
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "lightning"
SUFFIX: Final = ".ckpt"
_STEP: Final = re.compile(r"(?:^|[-_])step=(\d{1,12})(?!\d)")
_VALUE: Final = re.compile(r"([A-Za-z][\w./]*)=(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?=[-.]|$)")


def detect(listing: Listing) -> list[Candidate]:
    """Return all checkpoint files of a directory."""
    found = []
    for name, size in listing.top.items():
        if name.endswith(SUFFIX):
            step = _STEP.search(name)
            found.append(Candidate(NAME, TORCH_SAVE, name, {name: size}, step=int(step[1]) if step else None))
    return found


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that the file is not truncated, and return the step recorded in it and the metrics in its name.

    Raises:
        NotWhole: it is cut off, or no archive of torch.
    """
    (name,) = candidate.files
    path = candidate.base + name
    check_torch(source, [path])
    noted = number_in_torch(source, path, "global_step")
    if noted is not None and not 0 <= noted <= STEP_MAX:
        raise NotWhole(source.uri, f"{path} says that it is of step {noted}")
    values = dict(_VALUE.findall(name.removesuffix(SUFFIX)))
    epoch = values.pop("epoch", "")
    values.pop("step", None)
    metrics = numeric({key: float(value) for key, value in values.items()})
    return Facts(candidate.step if noted is None else noted, metrics, {"epoch": epoch} if epoch else {})
