"""Records of the store: committed versions, open pages, retained tails and read views."""

from dataclasses import dataclass


class Version:
    """A committed point of a lineage. Immutable once published, apart from the bookkeeping.

    Reading it takes `base` and then `pages`. It owns one reference on its own page and on its
    own base. The older pages belong to its ancestors, kept alive through `parent`; a version
    with an own base reads nothing of its parent and drops it, and its block's page with it. A
    version of one page alone has no parent, and one whose update changed nothing has no page:
    its parent is whose page it reads.
    """

    __slots__ = (
        "base",
        "expired",
        "id",
        "memos",
        "number",
        "owns_base",
        "page",
        "pages",
        "parent",
        "refs",
        "touched",
    )

    def __init__(
        self,
        id: bytes,
        number: int,
        parent: "Version | None" = None,
        page: int | None = None,
        base: int | None = None,
        pages: tuple[int, ...] = (),
        owns_base: bool = False,
    ) -> None:
        self.id = id
        self.number = number
        self.parent = parent  # None: nothing of it is needed (root, own base, page of its own)
        self.page = page  # own page slot; None for roots and folded versions
        self.base = base  # dense base slot that readers start from
        self.pages = pages  # page slots on top of `base`, oldest first, own page last
        self.owns_base = owns_base
        self.refs = 0  # index 1, each live owner 1, each pin and root 1, each child, each memo
        self.touched = 0  # the store's clock at the last match
        self.expired = False  # goes as soon as the index's reference is the only one
        self.memos: list[TailMemo] = []  # retained tails after this boundary, sorted by key

    def __repr__(self) -> str:
        return f"Version({self.number}, {self.id.hex()[:8]}, refs={self.refs})"


def sharing(version_id: bytes, number: int, before: Version) -> Version:
    """A version that reads what `before` reads; it holds on to whose payload that is alone."""
    while before.page is None and before.parent is not None:
        before = before.parent
    return Version(version_id, number, before, None, before.base, before.pages)


class Tail:
    """An open page: evidence after a boundary that is not committed yet.

    Rows below `rows` are fixed until the block is completed; rows from there on are invisible
    and belong to the one owner that fills the page.
    """

    __slots__ = ("page", "refs", "rows")

    def __init__(self, page: int, rows: int) -> None:
        self.page = page
        self.rows = rows  # rows that the filling owner has committed to its tail
        self.refs = 1  # the owner 1, each retained memo 1

    def __repr__(self) -> str:
        return f"Tail(page={self.page}, rows={self.rows}, refs={self.refs})"


class TailMemo:
    """A retained tail: the first `rows` rows of an open page, for any owner to copy."""

    __slots__ = ("key", "pins", "rows", "tail", "touched", "version")

    def __init__(self, version: Version, tail: Tail, rows: int, key: bytes) -> None:
        self.version = version  # the boundary before it; a reference is held
        self.tail = tail  # a reference is held
        self.rows = rows
        self.key = key  # item codes after the boundary, up to the `rows`-th WRITE token
        self.pins = 0  # while pinned it is not evicted
        self.touched = 0

    def __repr__(self) -> str:
        return f"TailMemo({self.version.number}+{self.rows}, page={self.tail.page})"


@dataclass(frozen=True, slots=True)
class Match:
    """Where a token list can start from. Valid until the store's next allocation or flush."""

    depth: int  # tokens of the context whose state is retained
    version: Version  # the boundary at or before `depth`
    tail: TailMemo | None  # retained tail to copy rows of; None when rows == 0
    rows: int  # WRITE tokens between the boundary and `depth`
    boundary: int  # position of `version` in the context


@dataclass(frozen=True, slots=True)
class StateView:
    """What one branch reads at the moment of the call. Holds no reference."""

    owner: str
    branch: str
    number: int  # committed version
    version_id: bytes
    base: int | None  # dense base slot
    pages: tuple[int, ...]  # committed pages on top of it
    tail_page: int | None  # open page; None when the tail is empty
    rows: int  # rows of the tail
    position: int  # tokens of the context consumed
    state_id: bytes
