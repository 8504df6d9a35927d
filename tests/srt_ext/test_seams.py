"""The points of contact with SGLang exist in the pinned version, and a missing one stops us."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgl_rwttt.srt_ext import plugin, seams
from sgl_rwttt.srt_ext.launch import prepare_environment
from sgl_rwttt.srt_ext.seams import SeamError, check_seams, check_version, resolve

pytestmark = pytest.mark.slow


def test_every_seam_resolves() -> None:
    """Guards: a renamed or removed extension point found out by wrong answers."""
    prepare_environment()
    check_seams()


def test_a_missing_seam_is_named() -> None:
    """Guards: SGLang swallowing a plugin's errors and serving without it."""
    with pytest.raises(SeamError, match=r"Scheduler\.no_such_method"):
        resolve("sglang.srt.managers.scheduler:Scheduler.no_such_method")
    with pytest.raises(SeamError, match="no_such_module"):
        resolve("sglang.no_such_module:x")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: hooks applied to a version that nobody checked."""
    monkeypatch.setattr(seams, "PINNED", "0.5.22")
    with pytest.raises(SeamError, match=r"0\.5\.22"):
        check_version()


def test_every_patch_is_in_the_table() -> None:
    """Guards: an undocumented patch: each hook target of the plugin is listed as one."""
    source = Path(plugin.__file__).read_text()
    hooked = re.findall(r'HookRegistry\.register\(\s*"([\w.]+)"', source)
    listed = {seam.target.replace(":", ".") for seam in seams.SEAMS if seam.kind == "patch"}
    assert len(hooked) == 7
    assert set(hooked) <= listed
