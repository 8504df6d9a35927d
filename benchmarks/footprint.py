"""Memory of a process and all that it started, as Linux counts it; with a GPU, of the device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sgl_rwttt.srt_ext.launch import has_cuda

MIB = 2**20
_RESET_PEAK = "5"  # what clear_refs takes to forget a process's largest resident set


def session_processes(session: int) -> list[int]:
    """Process ids of a session; a worker's own is its process id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
    return found


def reset_peaks() -> None:
    """Have `peak_mib` count from now on, for this session's processes."""
    for process in session_processes(os.getsid(0)):
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def peak_mib() -> float:
    """MiB of this session's processes since `reset_peaks`; of the GPU's memory where there is one.

    Proportional set sizes now, so that what processes share counts once, and what each one's
    resident set was above its present one at its largest. The GPU's memory is what all its
    processes hold now.
    """
    if has_cuda():
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / MIB
    return sum(map(_peak_kib, session_processes(os.getsid(0)))) / 1024


def _peak_kib(process: int) -> int:
    """KiB of one process; 0 when it has just ended."""
    try:
        shared = _fields(Path(f"/proc/{process}/smaps_rollup"))
        status = _fields(Path(f"/proc/{process}/status"))
        return shared["Pss"] + status["VmHWM"] - status["VmRSS"]
    except (OSError, KeyError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    """The lines `name: N kB` of a file."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            found[name] = int(number)
    return found
