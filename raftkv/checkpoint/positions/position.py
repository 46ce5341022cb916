"""How far a pass has come when all ranks step together: one number, whatever the sizes of the worlds were.

In a step of ``world_size`` ranks the next ``batch_size * world_size`` numbers are used, and each rank has its own part
of them. The next step begins behind them, in whatever world. So the position is the count of what was used, its owner
is nobody, and what is left of an epoch is divided anew by every world.

>>> position = Position.begin(10)
>>> [list(position.share(2, rank, 3)) for rank in range(3)]
[[0, 1], [2, 3], [4, 5]]
>>> position = position.step(2, 3)                                   # a rank dies: the world has two
>>> [list(position.share(2, rank, 2)) for rank in range(2)]
[[6, 7], [8, 9]]
>>> position.step(2, 2).is_over
True

The numbers are places in an order of the epoch (``raftkv.dataset.Permutation``), a function of seed and epoch. The last
step divides what is left as evenly as it goes; ranks may have one sample less, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from raftkv.client.arguments import whole
from raftkv.client.control.records import Record, RecordError
from raftkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Position(Record):
    """How far a pass has come. It never changes; ``step`` returns the next one.

    Attributes:
        epoch: from 0.
        length: samples of the epoch.
        consumed: of these, how many were used.
        seed: of the order.
        dataset: what the numbers are of, as the version and root of a manifest; for who resumes.
    """

    NAME: ClassVar[str] = "position"
    epoch: int
    length: int
    consumed: int  # without a default, so that it is in every file: another record is no position
    seed: int = 0
    dataset: str = ""
    SIGNED: ClassVar[frozenset[str]] = frozenset(("seed",))

    def __post_init__(self) -> None:
        for name in ("epoch", "length", "consumed", "seed"):  # another number would be written, and never read again
            object.__setattr__(self, name, whole(getattr(self, name), f"the {name} of a position"))
        if self.epoch < 0 or not 0 <= self.consumed <= self.length:
            raise ConfigError(f"no position: {self.consumed} of {self.length} samples of epoch {self.epoch} are used")

    @classmethod
    def begin(cls, length: int, *, seed: int = 0, dataset: str = "") -> Self:
        """Return the beginning of the first epoch. Arguments as the attributes."""
        return cls(0, length, 0, seed, dataset)

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Implement ``Record.from_plain``: numbers that cannot be are refused as any other damage."""
        try:
            return super(Position, cls).from_plain(plain)
        except ConfigError as error:
            raise RecordError(cls.NAME, str(error)) from None

    @property
    def remaining(self) -> int:
        """Samples of the epoch that were not used."""
        return self.length - self.consumed

    @property
    def is_over(self) -> bool:
        """Whether the epoch has none left."""
        return self.consumed == self.length

    def steps(self, batch_size: int, world_size: int) -> int:
        """Return how many steps are left in a world of this size."""
        return -(-self.remaining // _checked(batch_size, world_size))

    def share(self, batch_size: int, rank: int, world_size: int) -> range:
        """Return the numbers of a rank in the next step.

        Arguments:
            batch_size: of each rank.
            rank, world_size: of the present world.

        Raises:
            ConfigError: there is no such rank, or a size is not positive.
        """
        most = _checked(batch_size, world_size)
        rank, world_size = whole(rank, "rank"), whole(world_size, "world_size")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist in a world of {world_size}")
        count = min(most, self.remaining)
        first = self.consumed + count * rank // world_size
        return range(first, self.consumed + count * (rank + 1) // world_size)

    def step(self, batch_size: int, world_size: int) -> Position:
        """Return the position after one step of all ranks."""
        return self.after(min(_checked(batch_size, world_size), self.remaining))

    def after(self, samples: int) -> Position:
        """Return the position after so many samples of all ranks together."""
        return replace(self, consumed=self.consumed + whole(samples, "samples"))

    def next_epoch(self, length: int | None = None) -> Position:
        """Return the beginning of the next epoch.

        Arguments:
            length: of it; None: as long as this.
        """
        return replace(self, epoch=self.epoch + 1, consumed=0, length=self.length if length is None else length)

    @property
    def metadata(self) -> dict[str, str]:
        """Epoch and samples, for ``metadata=`` of a checkpoint, where people see them."""
        return {"epoch": str(self.epoch), "samples": f"{self.consumed}/{self.length}"}


def _checked(batch_size: int, world_size: int) -> int:
    batch_size, world_size = whole(batch_size, "batch_size"), whole(world_size, "world_size")
    if batch_size < 1 or world_size < 1:
        raise ConfigError(f"a batch and a world have at least one: batch_size={batch_size}, world_size={world_size}")
    return batch_size * world_size
