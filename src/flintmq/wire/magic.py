"""The four bytes with which a connection says what it speaks, where they are none that is spoken here.

Rules of this file: what is returned is for the log of a daemon alone; a client is answered E_BAD_PROTOCOL and no more,
as by NSQ.

Source: NSQ's TCP protocol; the PROXY protocol, versions 1 and 2; RFC 8446, 5.1 (TLS).
"""

from __future__ import annotations

_MAGIC_SIZE = 4

_HTTP = "HTTP: that has a port of its own, --http-address"
_PROXY = "a proxy in between speaks the PROXY protocol: let it pass on what it gets, and nothing else"
_HINTS = {
    b"PROX": _PROXY,
    b"\r\n\r\n": _PROXY,
    **dict.fromkeys((b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PRI "), _HTTP),
}
_TLS_HANDSHAKE = b"\x16\x03"


def bad_magic(data: bytes | bytearray, tls_hint: str, others: dict[bytes, str]) -> str:
    """Say what came instead of the magic, and what that probably is.

    Args:
        data: what came; its first four bytes are looked at.
        tls_hint: what to do about TLS.
        others: hints for the magic of protocols that other daemons speak.
    """
    magic = bytes(data[:_MAGIC_SIZE])
    if magic.startswith(_TLS_HANDSHAKE):
        hint = tls_hint
    else:
        hint = others.get(magic) or _HINTS.get(magic, "")
    return f"bad protocol magic {repr(magic)[1:]}{hint and f' - {hint}'}"
