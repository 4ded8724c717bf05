"""Keys and words."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import Static

TEXT = """\
[b]Keys[/b]
  /      filter by words        s      next sort order
  Enter  timeline of a request  Tab    next pane
  Esc    back, clear filter     q      leave

[b]Words[/b]
  [b]free[/b]         nobody's: ready to be handed out
  [b]evictable[/b]    kept by the prefix cache, unlocked: given back on demand
  [b]protected[/b]    kept by the prefix cache, locked by somebody who runs
  [b]private[/b]      held by live requests behind their prefix
  [b]session[/b]      the same, of idle sessions
  [b]unaccounted[/b]  held by nobody: a leak; below zero: returned twice
  [b]prot, commit, alloc[/b]  tokens of a row that the cache owns, that are
               promised, and that have slots
  [b]orphan[/b]       a row that is taken, and that no request holds
"""


class HelpScreen(ModalScreen[None]):
    """Esc or ? leads back."""

    BINDINGS = [Binding("escape,question_mark,q", "app.pop_screen", "Back")]

    def compose(self) -> ComposeResult:
        yield Static(TEXT, id="help")
