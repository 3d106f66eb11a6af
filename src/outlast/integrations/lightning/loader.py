"""A loader of Lightning's training loop that knows where it stands, and goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.autosave.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Place:
    """Where a process stands in a loader.

    Args:
        loader: The loader.
        resumed: What `noted` gave on each rank of the run that goes on; None for a new one.
        rank: This rank.
        ranks: How many go through the loader now.
    """

    def __init__(
        self, loader: Any, resumed: Sequence[dict[str, Any]] | None, rank: int, ranks: int
    ) -> None:
        self._loader = loader
        self._resumed = resumed
        self._rank = rank
        self._ranks = ranks
        self._position = Position()
        self._iterator: Iterator[Any] | None = None
        self._count = 0

    def iterate(self) -> Iterator[Any]:
        """An iterator from the first batch, or once from where the run stood.

        What is resumed is resumed with the first batch, not before: until then, others may draw
        random numbers for the set-up.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._iterator, self._count = self._position.begin(self._loader), 0
        return self._batches(resumed)

    def noted(self, *, finished: bool, ahead: int) -> dict[str, Any]:
        """Where the loop stands now.

        Args:
            finished: Whether the epoch's last batch is done.
            ahead: Batches that were fetched and not used yet.
        """
        if finished:
            self._position.pause(0)
        else:
            self._position.note(
                0, self._count - ahead, self._loader, self._iterator, ahead=ahead > 0
            )
        return {**self._position.state_dict(), "count": self._position.count}

    def _batches(self, resumed: Sequence[dict[str, Any]] | None) -> Iterator[Any]:
        if resumed is not None:
            self._go_on(resumed)
        assert self._iterator is not None
        for batch in self._iterator:
            self._count += 1
            yield batch

    def _go_on(self, resumed: Sequence[dict[str, Any]]) -> None:
        if len(resumed) == self._ranks:
            state = resumed[self._rank]
            self._position.load_state_dict(state)
            self._iterator = self._position.resume(self._loader)
        else:
            state = resumed[0]
            self._iterator = self._position.skip(self._loader, state["count"])
        self._count = state["count"]


class PlacedLoader:
    """A loader with a `Place`; all else is that of the loader.

    Args:
        loader: The loader.
        place: Where this process stands in it.
    """

    def __init__(self, loader: Any, place: Place) -> None:
        vars(self)["outlast_place"] = place
        vars(self)["outlast_loader"] = loader

    def __iter__(self) -> Iterator[Any]:
        place: Place = self.outlast_place
        return place.iterate()

    def __len__(self) -> int:
        return len(self.outlast_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["outlast_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.outlast_loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it tells Lightning that the loader can be resumed; a callback has the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, as `state_dict`."""
