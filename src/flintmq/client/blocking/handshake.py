"""The blocking shell of a handshake: a fresh connection becomes one that can be used.

Rules of this file: it runs where waiting is allowed, in a thread of a pool, and ends by its deadline; only resolving a
name and the user's ``auth_secret()`` can take longer, because nothing can end those.
"""

from __future__ import annotations

import inspect

from flintmq.client.blocking.stream import Stream, StreamEnded, Time, connect
from flintmq.client.core.handshake import Handshake, Next, is_closing
from flintmq.client.options import SOURCE, ConnectionOptions, seconds
from flintmq.client.security import Secret, checked_secret, secret_failed
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, OptionError, ProtocolError


def check_options(options: ConnectionOptions) -> None:
    """Raise OptionError for what only an event loop can do."""
    if inspect.iscoroutinefunction(options.auth_secret):
        raise OptionError("auth_secret", "an async function", "a plain function: there is no event loop", SOURCE)


def open_stream(handshake: Handshake, options: ConnectionOptions, time: Time) -> Stream:
    """Connect, identify, put in TLS and compression, authorise.

    Raises:
        ConnectionFailed: nsqd cannot be reached, does not answer in time, or cannot be secured (TlsRefused).
        NsqdError: nsqd refuses what was asked for.
        RemoteProtocolError: it is not an nsqd.
    """
    timeout_s = seconds(options.connect_timeout, "connect_timeout")
    deadline = time() + timeout_s
    stream: Stream | None = None
    try:
        stream = connect(handshake.address, deadline, time)
        _shake_hands(handshake, stream, options.auth_secret, deadline)
    except BaseException as error:
        if stream is not None:
            stream.abort()
        if isinstance(error, TimeoutError):
            reason = f"no answer within {timeout_s:g} s: waiting for {handshake.waits_for}"
            raise ConnectionFailed(handshake.address, reason) from error
        if isinstance(error, FlintError) and not isinstance(error, ConnectionFailed | NsqdError | ProtocolError):
            by_nsqd = isinstance(error, StreamEnded) and (error.__cause__ is None or is_closing(error.__cause__))
            raise handshake.ended(None if by_nsqd else error) from error
        raise
    return stream


def _shake_hands(handshake: Handshake, stream: Stream, secret: Secret | None, deadline: float) -> None:
    """Do what the handshake says until the connection can be used."""
    step = handshake.start()
    while True:
        stream.send(step.send, deadline)
        if step.next is Next.READ:
            step = handshake.receive(stream.receive(deadline))
        elif step.next is Next.TLS:
            assert step.tls is not None
            stream.start_tls(step.tls, step.received, deadline)
            step = handshake.secured()
        elif step.next is Next.CODEC:
            assert step.codec is not None
            stream.start_codec(step.codec, step.received)
            step = handshake.compressed()
        elif step.next is Next.SECRET:
            assert secret is not None
            step = handshake.authorise(_obtain(secret, handshake.address))
        else:
            stream.give_back(step.received)
            return


def _obtain(secret: Secret, address: str) -> bytes:
    """The secret for a new connection.

    Raises:
        ConnectionFailed: the user's function raised, or returned what cannot be a secret.
    """
    if not callable(secret):
        return checked_secret(secret)
    try:
        return checked_secret(secret())
    except OptionError as error:
        raise secret_failed(error, address) from None
    except Exception as error:
        raise secret_failed(error, address) from error
