"""Bodies as values: what a consumer's ``type`` or ``decode`` and a producer's argument mean in bytes.

==============================  ==================================  ========================
``type``                        body                                library
==============================  ==================================  ========================
``bytes``                       as it is
``str``                         UTF-8                               (to read only)
pydantic model or dataclass,    JSON, validated by pydantic         pydantic 2, the user's
or a type made of them
anything else                   JSON of that type, checked          msgspec
==============================  ==================================  ========================

Rules of this file:

- A type that nothing can build is refused where it is declared: msgspec itself takes any class, and then refuses every
  body.
- Whatever goes wrong while a body is read is a :class:`BodyError`, so that it is never taken for a mistake of the
  handler's. Only what says what to do with the message (:class:`Requeue`, :class:`Discard`) and what says nothing of
  the body (out of memory) goes through.
- pydantic is imported when a type of its own is declared, and not before.
- A text that is published is a mistake more often than not (is it JSON, is it text?), so it has to be encoded first.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args, get_origin

import msgspec
import msgspec.inspect

from flintmq.client.core.message import Discard, Requeue, meaning_of
from flintmq.errors import BodyError, OptionError

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # a type, or what is written as one: Model | None

Value = TypeVar("Value")
Read = Callable[[bytes], Value]

REASON_SIZE_MAX = 300
_ERROR_COUNT_MAX = 3
_PLAIN_VALUES: tuple[object, ...] = (None, True, 0, 0.5, "", [], {})
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""NaN and the infinities in MessagePack, which is written as quickly as JSON; a number or bytes may look the same."""

_ALLOWED = (
    "a type that msgspec reads from JSON (Struct, dataclass, TypedDict, dict, list, ...), a pydantic model, str or "
    "bytes; for everything else pass decode=, a function that makes the value from the bytes of the body"
)


def reader(kind: TypeForm[Value] | None, decode: Read[Value] | None) -> Read[Value]:
    """Return what turns a body into a value, from a consumer's ``type`` and ``decode``; it raises :class:`BodyError`.

    Raises:
        OptionError: both are given, or one cannot be used.
    """
    if decode is None:
        return cast(Read[Value], decoder(bytes if kind is None else kind))
    if kind is not None:
        raise OptionError("decode", decode, "either type or decode: what decode returns is the value", "argument")
    if not _is_plain_function(decode):
        raise OptionError("decode", decode, "a plain function from the bytes of a body to a value", "argument")
    return _checked(decode, f"what decode={_name(decode)} reads")


def decoder(kind: TypeForm[Value]) -> Read[Value]:
    """Return what turns a body into a value of a type; it raises :class:`BodyError`.

    Raises:
        OptionError: nothing can be decoded to this type.
    """
    if get_origin(kind) is Annotated and get_args(kind)[0] in (bytes, str) and _is_only_described(kind):
        kind = get_args(kind)[0]
    if kind is bytes:
        return cast(Read[Value], _as_bytes)
    if kind is str:
        return _checked(cast(Read[Value], bytes.decode), "text in UTF-8")
    try:
        decode = _pydantic_decode(kind) if any(map(_is_pydantic, _parts(kind))) else _msgspec_decode(kind)
    except OptionError:
        raise
    except Exception as error:  # of a library: what it says of a type that it cannot use
        raise OptionError("type", kind, f"{_ALLOWED} ({one_line(error)})", "argument") from error
    return _checked(decode, f"JSON of type {_name(kind)}")


def _is_plain_function(function: object) -> bool:
    return callable(function) and not inspect.iscoroutinefunction(function)


def _checked(decode: Read[Value], what: str) -> Read[Value]:
    def read(body: bytes) -> Value:
        try:
            return decode(body)
        except (BodyError, MemoryError):
            raise
        except Exception as error:
            if isinstance(meaning_of(error), Requeue | Discard):
                raise
            raise BodyError(what, _reason(error)) from error

    return read


def _as_bytes(body: bytes) -> bytes:
    return body


def _msgspec_decode(kind: TypeForm[Value]) -> Read[Value]:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if base in (bytes, str, bytearray, memoryview):
        allowed = "bytes or str for a body that is not JSON, without more to say of it"
        raise OptionError("type", kind, allowed, "argument")
    decode = msgspec.json.Decoder(kind).decode
    if (foreign := _unbuildable(kind)) is not None:
        where = "" if foreign is kind else f", of which {_name(kind)} is made"
        raise OptionError("type", kind, f"{_ALLOWED} (msgspec cannot build {_name(foreign)}{where})", "argument")
    return decode


def _unbuildable(kind: object) -> object | None:
    """A class that a type is made of and msgspec cannot build: it leaves such to a hook, and there is none."""
    seen: dict[int, object] = {}
    waiting: list[object] = [msgspec.inspect.type_info(kind)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, tuple):
            waiting += each
        elif isinstance(each, msgspec.inspect.CustomType) and not _is_plain(each.cls):
            return each.cls
        elif isinstance(each, msgspec.inspect.Type | msgspec.inspect.Field) and id(each) not in seen:
            seen[id(each)] = each  # kept, so that nothing else gets its id; a type may be part of itself
            waiting += (getattr(each, name) for name in each.__struct_fields__)
    return None


def _is_plain(kind: type) -> bool:
    """Whether something that JSON can say is an instance, as of ``object``: msgspec only checks that."""
    try:
        return any(isinstance(value, kind) for value in _PLAIN_VALUES)
    except TypeError:
        return False


def _pydantic_decode(kind: TypeForm[Value]) -> Read[Value]:
    from pydantic import TypeAdapter

    adapter = TypeAdapter(kind)
    assert callable(adapter.validator.validate_json)  # raises what is missing, if the type is not complete
    return adapter.validate_json


def _is_pydantic(kind: object) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def _is_only_described(kind: object) -> bool:
    """Whether what is annotated are words for people, and nothing to check."""
    return all(isinstance(note, str) or hasattr(note, "documentation") for note in get_args(kind)[1:])


def _parts(kind: object) -> Iterator[object]:
    """A type, and the types that its brackets name."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _name(kind: object) -> str:
    is_bare = not get_args(kind)
    return getattr(kind, "__qualname__", str(kind)).rpartition(".<locals>.")[2] if is_bare else str(kind)


def _reason(error: Exception) -> str:
    """Return why a body cannot be read, on one line."""
    details = getattr(error, "errors", None)
    if not callable(details):
        return one_line(error)
    try:  # pydantic's own text is several lines, with the body in them
        found = details(include_url=False, include_context=False, include_input=False)
        texts = [f"{each['msg']} - at `{'.'.join(map(str, ('$', *each['loc'])))}`" for each in found]
    except (TypeError, KeyError):  # the errors of some other library
        return one_line(error)
    more = f" and {len(texts) - _ERROR_COUNT_MAX} more" if len(texts) > _ERROR_COUNT_MAX else ""
    return _cut("; ".join(texts[:_ERROR_COUNT_MAX]) + more)


def one_line(error: BaseException) -> str:
    """Return what an exception says, on one line of ``REASON_SIZE_MAX`` characters at most, or its name."""
    return _cut(" ".join(str(error).split()) or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= REASON_SIZE_MAX else f"{text[: REASON_SIZE_MAX - 3]}..."


def encoded(value: Any, what: str = "") -> bytes:
    """A value as JSON; pydantic's models as they say it themselves, with the names that they read (aliases).

    Args:
        what: what it has to be, for errors; a body if empty.

    Raises:
        TypeError: it is text, or nothing that JSON can say.
    """
    if isinstance(value, str) or value is None:
        raise TypeError(f"a body is bytes or a value for JSON, not {type(value).__name__}; encode it first")
    try:
        data = msgspec.json.encode(value, enc_hook=_as_raw)
        if data.find(b"null") >= 0:  # which msgspec says for NaN too; "in" would take three times as long
            _check_floats(value)
        return data
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        what = what or f"a body is bytes or a value for JSON, not {type(value).__name__}"
        raise TypeError(f"{what}: {error}") from error


def _check_floats(value: Any) -> None:
    """Raise ValueError for NaN and the infinities; what becomes of those of pydantic's models, these say themselves."""
    try:
        if _NOT_FINITE.search(msgspec.msgpack.encode(value, enc_hook=_nothing)) is None:
            return
    except OverflowError:  # an integer that only JSON can say
        pass
    plain = msgspec.to_builtins(value, str_keys=True, builtin_types=(msgspec.Raw,), enc_hook=_nothing)
    try:
        json.dumps(plain, allow_nan=False, default=_nothing)
    except ValueError as error:
        raise ValueError("JSON has no NaN and no infinity; None is its null") from error


def is_model(value: object) -> bool:
    """Whether a value is one of pydantic's models."""
    return _is_pydantic(type(value)) and hasattr(value, "model_dump_json")


def _nothing(value: Any) -> None:
    """Stands for what has no floats of its own."""


def _as_raw(value: Any) -> msgspec.Raw:
    """A pydantic model, wherever it is inside of a value."""
    if not is_model(value):
        raise TypeError(f"objects of type {type(value).__name__} cannot be said in JSON")
    return msgspec.Raw(value.model_dump_json(by_alias=True).encode())
