"""Index tables: made on the host, copied to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_table(values: Sequence[int], device: torch.device) -> Tensor:
    """Return ``values`` as an int64 tensor on ``device``; a copy to CUDA is asynchronous."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)
