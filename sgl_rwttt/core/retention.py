"""How many versions of one lineage are kept as memos."""

from collections import deque
from collections.abc import Sequence

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.core.versions import Version


class RetentionWindow:
    """The newest versions of one running branch; an older one is expired when it leaves.

    An expired version stays as long as the reading of a kept one needs it, which is back to the
    last dense base: with a fold every F pages, `size` + F - 1 versions are alive at most.
    """

    def __init__(self, store: TTTStateStore, size: int, chain: ContextChain, position: int) -> None:
        """The branch starts at `position`, at or after a boundary that `chain` knows."""
        self._store = store
        self._size = size
        at = chain.index_at(position)
        first = max(1, at - size + 1)  # 0 is the root, which its owners keep
        self._ids = deque(chain.version_id(i) for i in range(first, at + 1))

    def passed(self, versions: Sequence[Version]) -> None:
        """The branch committed `versions`, oldest first."""
        self._ids.extend(version.id for version in versions)
        while len(self._ids) > self._size:
            self._store.expire(self._ids.popleft())
