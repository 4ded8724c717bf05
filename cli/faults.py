"""`kvlens faults`: leaks on request, in a running engine."""

from __future__ import annotations

from kvlens.cli.http import exchange


def switch(url: str, name: str, *, enabled: bool, times: int | None) -> None:
    """Raises KvlensError when the engine cannot be reached or takes no faults."""
    exchange(
        f"{url.rstrip('/')}/faults/{name}",
        body={"enabled": enabled, "times": times},
        who="engine that takes faults",
        remedy="start `kvlens serve --allow-faults`, or give --url",
    )
