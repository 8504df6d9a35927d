"""``sgl-rwttt inspect``: what a server holds, or what a snapshot file holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import FAILED, OK, UsageError
from .parsers import Commands, api_key
from .server import ServerView
from .snapshot import read_snapshot
from .tables import size, table

DESCRIPTION = """\
Look at a server, at one of its owners, or at a snapshot file. Nothing is changed.

  sgl-rwttt inspect http://127.0.0.1:30000              owners, pools, snapshots
  sgl-rwttt inspect http://127.0.0.1:30000 --owner ID   one owner as a graph, newest first
  sgl-rwttt inspect ./snapshots/tutor                   the header of a file

Owners are listed by a hash of their id, since whoever knows an id may use the owner. A file is read
without a server: its checksums are compared (status 1 if they differ), but whether it fits a model
only a server of that model can say.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a server or a snapshot file holds",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgl-rwttt inspect URL|FILE [options]",
    )
    add = parser.add_argument
    add("target", metavar="URL|FILE", help="http://HOST:PORT of a server, or a snapshot file")
    add("--owner", metavar="ID", help="show the requests of this owner (with a URL)")
    add("--api-key", metavar="KEY", help="the server's key; default: $RWTTT_API_KEY")
    add("--no-verify", action="store_true", help="read a file's header only, not its data")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is there."""
    if options.target.startswith(("http://", "https://")):
        return _server(options)
    if options.owner is not None:
        raise UsageError("--owner goes with the URL of a server")
    path = Path(options.target)
    if not path.is_file():
        what = (
            "is a folder, not a file" if path.is_dir() else "is no file; a URL begins with http://"
        )
        raise UsageError(f"{options.target} {what}")
    found = read_snapshot(path, verify=not options.no_verify)
    print(json.dumps(found.to_json(), indent=2) if options.json else found)
    return FAILED if found.problems else OK


def _server(options: argparse.Namespace) -> int:
    server = ServerView(options.target, api_key(options))
    if options.owner is not None:
        owner = server.owner(options.owner)
        if options.json:
            print(json.dumps(owner, indent=2))
        else:
            from sgl_rwttt.lang.tree import tree_of

            print(tree_of(owner))
        return OK
    found = {"info": server.info(), "owners": server.owners(), "snapshots": server.snapshots()}
    print(json.dumps(found, indent=2) if options.json else server_text(found))
    return OK


def server_text(found: dict[str, Any]) -> str:
    """Identity, pools, owners and snapshots of a server."""
    info = found["info"]
    parts = [_identity(info), _pools(info), _owners(found["owners"])]
    if "dp_ranks" in info:
        parts.insert(2, _ranks(info["dp_ranks"]))
    if found["snapshots"] is not None:
        parts.append(_snapshots(found["snapshots"]["snapshots"]))
    return "\n\n".join(parts)


def _identity(info: dict[str, Any]) -> str:
    rows = [
        ("model", info["model_path"]),
        ("rule", f"{info['pools'].get('rule', info['rule'])}"),
        ("fingerprint", info["fingerprint"]),
        ("boot id", info["boot_id"]),
        ("running", info["running"]),
    ]
    return "\n".join(f"{name:<12} {value}" for name, value in rows)


def _pools(info: dict[str, Any]) -> str:
    pools, store = info["pools"], info["store"]
    rows = [
        (
            name,
            store[f"{name}_live"],
            store[f"{name}_free"],
            store[f"{name}_total"],
            size(pools[each]),
            size(store[f"{name}_live"] * pools[each]),
        )
        for name, each in (("pages", "page_bytes"), ("bases", "base_bytes"))
    ]
    return table(("pool", "live", "free", "total", "each", "in use"), rows)


def _ranks(found: list[dict[str, Any]]) -> str:
    """What each data-parallel rank holds."""
    head = ("dp_rank", "owners", "running", "pages", "free", "bases", "free")
    slots = ("pages_live", "pages_free", "bases_live", "bases_free")
    rows = [
        [each["dp_rank"], each["sessions"], each["running"], *(each["store"][key] for key in slots)]
        for each in found
    ]
    return table(head, rows)


def _owners(found: dict[str, Any]) -> str:
    if not found["owners"]:
        return "no owners"
    head = ("owner", "branches", "running", "roots", "pins", "bytes", "idle s")
    keys = ("name", "nodes", "running", "root_count", "pin_count", "referenced_bytes", "idle_s")
    rank = ("dp_rank",) if "dp_rank" in found["owners"][0] else ()
    rows = [[owner[key] for key in (*keys, *rank)] for owner in found["owners"]]
    more = f"\n... of {found['count']} owners" if found["truncated"] else ""
    return table((*head, *rank), rows) + more


def _snapshots(found: list[dict[str, Any]]) -> str:
    if not found:
        return "no snapshots"
    rows = [
        [each["name"], each.get("version"), each.get("bytes"), _refusal(each)] for each in found
    ]
    return table(("snapshot", "version", "bytes", ""), rows)


def _refusal(snapshot: dict[str, Any]) -> str:
    return str(snapshot["error"]["message"]) if "error" in snapshot else ""
