"""The blocking shell of a handshake: a fresh connection becomes one that can be used.

Rules of this file: it runs where waiting is allowed (a crew's thread), and ends by its deadline; only resolving a name
and the user's ``auth_secret()`` can take longer, because nothing can end those.
"""

from __future__ import annotations

import inspect

import msgspec

from flintmq import __version__
from flintmq.client.blocking.stream import Stream, Time, connect
from flintmq.client.core.handshake import Handshake, Next
from flintmq.client.options import SOURCE, ConnectionOptions, seconds, split_address
from flintmq.client.security import Secret, checked_secret
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, OptionError, ProtocolError
from flintmq.wire.client import ClientConnection
from flintmq.wire.identify import ExtendedIdentifyRequest, OnceIdentifyRequest


def check_options(options: ConnectionOptions) -> None:
    """Raise OptionError for what only an event loop can do."""
    if inspect.iscoroutinefunction(options.auth_secret):
        raise OptionError("auth_secret", "an async function", "a plain function: there is no event loop", SOURCE)


def open_stream(
    address: str,
    wire: ClientConnection,
    options: ConnectionOptions,
    env: Env,
    time: Time,
    desired_tag: str | None,
    once: bool = False,
) -> tuple[Stream, Handshake]:
    """Connect, identify, put in TLS and compression, authorise.

    Args:
        desired_tag: tell nsqd that headers are understood, which messages to be given first (empty: any); None: don't.
        once: take only an nsqd that knows producer sequences.

    Raises:
        ConnectionFailed: nsqd cannot be reached, does not answer in time, or cannot be secured (TlsRefused).
        NsqdError: nsqd refuses what was asked for.
        RemoteProtocolError: it is not an nsqd.
    """
    timeout_s = seconds(options.connect_timeout, "connect_timeout")
    deadline = time() + timeout_s
    handshake = _new_handshake(address, wire, options, env, desired_tag, once)
    stream: Stream | None = None
    try:
        stream = connect(address, deadline, time)
        _shake_hands(handshake, stream, options.auth_secret, deadline)
    except BaseException as error:
        if stream is not None:
            stream.abort()
        if isinstance(error, TimeoutError):
            reason = f"no answer within {timeout_s:g} s: waiting for {handshake.waits_for}"
            raise ConnectionFailed(address, reason) from error
        if isinstance(error, FlintError) and not isinstance(error, ConnectionFailed | NsqdError | ProtocolError):
            raise handshake.ended(error) from error
        raise
    return stream, handshake


def _new_handshake(
    address: str, wire: ClientConnection, options: ConnectionOptions, env: Env, desired_tag: str | None, once: bool
) -> Handshake:
    try:
        tls = options.client_tls(address, split_address(address)[0]) if options.tls else None
    except OptionError as error:  # a file that was there when the options were made
        raise ConnectionFailed(address, str(error)) from error
    request = options.identify_request(env.hostname, __version__)
    if once:
        request = OnceIdentifyRequest(**msgspec.structs.asdict(request))
    if desired_tag is not None:
        request = ExtendedIdentifyRequest(**msgspec.structs.asdict(request), desired_tag=desired_tag)
    return Handshake(
        address,
        wire,
        request,
        tls,
        has_secret=options.auth_secret is not None,
        can_renew_secret=callable(options.auth_secret),
    )


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
        raise ConnectionFailed(address, f"auth_secret() must return {error.allowed}, not {error.value}") from None
    except Exception as error:  # the user's code; its text may hold the secret, so only the cause carries it
        raise ConnectionFailed(address, f"auth_secret() raised {type(error).__name__}") from error
