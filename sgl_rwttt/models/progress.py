"""A progress bar over steps that have names."""

from __future__ import annotations

from types import TracebackType
from typing import Any

_LAYOUT = "{desc:<44} |{bar:20}| {n_fmt}/{total_fmt} steps, {elapsed}"


class Steps:
    """Calling it says that the next step begins. Shown on stderr, or not at all."""

    def __init__(self, title: str, total: int, show: bool) -> None:
        from tqdm import tqdm

        self._title = title
        self._bar: Any = tqdm(total=total, disable=not show, bar_format=_LAYOUT)
        self._begun = False

    def __call__(self, name: str) -> None:
        """The step `name` begins; the one before it is done."""
        if self._begun:
            self._bar.update()
        self._begun = True
        self._bar.set_description_str(f"{self._title}: {name}")

    def more(self, steps: int) -> None:
        """There are `steps` more than was thought."""
        self._bar.total += steps
        self._bar.refresh()

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self("done")
        self._bar.close()
