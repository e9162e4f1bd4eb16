"""A service: handlers declared on functions, typed bodies, signals, and one orderly end.

Rules of this file:

- Declaring checks everything that can be checked without a network; running changes no declaration, so that one
  :class:`App` can be run again (in tests, say).
- Start: ``on_startup``, producer, consumers. End, whatever the reason: consumers drain (together), then
  ``on_shutdown``, then the producer, which handlers may need until the last moment.
- A decorated function stays the function it was: a test can call it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import signal
import typing
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flintmq.client.aio.consumer import Consumer
from flintmq.client.aio.home import Home
from flintmq.client.aio.lookup import Fetch
from flintmq.client.aio.producer import Producer
from flintmq.client.core.handlers import check_function, is_async
from flintmq.client.core.message import Message
from flintmq.client.options import SOURCE, ConnectionOptions, addresses
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.loop import loop_factory

if TYPE_CHECKING:
    from flintmq.client.telemetry import Telemetry

log = logging.getLogger("flintmq.client")

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[[], object]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_SIGNAL_S = 0.5  # a terminal signals a whole group of processes, and a wrapper in it passes the signal on
_ALIASES_MAX = 100
_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class App:
    """Consumers and a producer that start, stop and drain together.

    ::

        app = App(nsqlookupd_http_addresses="http://127.0.0.1:4161")

        @app.consumer("orders", "billing", max_in_flight=500, concurrency=50, dead_letter="orders.dead")
        async def bill(order: Order, message: Message[Order]) -> None:
            await app.producer.pub("invoices", await make_invoice(order))

        app.run()

    Args:
        nsqd_tcp_addresses: ``host:port`` of one nsqd or several; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several.
        options: what holds for each connection.
        telemetry: spans of OpenTelemetry for what is published and processed.
        env: time, chance and threads; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.

    Raises:
        OptionError: an address is none, or there is none.
    """

    def __init__(
        self,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        options: ConnectionOptions | None = None,
        telemetry: Telemetry | None = None,
        env: Env | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        nsqd, lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        self._shared: dict[str, Any] = {
            "nsqd_tcp_addresses": nsqd,
            "nsqlookupd_http_addresses": lookups,
            "options": options,
            "telemetry": telemetry,
            "env": env,
            "fetch": fetch,
        }
        self._declared: list[Callable[[], Consumer[Any]]] = []
        self._on_startup: list[Hook] = []
        self._on_shutdown: list[Hook] = []
        self._stack: AsyncExitStack | None = None
        self._producer: Producer | None = None
        self._consumers: list[Consumer[Any]] = []
        self._is_starting = False
        self._stopped = asyncio.Event()
        self._home = Home()

    def __repr__(self) -> str:
        return f"<App of {len(self._declared)} consumers, {'running' if self._stack is not None else 'not running'}>"

    # --- declaring ---

    def consumer(self, topic: str, channel: str, **options: Any) -> Callable[[Function], Function]:
        """Make a function the handler of a channel.

        A ``functools.partial`` and an object with ``__call__`` are functions too; what a partial has is no parameter.
        Its parameters say what it wants: one annotated :class:`Message` is the message, another one is the body as its
        annotation says (``bytes``, ``str``, a type that msgspec reads from JSON, a pydantic model; with ``decode=``
        what that returns). Without annotation it is the message. What the function returns, raises, and in which thread
        it runs: as for ``handler`` of :class:`Consumer`.

        Args:
            options: arguments of :class:`Consumer`, such as ``max_in_flight`` and ``concurrency``.

        Raises:
            OptionError: the function has other parameters, nothing can build the type of the body, or an option is out
                of range.
            LocalProtocolError: a topic or channel cannot have this name.
        """
        for name in (*self._shared, "handler"):
            if name in options and name != "options":
                raise OptionError(name, options[name], "an argument of App, not of one of its consumers", SOURCE)

        def declare(function: Function) -> Function:
            kind, handler = adapt(function)
            said = {} if options.get("decode") is not None else {"type": kind}  # what decode returns is the value
            arguments = {**self._shared, **said, **options, "handler": handler}

            def make() -> Consumer[Any]:
                return Consumer(topic, channel, **arguments)

            make()  # says at once what is wrong with the arguments
            self._declared.append(make)
            return function

        return declare

    def on_startup(self, function: Function) -> Function:
        """Call a function, plain or async, before anything is connected."""
        check_function("on_startup", function, may_be_async=True)
        self._on_startup.append(function)
        return function

    def on_shutdown(self, function: Function) -> Function:
        """Call a function, plain or async, when the last handler has ended; also if one before it has raised."""
        check_function("on_shutdown", function, may_be_async=True)
        self._on_shutdown.append(function)
        return function

    # --- running ---

    @property
    def producer(self) -> Producer:
        """The producer of this service.

        Raises:
            RuntimeError: the service does not run.
        """
        if self._producer is None:
            raise RuntimeError("the producer is there while the App runs: app.run(), or async with app")
        return self._producer

    @property
    def consumers(self) -> tuple[Consumer[Any], ...]:
        """The running consumers, in the order of their declaration."""
        return tuple(self._consumers)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, then drain; a second signal cancels the handlers that still run.

        Signals within half a second of each other are one: Ctrl-C reaches this process from the terminal and from a
        wrapper (make, uv, a shell script) too.

        For the main thread; elsewhere: :meth:`serve`.

        Raises:
            RuntimeError: an event loop runs here already, as in a notebook; nothing was started.
            OptionError: no consumer is declared.
            NsqdError: every nsqd refuses a consumer for good.
            SystemExit: there was a second signal; 128 and its number.
        """
        if _is_in_loop():
            raise RuntimeError(
                "app.run() makes an event loop of its own, and one runs here already (a notebook, an async def): "
                "await app.serve() instead"
            )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._until_signal())

    async def _until_signal(self) -> None:
        loop = asyncio.get_running_loop()
        impatient = 0
        is_given_up = False
        signalled_at = float("-inf")

        def asked_to_stop(number: int) -> None:
            nonlocal impatient, is_given_up, signalled_at
            name = signal.Signals(number).name
            is_the_same = loop.time() - signalled_at < ONE_SIGNAL_S
            signalled_at = loop.time()
            if is_the_same:
                log.debug("%s: one with the signal just before", name)
            elif self._stopped.is_set():
                log.warning("%s again: cancelling the handlers that still run", name)
                impatient = number
                for consumer in self._consumers:
                    consumer.cancel_handlers()
            elif self._is_starting:
                log.info("%s: draining what has started; it is not started to its end", name)
                is_given_up = True
                self._stop()
                serving.cancel()
            else:
                log.info("%s: draining; once more cancels the handlers that still run", name)
                self._stop()

        for number in _SIGNALS:
            loop.add_signal_handler(number, asked_to_stop, number)
        serving = asyncio.ensure_future(self.serve())
        try:
            await asyncio.wait([serving])
            if not (is_given_up and serving.cancelled()):
                serving.result()
        finally:
            serving.cancel()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        if impatient:
            raise SystemExit(128 + impatient)

    async def serve(self) -> None:
        """Run until :meth:`stop`, then drain.

        Raises:
            OptionError: no consumer is declared.
            NsqdError: every nsqd refuses a consumer for good.
        """
        if not self._declared:
            allowed = "declare at least one before it runs: @app.consumer(topic, channel)"
            raise OptionError("consumers", self._declared, allowed, SOURCE)
        async with self:
            tasks = [asyncio.create_task(consumer.run()) for consumer in self._consumers]
            stop = asyncio.create_task(self._stopped.wait())
            try:
                await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._stop()
                await asyncio.wait([*tasks, stop])
            for task in tasks:
                task.result()

    def stop(self) -> None:
        """Stop the flow of messages; :meth:`serve` and :meth:`run` return when the handlers have ended.

        May be called in any thread, and in a signal handler. One that is yet to start ends as soon as it has.
        """
        self._home.run_soon(self._stop)

    def _stop(self) -> None:
        self._stopped.set()
        for consumer in self._consumers:
            consumer.stop()

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this App runs already")
        self._home.move_in("App", "Consumer")
        self._stack = AsyncExitStack()
        self._is_starting = True
        try:
            for hook in self._on_startup:
                await _call(hook)
            self._producer = await self._stack.enter_async_context(Producer(**self._shared))
            self._stack.push_async_callback(self._shut_down)
            self._consumers = [make() for make in self._declared]
            await asyncio.gather(*(consumer.start() for consumer in self._consumers))
        except BaseException:
            await self._end()
            raise
        finally:
            self._is_starting = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def _shut_down(self) -> None:
        first: Exception | None = None
        for hook in self._on_shutdown:
            try:
                await _call(hook)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    log.exception("on_shutdown: %r failed too", hook)
        if first is not None:
            raise first

    async def _end(self) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        self._stop()
        try:
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        finally:
            try:
                await stack.aclose()
            finally:
                self._producer = None
                self._consumers = []
                self._stopped = asyncio.Event()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _call(hook: Hook) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result


def adapt(function: Callable[..., Any]) -> tuple[type[Any] | None, Callable[[Message[Any]], object]]:
    """Return what the bodies for a function are, and a handler that calls it with what it wants.

    Raises:
        OptionError: it does not take a message, a body, or one of each; or calling it runs nothing of it.
    """
    check_function("handler", function, may_be_async=True)
    wants, kind = _wants(function)
    if wants == [True]:
        return kind, function
    if is_async(function):

        async def call_async(message: Message[Any]) -> object:
            return await function(*(message if each else message.value for each in wants))

        return kind, call_async

    def call(message: Message[Any]) -> object:
        return function(*(message if each else message.value for each in wants))

    return kind, call


def _wants(function: Callable[..., Any]) -> tuple[list[bool], type[Any] | None]:
    """For each parameter whether it is the message; and the type of the body, None when nothing says it."""
    name = getattr(function, "__qualname__", repr(function))
    allowed = "a function of a message (annotated Message), of a body (annotated with its type), or of both"
    try:
        hints = typing.get_type_hints(_annotated(function), include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise OptionError("handler", name, f"{allowed}; its annotations cannot be read: {error}", SOURCE) from error
    wants: list[bool] = []
    kinds: list[type[Any]] = []
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        try:
            hint = _unaliased(hints.get(parameter.name, Message))
            said = _unaliased(hint.__origin__) if typing.get_origin(hint) is typing.Annotated else hint
        except (NameError, TypeError) as error:  # what an alias stands for is evaluated here
            raise OptionError(
                "handler", name, f"{allowed}; {parameter.name} cannot be read: {error}", SOURCE
            ) from error
        is_message = Message in (said, typing.get_origin(said))
        if is_message:
            hint = said
        if parameter.kind not in _KINDS or is_message in wants:
            raise OptionError("handler", name, allowed, SOURCE)
        wants.append(is_message)
        kinds += map(_unaliased, typing.get_args(hint)) if is_message else (hint,)
    if not wants or any(kind != kinds[0] for kind in kinds):
        raise OptionError("handler", name, allowed, SOURCE)
    return wants, kinds[0] if kinds else None


def _unaliased(hint: Any) -> Any:
    """Return the type that names made by ``type Name = ...`` stand for (Python 3.12), one for another too."""
    for _ in range(_ALIASES_MAX):
        alias = hint if _is_alias(hint) else typing.get_origin(hint)
        if not _is_alias(alias):
            return hint
        value, parameters = alias.__value__, alias.__type_params__
        if alias is not hint:
            given = dict(zip(parameters, typing.get_args(hint), strict=True))
            wanted = (value,) if value in parameters else getattr(value, "__parameters__", ())
            found = tuple(given[each] for each in wanted)
            value = found[0] if value in parameters else value[found] if found else value
        hint = value
    raise TypeError(f"{hint} stands for itself")


def _is_alias(hint: object) -> bool:
    return type(hint).__name__ == "TypeAliasType"  # of typing, or of typing_extensions before Python 3.12


def _annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that has the annotations: of a partial what it calls, of an object its method ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function) or hasattr(function, "__wrapped__"):
        return function
    called: Callable[..., Any] = type(function).__call__
    return called
