"""Frames as bytes and back. Unknown events and trailing fields of a newer writer are skipped, not fatal."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvlens import KvlensError
from kvlens.engine.probe import AnyEvent
from kvlens.observer.schema import Frame

_encoder = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)
_plain: Final[msgspec.msgpack.Decoder[list[Any]]] = msgspec.msgpack.Decoder(list[Any])
# The tag stands first, then the fields in order.
_EVENTS_AT: Final = 1 + Frame.__struct_fields__.index("events")


class FrameError(KvlensError):
    """Bytes that are no frame of this version."""


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(payload: bytes) -> Frame:
    """Raises FrameError for what is no frame at all."""
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        return _decode_known(payload)
    except msgspec.DecodeError as error:
        raise FrameError(f"a record is no frame: {error}") from None


def _decode_known(payload: bytes) -> Frame:
    """The same frame without the events this version does not know."""
    try:
        fields = _plain.decode(payload)
        fields[_EVENTS_AT] = [event for event in fields[_EVENTS_AT] if _is_known(event)]
        return msgspec.convert(fields, Frame)
    except (msgspec.DecodeError, IndexError, TypeError) as error:
        raise FrameError(f"a record is no frame: {error}") from None


def _is_known(event: Any) -> bool:
    try:
        msgspec.convert(event, AnyEvent)
    except msgspec.ValidationError:
        return False
    return True
