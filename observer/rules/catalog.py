"""Every rule, and whether it can run on what a source knows."""

from __future__ import annotations

from kvlens.observer.ledger import Ledger
from kvlens.observer.rules import balance, census, checks, orphan_row
from kvlens.observer.rules.claim import Claim
from kvlens.observer.schema import Identity

RULES = (orphan_row, balance, census, checks)


def standing(identity: Identity) -> dict[str, str]:
    """Rule to `ok`, or to why it cannot run: silence is not health."""
    known = set.intersection(*(set(pool.facts) for pool in identity.pools)) if identity.pools else set()
    return {rule.name: _standing(rule.needs - known, identity.source) for rule in RULES}


def _standing(missing: frozenset[str], source: str) -> str:
    return f"needs {', '.join(sorted(missing))}, which {source} does not know" if missing else "ok"


def judge(ledger: Ledger) -> list[Claim]:
    """Everything that is wrong now, by the rules that can run."""
    able = standing(ledger.identity)
    return [claim for rule in RULES if able[rule.name] == "ok" for claim in rule.judge(ledger)]
