"""State kernels: one folder per operation, a naive version beside the fast one.

Everything here works on plain tensors: pools of page rows, row indices and slots. Owners,
versions and commits are the business of ``core`` and ``backends``. ``dispatch.kernel`` picks the
implementation of an operation for a device.
"""

from __future__ import annotations

from sgl_rwttt.kernels.dispatch import kernel

__all__ = ["kernel"]
