"""Synthetic users: conversations, long documents, and people who hang up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

# First lines and plain remarks in the manner of the text the bundled model has read.
OPENINGS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "The family of Dashwood had been long settled in Sussex. Their estate was large",
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition",
    "No one who had ever seen Catherine Morland in her infancy would have supposed her",
    "About thirty years ago, Miss Maria Ward, of Huntingdon, with only seven thousand pounds",
    "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own amusement",
)
REMARKS = (
    "The evening passed quietly, unmarked by anything extraordinary.",
    "She said no more, and they walked on in silence as far as the gate.",
    "He was to leave the country on Saturday, and nobody could say for how long.",
    "Her mother had a great deal to say upon the subject of lace.",
    "They were all to dine together at the Hall, if the roads would permit it.",
    "Nothing could have been more delightful than the drive home.",
)
MANNER = "Letters between friends in the country, with some account of their visits and their opinions. "


@dataclass(frozen=True, slots=True)
class UsersConfig:
    """Who asks, and how."""

    engine_url: str
    users: int = 8
    hang_up: float = 0.1
    """Share of requests whose client disconnects before the answer is complete."""
    long_prompts: float = 0.15
    """Share of conversations that open with a document of several chunks."""
    pause_seconds: float = 0.3
    """Longest pause between two requests of one user."""
    seed: int = 7


@dataclass(slots=True)
class UserTotals:
    """What the users saw."""

    sent: int = 0
    answered: int = 0
    hung_up: int = 0
    refused: int = 0
    first_token_seconds: float | None = None
    """From the first request to the first token any user received."""
    errors: list[str] = field(default_factory=list)


class SyntheticUsers:
    """Runs `config.users` people against one engine until told to stop."""

    def __init__(self, config: UsersConfig) -> None:
        self._config = config
        self.totals = UserTotals()
        self._started = 0.0

    async def run(self, stop: asyncio.Event) -> UserTotals:
        """Ask until `stop` is set; requests then under way are answered to their end."""
        self._started = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(self._person(session, number, stop) for number in range(self._config.users)))
        return self.totals

    async def _person(self, session: aiohttp.ClientSession, number: int, stop: asyncio.Event) -> None:
        dice = random.Random(f"{self._config.seed}/{number}")
        while not stop.is_set():
            text = self._opening(dice)
            for _ in range(dice.randint(1, 4)):
                answer = await self._ask(session, text, dice)
                await self._pause(stop, dice)
                if answer is None or stop.is_set():
                    break
                text = f"{text}{answer}\n{dice.choice(REMARKS)}\n"

    def _opening(self, dice: random.Random) -> str:
        if dice.random() >= self._config.long_prompts:
            return f"{MANNER}{dice.choice(OPENINGS)}"
        document = " ".join(dice.choice(REMARKS) for _ in range(dice.randint(15, 30)))
        return f"{MANNER}{document}\n{dice.choice(OPENINGS)}"

    async def _pause(self, stop: asyncio.Event, dice: random.Random) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), dice.uniform(0, self._config.pause_seconds))

    async def _ask(self, session: aiohttp.ClientSession, text: str, dice: random.Random) -> str | None:
        """One streamed completion; None when it was refused, failed, or the person hung up."""
        body: dict[str, Any] = {
            "model": "builtin", "prompt": text, "stream": True, "temperature": 0.8, "top_p": 0.95,
            "seed": dice.randrange(1 << 31), "max_tokens": dice.choice((16, 32, 48, 96)),
        }  # fmt: skip
        # Some hang up before the first token, some in mid-answer.
        patience = dice.randint(0, body["max_tokens"] // 2) if dice.random() < self._config.hang_up else None
        glance = dice.uniform(0.005, 0.05) if patience == 0 else None
        headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
        self.totals.sent += 1
        try:
            return await asyncio.wait_for(self._exchange(session, body, headers, patience), glance)
        except asyncio.TimeoutError:
            self.totals.hung_up += 1
        except aiohttp.ClientError as error:
            self._note(f"{type(error).__name__}: {error}")
        return None

    async def _exchange(
        self, session: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str], patience: int | None
    ) -> str | None:
        url = f"{self._config.engine_url}/v1/completions"
        async with session.post(url, json=body, headers=headers) as response:
            return await self._read(response, patience)

    async def _read(self, response: aiohttp.ClientResponse, patience: int | None) -> str | None:
        if response.status == 503:
            self.totals.refused += 1
            await asyncio.sleep(0.5)
            return None
        if response.status != 200:
            self._note(f"HTTP {response.status}: {(await response.text())[:200]}")
            return None
        pieces: list[str] = []
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if self.totals.first_token_seconds is None:
                self.totals.first_token_seconds = round(time.monotonic() - self._started, 3)
            pieces.append(msgspec.json.decode(line[6:])["choices"][0]["text"])
            if patience is not None and len(pieces) >= patience:
                response.close()
                self.totals.hung_up += 1
                return None
        self.totals.answered += 1
        return "".join(pieces)

    def _note(self, error: str) -> None:
        if len(self.totals.errors) < 10:
            self.totals.errors.append(error)
