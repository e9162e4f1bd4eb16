"""Whether a browser sent a request from elsewhere: a page of a stranger may not use a daemon through its visitors.

Three headers tell, and no page can choose them::

    Origin: https://wiki.example           the page that asks; "null" for one that hides it
    Sec-Fetch-Site: cross-site             how far that page is from here, over HTTPS and to localhost
    Host: evil.example:4151                the name that the browser looked up

Rules of this file:

- It is pure: headers in, a verdict out; only :func:`local_names` reads a file, before anything listens.
- What has neither Origin nor Sec-Fetch-Site comes from no page, or asks for what the page cannot read; curl, clients,
  services and proxies are that.
- ``Sec-Fetch-Site`` is believed before Origin is compared with Host, because proxies replace Host.
- Host is looked at only where a request arrived at a loopback address: there a page can reach what nobody else can, by
  letting its own name stand for 127.0.0.1 (DNS rebinding), and is then of the same origin. No page can have an address,
  a name below ``localhost``, or a name of this host as its own.
- A link that somebody follows (a top-level GET) goes through: nothing changes by GET, and the page before cannot read
  the answer. ``/debug`` is excepted, where asking alone costs something.
- Texts of a stranger are cut and escaped before they are told to anybody.

Source: RFC 6454, the Fetch standard (Origin, CORS), W3C Fetch Metadata; net/http.CrossOriginProtection of Go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any

from flintmq.errors import OptionError

FLAG = "--http-allow-origin"
HOSTS_FILE = "/etc/hosts"
HOSTS_FILE_SIZE_MAX = 256 * 1024
SHOWN_SIZE_MAX = 100
PREFLIGHT_AGE_S = 600
HEADER_NAMES_SIZE_MAX = 1024

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\],*]+)(?::([0-9]{1,5}))?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_NEAR = (b"same-origin", b"none")  # none: typed into the address bar, or a bookmark
_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_COSTLY = b"/debug"
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")  # of /etc/hosts


class Verdict:
    """The decision about a request.

    Attributes:
        refusal: why it is refused, with what to do; empty when it is not.
        headers: what every answer to it has to say so that the page may read it: whole lines, mostly none.
        is_preflight: it only asks whether a page may send another one, and ``headers`` answer that.
    """

    __slots__ = ("headers", "is_preflight", "refusal")

    def __init__(self, refusal: str = "", headers: bytes = b"", is_preflight: bool = False) -> None:
        self.refusal = refusal
        self.headers = headers
        self.is_preflight = is_preflight


_WELCOME = Verdict()


class Origins:
    """The rule of one daemon.

    Args:
        allowed: origins of pages that may use it, as :func:`parse_origin` takes them; their hosts are names of it too.
        hosts: further names of it.
    """

    def __init__(self, allowed: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self._allowed: set[bytes] = set()
        self._hosts = {host.lower().rstrip(".") for host in hosts if host}
        for text in allowed:
            scheme, host, port = parse_origin(text)
            self._hosts.add(host)
            self._allowed.add(_spelled(scheme, host, port).encode())

    def judge(self, method: bytes, path: bytes, headers: Mapping[bytes, bytes], is_at_loopback: bool) -> Verdict:
        """Decide about a request.

        Args:
            headers: by names in lower case.
            is_at_loopback: it arrived at an address of this host that only this host can reach.
        """
        host = headers.get(b"host", b"")
        if is_at_loopback and host and not self._is_here(host):
            return _refused(
                "Host", host, f"is no name of this host that it knows; {FLAG}=http://{_shown(host)} adds it"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() in self._allowed:
            return _allowed(method, origin, headers)
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            if site.lower() in _NEAR or _is_followed_link(method, path, headers):
                return _WELCOME
        elif origin is None or _is_same(origin, host):
            return _WELCOME
        if origin is None:
            what = f"is a page of another origin; it has to ask by fetch, and {FLAG} has to name its origin"
            return _refused("Sec-Fetch-Site", site or b"", what)
        if origin == b"null":
            return _refused("Origin", origin, f"is any page; only one that says its origin can be allowed, by {FLAG}")
        return _refused("Origin", origin, f"is another origin; {FLAG}={_shown(origin)} allows it")

    def _is_here(self, value: bytes) -> bool:
        host = _host_of(value.decode("latin-1"))
        return is_loopback_name(host) or _is_address(host) or host in self._hosts


def parse_origin(text: str) -> tuple[str, str, str]:
    """Return scheme, host and port of an origin; the port is empty where it is the scheme's own.

    Raises:
        ValueError: it is none.
    """
    found = _ORIGIN.fullmatch(text.lower().removesuffix("/"))
    if found is None or int(found[3] or 0) > 65535:
        example = "https://wiki.example or http://10.0.0.5:8080"
        raise ValueError(f"it must be the origin of a page as its browser says it: {example}")
    scheme, host, port = found[1], found[2].rstrip("."), found[3] or ""
    return scheme, host.strip("[]"), "" if port == _DEFAULT_PORTS.get(scheme) else port


def check_origins(origins: Iterable[str]) -> None:
    """Check what an option ``http_allow_origin`` says.

    Raises:
        OptionError: one of them is no origin.
    """
    for each in origins:
        try:
            parse_origin(each)
        except ValueError as error:
            raise OptionError("http_allow_origin", each, str(error), "argument") from None


def local_names(path: str = HOSTS_FILE) -> tuple[str, ...]:
    """Return the names that this machine's own list gives its loopback addresses; none when it cannot be read.

    Debian writes a machine's full name there: whoever asks it by that name arrives at 127.0.1.1.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.read(descriptor, HOSTS_FILE_SIZE_MAX).decode("utf-8", "replace").splitlines()
        finally:
            os.close(descriptor)
    except OSError:
        return ()
    found: dict[str, None] = {}
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        if is_loopback_address((address,)):
            found |= dict.fromkeys(names)
    return tuple(found)


def is_loopback_address(sockname: Any) -> bool:
    """Whether ``getsockname`` of a connection says that it arrived at a loopback address; a unix socket has none."""
    if not isinstance(sockname, tuple):
        return False
    try:
        address = ip_address(str(sockname[0]).partition("%")[0])
    except (ValueError, IndexError):
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(host: str) -> bool:
    """Whether a name means this host wherever it is used: nobody can register it."""
    return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _host_of(value: str) -> str:
    """Return the host in a Host header, lower case, without brackets and port."""
    text = value.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    host, _, port = text.partition(":")
    return text if ":" in port else host.rstrip(".")  # two colons: an IPv6 address without its brackets


def _is_same(origin: bytes, host: bytes) -> bool:
    """Whether a page is of the host and port that it asks."""
    try:
        scheme, name, port = parse_origin(origin.decode("latin-1"))
        _, asked, asked_port = parse_origin(f"{scheme}://{host.decode('latin-1').strip()}")
    except ValueError:
        return False
    return (name, port) == (asked, asked_port)


def _is_followed_link(method: bytes, path: bytes, headers: Mapping[bytes, bytes]) -> bool:
    return (
        method in (b"GET", b"HEAD")
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest") == b"document"
        and not path.startswith(_COSTLY)
        and b"%" not in path  # which may spell it otherwise
    )


def _allowed(method: bytes, origin: bytes, headers: Mapping[bytes, bytes]) -> Verdict:
    lines = b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
    if method != b"OPTIONS" or b"access-control-request-method" not in headers:
        return Verdict(headers=lines)
    lines += b"Access-Control-Allow-Methods: " + _METHODS + b"\r\n"
    wanted = headers.get(b"access-control-request-headers", b"")
    if wanted and len(wanted) <= HEADER_NAMES_SIZE_MAX and _HEADER_NAMES.fullmatch(wanted):
        lines += b"Access-Control-Allow-Headers: " + wanted + b"\r\n"
    for kind in (b"Private", b"Local"):  # browsers ask before a page of the internet reaches into a local network
        if headers.get(b"access-control-request-" + kind.lower() + b"-network") == b"true":
            lines += b"Access-Control-Allow-" + kind + b"-Network: true\r\n"
    lines += b"Access-Control-Max-Age: %d\r\n" % PREFLIGHT_AGE_S
    return Verdict(headers=lines, is_preflight=True)


def _refused(name: str, value: bytes, what: str) -> Verdict:
    return Verdict(f"FORBIDDEN_ORIGIN: {name} {_shown(value)!r} {what}")


def _shown(value: bytes) -> str:
    text = value[:SHOWN_SIZE_MAX].decode("ascii", "backslashreplace")
    text = "".join(each if each.isprintable() else "?" for each in text)
    return text + "..." if len(value) > SHOWN_SIZE_MAX else text


def _spelled(scheme: str, host: str, port: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{port}" if port else f"{scheme}://{name}"


__all__ = [
    "FLAG",
    "Origins",
    "Verdict",
    "check_origins",
    "is_loopback_address",
    "is_loopback_name",
    "local_names",
    "parse_origin",
]
