"""Requests of a client to a daemon over HTTP, and the error when there is no answer; the same for both flavours.

Rules of this file: an nsqlookupd at ``https://`` is verified as an nsqd is (:mod:`flintmq.client.security`); what goes
wrong is an OSError with a text for people.

Source: NSQ's nsqlookupd.
"""

from __future__ import annotations

from dataclasses import replace

from flintmq.client.options import ConnectionOptions, why_unreachable
from flintmq.client.security import explain
from flintmq.net.http_exchange import NoAnswer, Request

ANSWER_SIZE_MAX = 16 * 1024 * 1024


def request_to(
    method: str,
    url: str,
    options: ConnectionOptions,
    body: bytes = b"",
    *,
    shows_token: bool = True,
    tls_name: str | None = None,
) -> Request:
    """The request for a URL; waits where ``lookup_token`` is a function.

    Args:
        shows_token: False: it carries none, even if there is one.
        tls_name: name that the certificate has to be for; that of the URL if None.

    Raises:
        NoAnswer: it is no URL of HTTP.
        OSError: that function gave no token.
    """
    headers = options.lookup_headers() if shows_token else replace(options, lookup_token=None).lookup_headers()
    request = Request.to(method, url, headers, body)
    return replace(request, endpoint=request.endpoint._replace(tls_name=tls_name)) if tls_name else request


def no_answer(failure: NoAnswer, options: ConnectionOptions) -> OSError:
    """The error that a caller is told."""
    if failure.tls_name is not None:
        return OSError(explain(failure.reason, failure.tls_name, options.shows_certificate))
    if failure.error is not None:
        return OSError(f"cannot connect to {failure.address}: {why_unreachable(failure.error)}")
    return OSError(failure.reason)
