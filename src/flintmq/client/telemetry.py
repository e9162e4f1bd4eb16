"""OpenTelemetry: spans of what is published and processed, and their context carried with the message.

::

    telemetry = Telemetry(envelope=True)              # plain topics; not needed on topics that have headers
    async with Producer("127.0.0.1:4150", telemetry=telemetry) as producer: ...
    async with Consumer("orders", "billing", telemetry=telemetry, handler=bill, ...) as consumer: ...

Rules of this file:

- Nothing is patched: who hands over no :class:`Telemetry` pays nothing.
- Spans are named and filled as OpenTelemetry's conventions for messaging say: ``send orders``, ``process orders``,
  ``messaging.system`` = ``nsq``. A handler's span continues the trace of the message's producer, and links to it.
- The context travels in headers (``traceparent``): of the message where nsqlookupd says that its topic has headers or
  the call passes some, else in the envelope of :mod:`flintmq.client.core.envelope`, if that is switched on; else each
  side has traces of its own.
- With the addresses of nsqd alone only the call can say that a topic has headers. Envelopes are opened wherever they
  come, also on a topic with headers.

Source: OpenTelemetry semantic conventions for messaging; docs/monitoring.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flintmq.client.core.handlers import is_async
from flintmq.client.core.message import Discard, Message, Requeue, meaning_of
from flintmq.client.options import SOURCE, switch
from flintmq.errors import OptionError
from flintmq.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_SYSTEM = "nsq"


class Telemetry:
    """Names and values that spans are made with.

    Args:
        tracer_provider: of OpenTelemetry; the global one if None.
        envelope: carry the context in an envelope on topics that are not known to have headers. Consumers need it
            first: who does not know the envelope is handed it as the body.

    Raises:
        OptionError: the package ``opentelemetry-api`` is missing.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None, *, envelope: bool = False) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            allowed = "the package opentelemetry-api is missing: pip install 'flintmq[otel]', or leave telemetry out"
            raise OptionError("telemetry", "Telemetry()", allowed, SOURCE) from None
        self.has_envelope = switch(envelope, "envelope")
        self._tracer = trace.get_tracer("flintmq", __version__, tracer_provider)
        self._trace = trace
        self._propagate = propagate

    def __repr__(self) -> str:
        return f"<Telemetry envelope={self.has_envelope}>"

    @contextmanager
    def publishing(self, topic: str, count: int, size_bytes: int) -> Iterator[dict[str, str]]:
        """Span of one publish; what is yielded are the headers that carry its context.

        Args:
            count: messages.
            size_bytes: of their bodies together.
        """
        attributes: dict[str, str | int] = {
            "messaging.system": _SYSTEM,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
            "messaging.message.body.size": size_bytes,
        }
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        kind = self._trace.SpanKind.PRODUCER
        with self._tracer.start_as_current_span(f"send {topic}", kind=kind, attributes=attributes):
            headers: dict[str, str] = {}
            self._propagate.inject(headers)
            yield headers

    @contextmanager
    def processing(self, message: Message[Any], topic: str, channel: str) -> Iterator[Span]:
        """Span of the processing of one message; for code that iterates, a handler has it around itself already."""
        host, _, port = message.nsqd.rpartition(":")
        attributes: dict[str, str | int] = {
            "messaging.system": _SYSTEM,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": topic,
            "messaging.consumer.group.name": channel,
            "messaging.message.id": message.id.decode("ascii", "backslashreplace"),
            "messaging.message.body.size": len(message.body),
            "messaging.nsq.attempts": message.attempts,
            "server.address": host,
            "server.port": int(port),
        }
        context = self._propagate.extract(_texts(message.headers))
        origin = self._trace.get_current_span(context).get_span_context()
        links = [self._trace.Link(origin)] if origin.is_valid else []
        with self._tracer.start_as_current_span(
            f"process {topic}",
            context=context,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                meaning = meaning_of(error)
                if isinstance(meaning, Requeue | Discard):
                    span.set_attribute("messaging.nsq.outcome", type(meaning).__name__.lower())
                else:
                    span.record_exception(error)
                    span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
                raise

    def around(
        self, handler: Callable[[Message[Any]], object], topic: str, channel: str
    ) -> Callable[[Message[Any]], object]:
        """A handler that processes each message in a span of its own."""
        if is_async(handler):
            return self._around_async(handler, topic, channel)

        def traced(message: Message[Any]) -> object:
            with self.processing(message, topic, channel):
                return handler(message)

        return traced

    def _around_async(
        self, handler: Callable[[Message[Any]], Awaitable[object]], topic: str, channel: str
    ) -> Callable[[Message[Any]], Awaitable[object]]:
        async def traced(message: Message[Any]) -> object:
            with self.processing(message, topic, channel):
                return await handler(message)

        return traced


def _texts(headers: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if isinstance(value, str)}
