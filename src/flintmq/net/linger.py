"""Closing a connection so that the peer still reads our last bytes.

Closing a socket with unread input makes the kernel send a reset, and a reset discards what the peer has not read yet:
an error answer to a request that was refused half-way would be lost. So: send our end of stream, throw away what still
comes in, and close when the peer does or when a bound has passed.
"""

from __future__ import annotations

import asyncio

LINGER_S = 1.0


def close_lingering(
    transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop, has_peer_ended: bool = False
) -> asyncio.TimerHandle | None:
    """Send the end of stream now and abort after a bound; the caller's protocol must drop what it still receives.

    Args:
        has_peer_ended: nothing will come in any more: the connection is closed as soon as our last bytes are sent.

    Returns:
        The timer, to be cancelled in ``connection_lost``; None when the transport was closed at once, because it
        cannot half-close (TLS) or the peer has gone.
    """
    if transport.is_closing():
        return None
    if has_peer_ended:
        transport.close()
    elif transport.can_write_eof():
        try:
            transport.write_eof()
        except OSError:  # asyncio's own loop passes on that the peer has sent a reset
            transport.abort()
            return None
    else:
        transport.close()
        return None
    return loop.call_later(LINGER_S, transport.abort)
