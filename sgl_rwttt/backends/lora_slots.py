"""Memory of the LoRA delta rule: a slot holds one version's A and B, all layers and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.lora_config import LoraDeltaConfig
from sgl_rwttt.backends.lora_train import Adapters
from sgl_rwttt.backends.memory import Layout, check_tensors
from sgl_rwttt.backends.page_pools import Readable

_FACTORS = ("lora_A", "lora_B")


def initial_adapter(config: LoraDeltaConfig, fingerprint: str) -> dict[str, Tensor]:
    """The adapter that every owner starts from: B = 0, A drawn as PEFT draws it.

    A is uniform in +-1/sqrt(d_in) (Kaiming with a = sqrt(5)) and a pure function of the model's
    fingerprint, the seed, the layer and the target: the same for all owners and all servers.
    Per target "<target>.lora_A" [L, r, d_in] and "<target>.lora_B" [L, d_out, r], float32.
    """
    tensors = {}
    for target in config.targets:
        d_in, d_out = config.shape.widths(target)
        layers = [
            _drawn(f"{fingerprint} {config.seed} {layer} {target}", config.rank, d_in)
            for layer in range(config.shape.layers)
        ]
        tensors[f"{target}.lora_A"] = torch.stack(layers)
        tensors[f"{target}.lora_B"] = torch.zeros(config.shape.layers, d_out, config.rank)
    return tensors


def _drawn(name: str, rank: int, d_in: int) -> Tensor:
    digest = blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    uniform = torch.rand(rank, d_in, generator=generator, dtype=torch.float64)
    drawn: Tensor = (2 * uniform - 1) / d_in**0.5
    return drawn.float()


class AdapterForm(NamedTuple):
    """What the adapters of one rank look like outside the pools."""

    config: LoraDeltaConfig

    def layout(self, pages: int, base: bool) -> Layout:
        """See ``AdapterSlots.layout``."""
        found: Layout = {}
        c = self.config
        for target in c.targets if pages else ():
            d_in, d_out = c.shape.widths(target)
            found[f"{target}.lora_A"] = torch.float32, (c.shape.layers, c.rank, d_in)
            found[f"{target}.lora_B"] = torch.float32, (c.shape.layers, d_out, c.rank)
        return found

    def tail_layout(self, rows: int) -> Layout:
        """See ``AdapterSlots.tail_layout``."""
        return {}


class AdapterSlots:
    """Pools of adapters, float32: per target A [L, slots + F, r, d_in], B [L, slots + F, d_out, r].

    r is the largest of the F ranks; a slot of a smaller one uses the first rows of A and columns of
    B, and what lies behind them is never read. Slot 0 is the dummy: rows that read it get nothing.
    The extra slots at the end hold what the owners of each rank start from. Who may use which slot
    is not known here. A version is a slot: its one page.
    """

    def __init__(
        self,
        config: LoraDeltaConfig,
        slots: int,
        device: torch.device | str = "cpu",
        others: Sequence[LoraDeltaConfig] = (),
    ) -> None:
        """Allocate zeroed pools; ``slots`` counts the dummy. ``others`` differ from ``config``, and
        from each other, in the rank.

        ValueError for no room for the dummy, or a rank that occurs twice.
        """
        if slots < 1:
            raise ValueError(f"{slots} slots; the pool needs its dummy slot 0")
        self.config, self.pages, self.bases, self.start = config, slots, 1, slots
        self.configs = (config, *others)
        ranks = [each.rank for each in self.configs]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks {ranks}: each may occur once")
        self.device, self.dtype = torch.device(device), torch.float32
        self._form_of = [0] * slots + list(range(len(ranks)))  # slot -> index of its rank
        self._at_zero = [True] * len(ranks)  # whether that start adapter changes nothing
        # Made as ordinary tensors even when the caller builds the model in inference mode.
        with torch.inference_mode(False):
            self.pools: Adapters = {
                target: (
                    torch.zeros(depth, slots + len(ranks), rank, d_in, device=self.device),
                    torch.zeros(depth, slots + len(ranks), d_out, rank, device=self.device),
                )
                for target in config.targets
                for depth, rank in [(config.shape.layers, max(ranks))]
                for d_in, d_out in [config.shape.widths(target)]
            }

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot."""
        return 4 * max(each.adapter_numbers for each in self.configs)

    @property
    def base_bytes(self) -> int:
        """There are no dense bases."""
        return 0

    def set_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what every owner of one rank starts from (named and shaped as by ``export``).

        Raises ValueError, changing nothing, for tensors that do not fit.
        """
        form = self._fitting(tensors)
        self._put(tensors, form, self.start + form)
        self._at_zero[form] = all(
            not tensors[name].any() for name in tensors if name.endswith(_FACTORS[1])
        )

    def slot_of(self, pages: Sequence[int]) -> int:
        """The slot that a version's pages name; that of the first rank's start for none."""
        return pages[-1] if pages else self.start

    def form_of(self, pages: Sequence[int]) -> int:
        """Index in ``configs`` of the rank of a version that reads these pages."""
        return self._form_of[self.slot_of(pages)]

    def changes_nothing(self, slot: int) -> bool:
        """Whether a row that reads the slot gets zeros: a start with B = 0."""
        return slot >= self.start and self._at_zero[slot - self.start]

    def gather(self, slots: Sequence[int]) -> Adapters:
        """Copies of the adapters in ``slots``, all of the rank of the first."""
        index = torch.tensor(slots, device=self.device)
        return {
            name: (A.index_select(1, index), B.index_select(1, index))
            for name, (A, B) in self.pools_of(self._form_of[slots[0]]).items()
        }

    def pools_of(self, form: int) -> Adapters:
        """Views of the pools as the slots of one rank see them."""
        rank = self.configs[form].rank
        return {name: (A[:, :, :rank], B[..., :rank]) for name, (A, B) in self.pools.items()}

    def put(self, adapters: Adapters, slots: Sequence[int], form: int) -> None:
        """Write adapters of one rank, as ``gather`` returns them, into ``slots``."""
        pools = self.pools_of(form)
        for name, pair in adapters.items():
            for pool, values in zip(pools[name], pair, strict=True):
                pool[:, slots] = values
        for slot in slots:
            self._form_of[slot] = form

    def layout(self, pages: int, base: bool) -> Layout:
        """Dtype and shape of each tensor that `export` returns for a version with a slot (or 0).

        Of the first rank; ``forms`` has those of all.
        """
        return self.forms[0].layout(pages, base)

    @property
    def forms(self) -> tuple[AdapterForm, ...]:
        """The layouts of each rank, in the order of ``configs``."""
        return tuple(map(AdapterForm, self.configs))

    def export(self, version: Readable) -> dict[str, Tensor]:
        """Contiguous copies of a version's adapter, "<target>.lora_A" [L, r, d_in] and
        "<target>.lora_B" [L, d_out, r]; nothing for a version that is still the start.
        """
        return self.adapter(version) if self.slot_of(version.pages) < self.start else {}

    def adapter(self, version: Readable) -> dict[str, Tensor]:
        """As ``export``, with the start adapter for a version that is still the start."""
        slot = self.slot_of(version.pages)
        return {
            f"{target}.{factor}": pool[:, slot].clone(memory_format=torch.contiguous_format)
            for target, pair in self.pools_of(self._form_of[slot]).items()
            for factor, pool in zip(_FACTORS, pair, strict=True)
        }

    @torch.no_grad()
    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        """Put what `export` returned into the slot that ``pages`` names.

        Raises ValueError, changing nothing, for tensors that do not fit or another slot.
        """
        if base is not None or len(pages) > 1 or not all(0 < p < self.pages for p in pages):
            raise ValueError(f"cannot fill base {base} and pages {list(pages)}")
        for page in pages:
            self._put(tensors, self._fitting(tensors), page)

    def tail_layout(self, rows: int) -> Layout:
        """Nothing: the evidence of an open segment is its tokens."""
        return {}

    def export_tail(self, page: int, rows: int) -> dict[str, Tensor]:
        """Raises RuntimeError: an open segment has no page."""
        raise RuntimeError("an open segment of tokens has no page")

    def restore_tail(self, tensors: Mapping[str, Tensor], page: int) -> None:
        """Raises RuntimeError: an open segment has no page."""
        raise RuntimeError("an open segment of tokens has no page")

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Never asked for: the evidence of this rule is token ids, which take no page."""
        raise RuntimeError(f"page {src}: a LoRA delta has no rows to copy to {dst}")

    def poison(self, page: int) -> None:
        """Fill a slot with NaN (tests mark free memory with it)."""
        for pair in self.pools.values():
            for pool in pair:
                pool[:, page] = torch.nan

    def _fitting(self, tensors: Mapping[str, Tensor]) -> int:
        """Index of the rank that the tensors have; ValueError when they fit none."""
        first = tensors.get(f"{self.config.targets[0]}.{_FACTORS[0]}")
        ranks = [each.rank for each in self.configs]
        given = first.shape[1] if first is not None and first.ndim == 3 else None
        form = ranks.index(given) if given in ranks else 0
        check_tensors(tensors, self.forms[form].layout(1, False))
        return form

    def _put(self, tensors: Mapping[str, Tensor], form: int, slot: int) -> None:
        adapters = {
            target: (
                tensors[f"{target}.lora_A"][:, None].to(self.device),
                tensors[f"{target}.lora_B"][:, None].to(self.device),
            )
            for target in self.pools
        }
        self.put(adapters, [slot], form)
