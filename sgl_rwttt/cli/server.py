"""The verbs of a server that only look, over HTTP."""

from __future__ import annotations

from typing import Any

from sgl_rwttt.core.errors import StateError

from .errors import CommandFailed

_TIMEOUT_S = 30.0
Json = dict[str, Any]


class ServerView:
    """A server at a URL. Every method raises CommandFailed when it cannot be reached or is another
    kind of server, and the StateError that it answers."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def info(self) -> Json:
        """Identity, pools and counters."""
        return self._ask("info", {})

    def owners(self) -> Json:
        """Every owner, by public name."""
        return self._ask("owners", {})

    def owner(self, owner: str) -> Json:
        """One owner by its id, which does not go into the path, where it might be logged."""
        return self._ask("owner", {"owner": owner})

    def snapshots(self) -> Json | None:
        """The snapshots; None on a server that keeps none."""
        try:
            return self._ask("snapshots", {})
        except StateError as error:
            if "keeps no snapshots" in str(error):
                return None
            raise

    def _ask(self, op: str, args: Json) -> Json:
        import requests

        url = f"{self._url}/ttt/{op}"
        try:
            response = requests.post(url, json=args, headers=self._headers, timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            raise CommandFailed(f"{self._url} cannot be reached: {error}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code == 401:
            raise CommandFailed(f"{self._url} wants its API key: --api-key, or $RWTTT_API_KEY")
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise StateError.from_wire(answer["error"])
        if response.status_code != 200 or not isinstance(answer, dict):
            raise CommandFailed(
                f"{url} answered {response.status_code}: is this a server of a TTT checkpoint?"
            )
        return answer
