"""The write path of rules whose evidence is token ids and whose versions are one page each."""

from sgl_rwttt.core.candidate import Block, Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.segment import DUMMY, BlockPart
from sgl_rwttt.core.versions import Version
from sgl_rwttt.core.writes import Layout, WritePath


class SlotWritePath(WritePath):
    """Candidates of a store whose evidence is token ids and whose versions are one page each.

    The open block needs no page: its tokens are the items of the owner's clock. A complete block
    takes a fresh page for the whole new payload, and its version needs nothing of its parent.
    """

    def layout(self, state: OwnerState, writes: int, tokens: int) -> Layout:
        """A page per complete block."""
        completed, left = divmod(state.clock.rows + writes, self.chunk)
        return Layout(completed, left, False, completed)

    def _single_part(self, candidate: Candidate, count: int, writes: bool) -> BlockPart:
        pages = candidate.version.pages
        return BlockPart(0, count, writes, DUMMY, 0, False, False, None, pages)

    def _walk(self, candidate: Candidate, in_place: bool, total: int) -> tuple[BlockPart, ...]:
        parts: list[BlockPart] = []
        pages, rows = candidate.version.pages, candidate.state.clock.rows
        offset = 0
        for codes, mode in candidate.runs:
            end = offset + len(codes)
            while offset < end:
                writes = mode is Effect.WRITE
                take = min(self.chunk - rows, end - offset) if writes else end - offset
                rows += take if writes else 0
                completes = rows == self.chunk
                page = self._take_page(candidate) if completes else DUMMY
                deferred = completes and offset + take == total
                parts.append(
                    BlockPart(offset, take, writes, page, 0, completes, deferred, None, pages)
                )
                offset += take
                if completes:
                    pages, rows = (page,), 0
        return tuple(parts)

    def _take_page(self, candidate: Candidate) -> int:
        page = self._index.pages.alloc()
        candidate.pages.append(page)
        candidate.blocks.append(Block(page, None, False))
        return page

    def _evidence(self, candidate: Candidate) -> tuple[tuple[int, ...], ...]:
        codes = list(candidate.state.clock.write_tokens)
        for run, mode in candidate.runs:
            codes += [code >> 1 for code in run] if mode is Effect.WRITE else []
        blocks = range(len(candidate.blocks))
        return tuple(tuple(codes[i * self.chunk : (i + 1) * self.chunk]) for i in blocks)

    def _version(self, version_id: bytes, number: int, parent: Version, page: int) -> Version:
        return Version(version_id, number, None, page, None, (page,))
