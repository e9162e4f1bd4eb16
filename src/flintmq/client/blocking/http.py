"""HTTP on blocking sockets for clients: a URL is asked, its answer returned."""

from __future__ import annotations

from flintmq.client.blocking.fork import watch
from flintmq.client.blocking.stream import Time
from flintmq.client.core import http
from flintmq.client.options import ConnectionOptions
from flintmq.errors import OptionError
from flintmq.net import http_blocking
from flintmq.net.http_exchange import NoAnswer


def get(url: str, timeout_s: float, options: ConnectionOptions, time: Time) -> tuple[int, bytes]:
    """Return status and body of the answer to a GET; raises as :func:`ask`."""
    return ask("GET", url, timeout_s, options, time)


def ask(
    method: str,
    url: str,
    timeout_s: float,
    options: ConnectionOptions,
    time: Time,
    body: bytes = b"",
    *,
    shows_token: bool = True,
    tls_name: str | None = None,
) -> tuple[int, bytes]:
    """Return status and body of the answer to a request.

    Args:
        shows_token, tls_name: as of :func:`flintmq.client.core.http.request_to`.

    Raises:
        OSError: there is none in time, or none that can be read.
    """
    try:
        request = http.request_to(method, url, options, body, shows_token=shows_token, tls_name=tls_name)
        context = options.tls_context() if request.endpoint.is_secured else None
        answer = http_blocking.ask(
            request, timeout_s=timeout_s, time=time, context=context, body_bytes_max=http.ANSWER_SIZE_MAX, watch=watch
        )
    except NoAnswer as failure:
        raise http.no_answer(failure, options) from failure
    except OptionError as error:  # a certificate's file that was there when the options were made
        raise OSError(str(error)) from error
    return answer.status, answer.body
