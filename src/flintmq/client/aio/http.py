"""HTTP on asyncio for clients: a URL is asked, its answer awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from flintmq.client.core import http
from flintmq.client.core.discovery import CONCURRENT_MAX
from flintmq.client.options import ConnectionOptions
from flintmq.env import run_in_thread
from flintmq.errors import OptionError
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request


class HttpFetch:
    """A :class:`flintmq.client.aio.lookup.Fetch`.

    Args:
        options: how ``https://`` is verified; the system's authorities and no client certificate if None.
        keeps_connections: False: each request has its own, so that none meets one that the server has just closed.
    """

    def __init__(self, options: ConnectionOptions | None = None, keeps_connections: bool = True) -> None:
        self._options = options or ConnectionOptions()
        self._client = HttpClient(idle_max=CONCURRENT_MAX if keeps_connections else 0)

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.ask("GET", url, timeout_s)

    async def ask(
        self,
        method: str,
        url: str,
        timeout_s: float,
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
        options = self._options
        try:
            make = partial(http.request_to, method, url, options, body, shows_token=shows_token, tls_name=tls_name)
            waits = shows_token and callable(options.lookup_token)
            request = await self._made(make, timeout_s) if waits else make()
            context = options.tls_context() if request.endpoint.is_secured else None
            answer = await self._client.ask(
                request, timeout_s=timeout_s, context=context, body_bytes_max=http.ANSWER_SIZE_MAX
            )
        except NoAnswer as failure:
            raise http.no_answer(failure, options) from failure
        except OptionError as error:  # a certificate's file that was there when the options were made
            raise OSError(str(error)) from error
        return answer.status, answer.body

    @staticmethod
    async def _made(make: Callable[[], Request], timeout_s: float) -> Request:
        try:
            async with asyncio.timeout(timeout_s):
                request: Request = await run_in_thread(make)
                return request
        except TimeoutError:
            raise TimeoutError(f"no token within {timeout_s:g} s: waiting for lookup_token()") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
