"""Memory of the LoRA delta rule: a slot holds one version's A and B, all layers and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

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


class AdapterSlots:
    """Pools of adapters, float32: per target A [L, slots + 1, r, d_in], B [L, slots + 1, d_out, r].

    Slot 0 is the dummy: rows that read it get nothing. The extra slot at the end, ``start``, holds
    what every owner starts from. Who may use which slot is not known here. A version is a slot: its
    one page.
    """

    def __init__(
        self, config: LoraDeltaConfig, slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate zeroed pools; ``slots`` counts the dummy. ValueError for no room for it."""
        if slots < 1:
            raise ValueError(f"{slots} slots; the pool needs its dummy slot 0")
        self.config, self.pages, self.bases, self.start = config, slots, 1, slots
        self.device, self.dtype = torch.device(device), torch.float32
        self.starts_at_zero = True  # the start adapter changes nothing
        # Made as ordinary tensors even when the caller builds the model in inference mode.
        with torch.inference_mode(False):
            self.pools: Adapters = {
                target: (
                    torch.zeros(depth, slots + 1, rank, d_in, device=self.device),
                    torch.zeros(depth, slots + 1, d_out, rank, device=self.device),
                )
                for target in config.targets
                for depth, rank in [(config.shape.layers, config.rank)]
                for d_in, d_out in [config.shape.widths(target)]
            }

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot."""
        return 4 * self.config.adapter_numbers

    @property
    def base_bytes(self) -> int:
        """There are no dense bases."""
        return 0

    def set_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what every owner starts from (named and shaped as by ``export``).

        Raises ValueError, changing nothing, for tensors that do not fit.
        """
        check_tensors(tensors, self.layout(1, False))
        self._put(tensors, self.start)
        self.starts_at_zero = all(
            not tensors[name].any() for name in tensors if name.endswith(_FACTORS[1])
        )

    def slot_of(self, pages: Sequence[int]) -> int:
        """The slot that a version's pages name; the start adapter's for none."""
        return pages[-1] if pages else self.start

    def gather(self, slots: Sequence[int]) -> Adapters:
        """Copies of the adapters in ``slots``."""
        index = torch.tensor(slots, device=self.device)
        return {
            name: (A.index_select(1, index), B.index_select(1, index))
            for name, (A, B) in self.pools.items()
        }

    def layout(self, pages: int, base: bool) -> Layout:
        """Dtype and shape of each tensor that `export` returns for a version with a slot (or 0)."""
        found: Layout = {}
        c = self.config
        for target in c.targets if pages else ():
            d_in, d_out = c.shape.widths(target)
            found[f"{target}.lora_A"] = torch.float32, (c.shape.layers, c.rank, d_in)
            found[f"{target}.lora_B"] = torch.float32, (c.shape.layers, d_out, c.rank)
        return found

    def export(self, version: Readable) -> dict[str, Tensor]:
        """Contiguous copies of a version's adapter, "<target>.lora_A" [L, r, d_in] and
        "<target>.lora_B" [L, d_out, r]; nothing for a version that is still the start.
        """
        return self.adapter(version) if version.pages else {}

    def adapter(self, version: Readable) -> dict[str, Tensor]:
        """As ``export``, with the start adapter for a version that is still the start."""
        slot = self.slot_of(version.pages)
        return {
            f"{target}.{factor}": pool[:, slot].clone(memory_format=torch.contiguous_format)
            for target, pair in self.pools.items()
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
            check_tensors(tensors, self.layout(1, False))
            self._put(tensors, page)

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

    def _put(self, tensors: Mapping[str, Tensor], slot: int) -> None:
        for target, pair in self.pools.items():
            for factor, pool in zip(_FACTORS, pair, strict=True):
                pool[:, slot] = tensors[f"{target}.{factor}"].to(self.device)
