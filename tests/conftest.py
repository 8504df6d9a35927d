"""For all tests: Ctrl-C arrives, also where the runner was started in the background."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
