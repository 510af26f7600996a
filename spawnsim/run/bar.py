"""The progress bar of a run on virtual ranks: virtual seconds done, ranks finished, time left.

This room knows numbers and a terminal. How much there is to do is known only where `main` has a parameter
`iterations`; elsewhere the bar counts finished ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spawnsim.record import Recorder

FORMAT = "{percentage:3.0f}%|{bar:30}| {desc} [{elapsed}<{remaining}]"


class Listener:
    """A `with` block around a plain function, or around nothing."""

    def __init__(self, told: Callable[[float, int, int], None] | None) -> None:
        self._told = told

    def __enter__(self) -> Callable[[float, int, int], None] | None:
        return self._told

    def __exit__(self, *_error: object) -> None:
        return None


class Bar:
    """A bar on standard error, gone when the block ends."""

    def __init__(self, recorder: Recorder, *, ranks: int, iterations: Any = None) -> None:
        self._recorder = recorder
        self._rows = ranks * iterations if isinstance(iterations, int) and iterations > 0 else None
        self._ranks = ranks

    def __enter__(self) -> Callable[[float, int, int], None]:
        from tqdm import tqdm

        self._bar = tqdm(total=self._rows or self._ranks, bar_format=FORMAT, leave=False, dynamic_ncols=True)
        return self.tell

    def __exit__(self, *_error: object) -> None:
        self._bar.close()

    def tell(self, virtual_s: float, finished: int, ranks: int) -> None:
        """Show how far the run is."""
        done = self._recorder.rows if self._rows else finished
        self._bar.set_description_str(
            f"{virtual_s:.4g} virtual s, {finished}/{ranks} ranks done", refresh=False
        )
        self._bar.update(min(done, self._bar.total) - self._bar.n)
