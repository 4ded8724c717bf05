"""Every fault that can be switched on. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultInfo:
    """One way in which engines have lost KV."""

    name: str
    kind: str
    """The kind of finding it must lead to."""
    description: str


FAULTS = {
    info.name: info
    for info in (
        FaultInfo(
            "abort-skips-release", "orphan_row", "An aborted request that holds slots leaves without the release path."
        ),
        FaultInfo(
            "chunk-reuses-released-row", "record_reused_after_release",
            "A row is released between two chunks of a prompt, and its record goes on as if it held it.",
        ),
        FaultInfo("double-free", "double_free", "A finished request returns the slots of its body twice."),
    )
}  # fmt: skip
