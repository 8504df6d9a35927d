"""A fixed pool of slots with a ledger; slot 0 is a reserved dummy that nobody gets or frees."""

from collections import OrderedDict

from sgl_rwttt.core.errors import IntegrityError, SlotError, StateCapacity

_EXTENT = 16  # slots that an owner can grow into before its run is likely to break
_RESERVED = 1


class SlotPool:
    """Slots 0 .. total - 1 as plain ints, handed out so that one owner's slots tend to be a run.

    `free + live + reserved == total` holds after every call. alloc and free take O(1), for any
    pool size; the free slots are kept as extents, wholly free ones apart from begun ones.
    """

    def __init__(self, total: int, name: str, flag: str = "") -> None:
        """`total` counts the dummy; `flag` is the option that sets it, named when it is reached."""
        if total < _RESERVED:
            raise SlotError(f"{name}: a pool needs its dummy slot, so at least 1, not {total}")
        self.total = total
        self.name = name
        self.flag = flag
        self._extent = max(1, min(_EXTENT, total // 64))
        self._is_free = bytearray(b"\x01") * total
        self._is_free[0] = 0
        self._generations = [0] * total
        self._available = total - _RESERVED
        extents = -(-total // self._extent)
        self._free_in = [self._extent_size(e) for e in range(extents)]
        self._free_in[0] -= _RESERVED
        self._begun: OrderedDict[int, None] = OrderedDict()
        self._whole: OrderedDict[int, None] = OrderedDict()
        for extent in reversed(range(extents)):
            self._file(extent)

    @property
    def available(self) -> int:
        """Slots that alloc can still hand out."""
        return self._available

    @property
    def live(self) -> int:
        """Slots handed out and not freed."""
        return self.total - _RESERVED - self._available

    @property
    def reserved(self) -> int:
        """Slots that are never handed out (the dummy)."""
        return _RESERVED

    def alloc(self, after: int | None = None) -> int:
        """Take a slot: `after` + 1 when free, else the start of a free run with room to grow.

        Raises StateCapacity, changing nothing, when no slot is free.
        """
        if after is not None and after + 1 < self.total and self._is_free[after + 1]:
            return self._take(after + 1)
        if not self._available:
            hint = f"; raise {self.flag}" if self.flag else ""
            limit = self.total - _RESERVED
            raise StateCapacity(f"all {limit} slots of the {self.name} pool are in use{hint}")
        extent = next(reversed(self._whole or self._begun))
        start = extent * self._extent
        return self._take(self._is_free.index(1, start, start + self._extent))

    def free(self, slot: int) -> None:
        """Give a slot back. Raises SlotError, changing nothing, for any slot that is not live."""
        self.check_live(slot)
        self._is_free[slot] = 1
        self._generations[slot] += 1
        self._available += 1
        extent = slot // self._extent
        self._free_in[extent] += 1
        self._file(extent)

    def is_live(self, slot: int) -> bool:
        """Whether `slot` is handed out."""
        return 0 < slot < self.total and not self._is_free[slot]

    def check_live(self, slot: int) -> None:
        """Raise SlotError unless `slot` is a plain int that is handed out."""
        if type(slot) is not int or not self.is_live(slot):
            raise SlotError(f"{self.name} slot {slot!r} is not live (1..{self.total - 1})")

    def generation(self, slot: int) -> int:
        """How often `slot` was freed: a holder of (slot, generation) can tell that it lost it."""
        return self._generations[slot]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + live + reserved == total, counted anew."""
        free = self._is_free.count(1)
        by_extent = sum(self._free_in)
        filed = sum(self._free_in[e] for e in self._begun) + sum(
            self._free_in[e] for e in self._whole
        )
        if not free == by_extent == filed == self._available or self._is_free[0]:
            raise IntegrityError(
                f"{self.name}: free {free} (by extent {by_extent}, filed {filed}, counted "
                f"{self._available}) + live {self.live} + reserved {_RESERVED} of {self.total}"
            )

    def _extent_size(self, extent: int) -> int:
        return min(self._extent, self.total - extent * self._extent)

    def _take(self, slot: int) -> int:
        self._is_free[slot] = 0
        self._available -= 1
        extent = slot // self._extent
        self._free_in[extent] -= 1
        self._file(extent)
        return slot

    def _file(self, extent: int) -> None:
        """Keep the extent in the list that its count of free slots belongs to."""
        free = self._free_in[extent]
        whole = free == self._extent_size(extent)
        (self._begun if whole else self._whole).pop(extent, None)
        if whole:
            self._whole[extent] = None
        elif free:
            self._begun[extent] = None
        else:
            self._begun.pop(extent, None)
