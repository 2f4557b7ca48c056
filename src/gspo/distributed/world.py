"""The processes that train one policy together; every count, sum, barrier and save goes through here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """`size` processes, of which this is number `rank`. Size 1 is the default and needs no launcher."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return tensor

    def barrier(self) -> None:
        """Waits until every process is here."""
