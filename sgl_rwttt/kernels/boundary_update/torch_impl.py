"""BoundaryUpdate of many chunks in one batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def boundary_update(T: Tensor, conv: Tensor, proj: Tensor | None, lr: float) -> Tensor:
    """Return V [G, C, d] = lr * conv(T) @ proj for the target rows T [G, C, d] of G chunks.

    conv [d, 5] are depthwise taps at offsets -2..+2, zero-padded at both ends of each chunk;
    proj [d, d] is a right factor, None for the identity. Same dtype throughout, nothing is
    modified. Every chunk is its own product, so its result does not depend on the others in the
    batch, to the last bit. Source: In-Place Test-Time Training (Feng et al. 2026).
    """
    chunk, taps = T.shape[1], conv.T
    padded = F.pad(T, (0, 0, 2, 2))
    mixed = padded[:, :chunk] * taps[0]
    for k in range(1, 5):
        mixed.addcmul_(padded[:, k : k + chunk], taps[k])
    if proj is not None:
        mixed = mixed.bmm(proj.expand(mixed.shape[0], -1, -1))
    return mixed.mul_(lr)
