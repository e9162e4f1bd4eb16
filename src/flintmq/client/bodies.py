"""Bodies as values: what a consumer's ``type`` and a producer's argument mean in bytes.

=====================  ==================================  ========================
type                   body                                library
=====================  ==================================  ========================
``bytes``              as it is
``str``                UTF-8                               (to read only)
anything else          JSON of that type, checked          msgspec
=====================  ==================================  ========================

A text that is published is a mistake more often than not (is it JSON, is it text?), so it has to be encoded first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from flintmq.errors import BodyError, OptionError

Value = TypeVar("Value")


def decoder(kind: type[Value]) -> Callable[[bytes], Value]:
    """What turns a body into a value; it raises :class:`BodyError`.

    Raises:
        OptionError: nothing can be decoded to this type.
    """
    if kind is bytes:
        return cast(Callable[[bytes], Value], _as_bytes)
    if kind is str:
        return cast(Callable[[bytes], Value], _as_text)
    try:
        decode = msgspec.json.Decoder(kind).decode
    except (TypeError, NameError) as error:
        raise OptionError("type", kind, f"a type that msgspec reads from JSON ({error})", "argument") from error
    name = getattr(kind, "__name__", str(kind))

    def read(body: bytes) -> Value:
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BodyError(f"JSON of type {name}", str(error)) from error

    return read


def _as_bytes(body: bytes) -> bytes:
    return body


def _as_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BodyError("text in UTF-8", str(error)) from error


def encoded(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        TypeError: it is text, or nothing that JSON can say.
    """
    if isinstance(value, str) or value is None:
        raise TypeError(f"a body is bytes or a value for JSON, not {type(value).__name__}; encode it first")
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise TypeError(f"a body is bytes or a value for JSON, not {type(value).__name__}: {error}") from error
