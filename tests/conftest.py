"""For all tests: Ctrl-C arrives, and published options end with the test that published them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sgl_rwttt.srt_ext.options import ENV_OPTIONS

# A shell starts background jobs with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _kept() -> Iterator[None]:
    before = os.environ.get(ENV_OPTIONS)
    yield
    if before is None:
        os.environ.pop(ENV_OPTIONS, None)
    else:
        os.environ[ENV_OPTIONS] = before


@pytest.fixture(autouse=True, scope="module")
def options_of_the_module() -> Iterator[None]:
    """What a module's server publishes does not reach the next module in this process."""
    with _kept():
        yield


@pytest.fixture(autouse=True)
def options_of_the_test() -> Iterator[None]:
    """``monkeypatch.delenv`` of a variable that is not set does not take back a later one."""
    with _kept():
        yield
