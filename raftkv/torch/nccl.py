"""What a group on NCCL needs beyond one on gloo: its collectives run on the device, and end there without an error.

A collective of NCCL is queued on a stream, and the call returns. When a peer is lost, only an abort of communicators
ends the kernels that wait for it, and then they end as if they had succeeded, with whatever bytes had come by then:
``optimizer.step()`` behind such an ``all_reduce`` applies gradients that never were. So whoever wants to know whether a
collective has succeeded first waits for the device, and then looks whether there was an abort: a kernel that has ended
before it has all its data.

    communicators = Communicators()
    communicators.abort(generation)     # any thread: the generation has ended
    communicators.settle(generation)    # the user's: raises Aborted if that came before the device was done

``settle`` is also called before every ``Optimizer.step`` of the process, by a hook of torch's, so that a training loop
written for gloo is right on NCCL too.

Torch has a watchdog for each group, which would end the process at the first error, and before that would sleep for a
minute while others write their flight recorders. ``ENVIRONMENT`` turns both off, unless the user's says otherwise.

What cannot be aborted is the making of communicators: a rank that freezes in it holds up all others until it thaws.
Made in ``init_process_group``, for a device that is named, they take a fraction of a second in which every rank is
known to be there; made by the first collective, whenever that comes. A process that is stuck there can only be ended.

Leaves out: several devices in one process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long, whatever is dumped
}
STUCK_S: Final = 10.0
"""For so long after the end of a generation its communicators may still be in the making."""


class Aborted(RuntimeError):
    """Collectives of a generation may have been cut off: what they have written is not to be used."""


class Communicators:
    """The communicators of NCCL of the present groups; see the module.

    Arguments:
        settle_step: called before each step of an optimizer of this process, until ``close``.
        device: of this rank; None: the current one, at each call.
        wait: for all that is queued on a device; another in tests.
    """

    def __init__(
        self,
        settle_step: Callable[[], object],
        device: torch.device | None = None,
        wait: Callable[[torch.device | None], object] = torch.cuda.synchronize,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.device = device
        self._wait = wait
        self._aborted = 0
        self._is_connecting = False
        self._unhook = _before_steps(settle_step)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Tell that communicators are in the making while the block lasts."""
        self._is_connecting = True
        try:
            yield
        finally:
            self._is_connecting = False

    def are_stuck(self, over_for_s: float) -> bool:
        """Tell whether they are still in the making, so long after the generation was over."""
        return self._is_connecting and over_for_s > STUCK_S

    def abort(self, generation: int) -> None:
        """Abort those that there are now, on a thread of its own; what is settled in the generation then raises."""
        self._aborted = generation  # before any kernel ends because of it
        groups = list(distributed_c10d._world.pg_map)  # these, and none that is made later
        threading.Thread(target=_abort, args=(groups,), name="raftkv-abort", daemon=True).start()

    def settle(self, generation: int) -> None:
        """Wait until the device has done what is queued.

        Raises:
            Aborted: the communicators of the generation were aborted, maybe before that.
        """
        self._wait(self.device)
        if self._aborted == generation:
            raise Aborted(f"generation {generation} ended while its collectives were on the device")

    def close(self) -> None:
        """Let optimizers step as they like. Harmless when repeated."""
        self._unhook()


def _before_steps(settle: Callable[[], object]) -> Callable[[], object]:
    """Have something called before each step of any optimizer; returns what ends that."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        settle()

    handle: Final = register_optimizer_step_pre_hook(before)
    return handle.remove


def _abort(given: list[Any]) -> None:
    """Abort the communicators of groups, together: one alone might wait for another."""
    groups = [group for group in given if _has_nccl(group)]
    if not groups:
        return
    first = groups[0]._get_backend(torch.device("cuda"))
    first._group_start()
    for group in groups:
        group._get_backend(torch.device("cuda")).abort()
    first._group_end()


def _has_nccl(group: Any) -> bool:
    try:
        return "nccl" in str(group._get_backend(torch.device("cuda")).name()).lower()
    except RuntimeError:
        return False
