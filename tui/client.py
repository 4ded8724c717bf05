"""Asks an observer; whatever goes wrong becomes part of the view, never an exception."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from kvlens.observer.schema import RowState, State, Timeline
from kvlens.tui.model import View

T = TypeVar("T")
MOST_ROWS = 500


class _Rows(msgspec.Struct):
    rows: tuple[RowState, ...]
    total: int


class ObserverClient:
    """One observer over HTTP. `refresh` keeps the last complete view while the observer is gone."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self.view = View(self.url, time.time())

    async def refresh(self) -> View:
        """The newest view: a complete answer, or the last one marked as old."""
        try:
            state = await self._get("/api/v1/state", State)
            rows = await self._get(f"/api/v1/rows?limit={MOST_ROWS}", _Rows)
            self.view = self.view.answered(time.time(), state, rows.rows, rows.total)
        except Exception as error:
            self.view = self.view.failed(time.time(), _reason(error))
        return self.view

    async def timeline(self, rid: str) -> Timeline | str:
        """A request's timeline, or why there is none."""
        try:
            return await self._get(f"/api/v1/requests/{quote(rid, safe='')}", Timeline)
        except Exception as error:
            return _reason(error)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str, kind: type[T]) -> T:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=aiohttp.ClientTimeout(total=5, connect=2)
            )
        async with self._session.get(self.url + path) as response:
            body = await response.read()
            if response.status != 200:
                raise _Refused(f"HTTP {response.status}: {_said(body)}")
            return msgspec.json.decode(body, type=kind)


class _Refused(Exception):
    """The observer answered, with an error."""


def _said(body: bytes) -> str:
    try:
        answer: Any = msgspec.json.decode(body)
        return str(answer["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:100].decode(errors="replace")


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"nobody answers at {error.host}:{error.port} ({error.os_error.strerror or 'no route'})"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer within 5 s"
    if isinstance(error, msgspec.DecodeError):
        return f"not an observer of this version: {error}"
    return str(error) or type(error).__name__
