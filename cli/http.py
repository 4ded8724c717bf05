"""One HTTP exchange of a command, with errors that say what to do."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any, TypeVar

import msgspec

from kvlens import KvlensError

T = TypeVar("T")


def exchange(url: str, *, token: str | None = None, body: Any = None, who: str, remedy: str) -> bytes:
    """GET, or POST of `body` as JSON. `who` and `remedy` complete the message when nobody answers.

    Raises KvlensError when it cannot be reached or answers with an error.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        request = urllib.request.Request(url, None if body is None else msgspec.json.encode(body), headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(300).decode(errors="replace").strip()
        raise KvlensError(f"{who} at {url} answered HTTP {error.code}: {said or error.reason}") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise KvlensError(f"no {who} at {url} ({reason}): {remedy}") from None


def ask_observer(url: str, path: str, kind: type[T], token: str | None = None, body: Any = None) -> T:
    """The answer of an observer as `kind`. Raises KvlensError."""
    answer = exchange(
        f"{url.rstrip('/')}{path}",
        token=token,
        body=body,
        who="observer",
        remedy="start `kvlens observe`, or give its URL",
    )
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise KvlensError(f"{url} is not a kvlens observer of this version: {error}") from None
