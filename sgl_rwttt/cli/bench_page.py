"""Results in a Markdown page: blocks that are replaced, with everything around them kept.

<!-- results: NAME -->
what `benchmarks/NAME.py` printed, and its plots
<!-- end: NAME -->
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from .bench_record import Record
from .errors import UsageError

PLOTS = "plots"  # folder beside the page

_MARKER = re.compile(r"^<!-- (results|end): (\S+) -->[ \t]*$", re.MULTILINE)


def blocks(text: str) -> dict[str, tuple[int, int]]:
    """Where the content of each block begins and ends in the text.

    Raises UsageError for a block without an end, within another, or twice.
    """
    found: dict[str, tuple[int, int]] = {}
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        kind, name = marker.groups()
        line = text.count("\n", 0, marker.start()) + 1
        if (kind == "end") != (opened is not None) or (opened and opened[2] != name):
            raise UsageError(f"line {line}: {marker[0]!r} does not fit what is before it")
        if opened is None:
            if name in found:
                raise UsageError(f"line {line}: a second block {name}")
            opened = marker
        else:
            found[name], opened = (opened.end(), marker.start()), None
    if opened is not None:
        raise UsageError(f"the block {opened[2]} has no <!-- end: {opened[2]} -->")
    return found


def replaced(text: str, contents: Mapping[str, str]) -> str:
    """The text with other contents in the blocks that are named; raises UsageError as `blocks`."""
    for name, (start, end) in reversed(blocks(text).items()):
        if name in contents:
            text = f"{text[:start]}\n\n{contents[name].strip()}\n\n{text[end:]}"
    return text


def update(page: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Put the results of a run into a page, and its plots into the folder `plots` beside it.

    Returns the scripts whose blocks were replaced, and those that have results but no block here.
    A script that failed keeps its old block. Raises UsageError for a page with broken blocks, a
    folder that holds no run, or one at toy size.
    """
    record = Record.read(folder)
    if record.quick:
        raise UsageError(f"{folder} holds a --quick run, whose numbers mean nothing")
    if not page.is_file():
        raise UsageError(f"{page} is no file")
    text = page.read_text(encoding="utf-8")
    try:
        known = blocks(text)
    except UsageError as error:
        raise UsageError(f"{page}: {error}") from error
    done = [name for name in record.scripts if record.is_done(name)]
    here = [name for name in done if name in known]
    contents = {name: _content(folder, name, record.scripts[name].plots or []) for name in here}
    for name in here:
        for plot in record.scripts[name].plots or []:
            (page.parent / PLOTS).mkdir(exist_ok=True)
            shutil.copyfile(folder / plot, page.parent / PLOTS / plot)
    page.write_text(replaced(text, contents), encoding="utf-8")
    return here, [name for name in done if name not in known]


def _content(folder: Path, name: str, plots: list[str]) -> str:
    images = [f"![{Path(plot).stem.replace('-', ' ')}]({PLOTS}/{plot})" for plot in plots]
    return "\n\n".join([(folder / f"{name}.md").read_text(encoding="utf-8").strip(), *images])
