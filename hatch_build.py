"""Build hook: the benchmarks travel in the wheel as `sgl_rwttt/benchmarks`.

In an editable install the command finds them in the checkout.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BenchmarksHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Adds the folder to a wheel that is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        if version != "editable":
            build_data["force_include"]["benchmarks"] = "sgl_rwttt/benchmarks"
