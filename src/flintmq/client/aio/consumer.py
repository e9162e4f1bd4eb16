"""The consumer on asyncio: one subscription, on every nsqd that has the topic, or on every partition of it.

What it decides: :mod:`flintmq.client.core.consuming`. Rules of this file: one task per connection that is being opened
(:mod:`flintmq.client.aio.subscribing`), one per question to the nsqlookupd; the handler's workers
(:mod:`flintmq.client.aio.handlers`) and what is done with messages that are given up are the only others.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from flintmq.client.aio import handlers
from flintmq.client.aio.connection import Connection
from flintmq.client.aio.dead_letters import DeadLetters, LetterProducer
from flintmq.client.aio.dropped import finish, watch
from flintmq.client.aio.home import Home, check_loop, is_of_closed_loop
from flintmq.client.aio.http import HttpFetch
from flintmq.client.aio.lookup import Lookup
from flintmq.client.aio.subscribing import Subscriptions
from flintmq.client.core.cancelling import cancelled_within
from flintmq.client.core.consuming import CLOSE_WAIT_S, DRAIN_SAID_S, DRAIN_WAITS, ConsumerState, Consuming
from flintmq.client.core.dead_letters import letter_headers
from flintmq.client.core.handlers import Mode, call_in_place, check_functions, mode_of, refuse_unhandled, refuse_unrun
from flintmq.client.core.link import Link
from flintmq.client.core.message import Delivery, Message, Value, give_back, pass_by, settle
from flintmq.client.core.settings import MAX_IN_FLIGHT_MAX, ConsumerOptions, Settings
from flintmq.client.core.weak_call import WeakCall, weakly
from flintmq.client.options import ConnectionOptions, Seconds, seconds, switch, whole
from flintmq.errors import BodyError, FlintError

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # a type, or what is written as one: Model | None

log = logging.getLogger("flintmq.client")

CONCURRENCY_MAX = 10_000
DROPPED_CHECK_S = 0.1


class Consumer(ConsumerState[Value]):
    """Consumes a channel of a topic.

    ::

        async with Consumer("orders", "billing", nsqlookupd_http_addresses="http://127.0.0.1:4161") as consumer:
            async for message in consumer:
                async with message:
                    await bill(message.body)

    Leaving the block stops the flow, lets handlers end, sends what they answered, and closes. All durations are seconds
    or a timedelta. A consumer belongs to the event loop it is started in. One that is iterated over and that nothing
    refers to any more gives back what it has queued and is closed, with a ResourceWarning; one with a handler works on.

    Args:
        topic: 1 to 64 of ``[.a-zA-Z0-9_-]``, optionally ``#ephemeral``.
        channel: likewise.
        nsqd_tcp_addresses: ``host:port`` of one nsqd or several; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several.
        handler: called with each message; without it, iterate. Returning finishes the message, an exception requeues it
            and makes the consumer back off; :class:`Requeue` and :class:`Discard` steer. What a plain function returns
            is awaited if it can be. Exceptions are raised: one that is returned, or the future of a pool, is a failure.
            ``False`` finishes.
        concurrency: how many handlers run at once: tasks for an ``async def``, threads of this consumer's own for a
            plain function.
        inline: call a plain function on the event loop itself; fastest, and it must not block.
        max_in_flight: messages delivered and not answered, over all nsqd. Can be changed while running.
        type: what the bodies are: a type that msgspec reads from JSON (Struct, dataclass, dict, ...), a pydantic model,
            or ``str``; :attr:`Message.value` has them. A message whose body cannot be read goes to ``dead_letter`` at
            once; without that it is requeued like every other that failed, to ``on_giving_up`` in the end, and without
            that again and again: it is never finished unhandled.
        decode: instead of ``type``, a plain function that makes the value from the bytes of a body; called where
            :attr:`Message.value` is first read. Whatever it raises makes the body one that cannot be read.
        max_attempts: a message with more goes to ``on_giving_up`` and ``dead_letter`` and is finished. 0: no limit.
        on_giving_up: called on the event loop (awaited, if it is ``async def``) instead of the handler; if it raises,
            the message is requeued.
        dead_letter: a topic that the bodies of such messages are published to, on the nsqd of this consumer, before
            they are finished; with headers that say why, if that topic has any.
        ordered: consume every partition in order (redesigned NSQ): one message of a partition at a time, until it is
            finished. ``max_attempts`` does not apply; what was requeued comes again at once. After a failure only its
            partition waits, for ``backoff`` at first and twice as long with each attempt.
        options: what holds for each connection.
        more: what few consumers set: :class:`flintmq.ConsumerOptions` has it, with ``backoff``, ``drain_timeout``,
            ``msg_timeout``, ``start``, ``telemetry`` and the rest.

    Raises:
        OptionError: an argument is out of range, or ``type`` is one that nothing can build.
        LocalProtocolError: a topic or channel cannot have this name.
        TypeError: there is no such argument.
    """

    @overload
    def __init__(
        self: Consumer[bytes],
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[bytes]], object] | None = None,
        concurrency: int = 1,
        inline: bool = False,
        type: None = None,
        decode: None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[bytes]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Value]], object] | None = None,
        concurrency: int = 1,
        inline: bool = False,
        type: type[Value] | None = None,
        decode: Callable[[bytes], Value] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Value]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Value]], object] | None = None,
        concurrency: int = 1,
        inline: bool = False,
        type: TypeForm[Value],
        decode: Callable[[bytes], Value] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Value]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Any]], object] | None = None,
        concurrency: int = 1,
        inline: bool = False,
        type: TypeForm[Any] | None = None,  # noqa: A002 - the word that says it
        decode: Callable[[bytes], Any] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Any]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None:
        check_functions(handler, on_giving_up, more, may_be_async=True)
        settings = self._settings = Settings(
            topic,
            channel,
            nsqd_tcp_addresses,
            nsqlookupd_http_addresses,
            handler=handler,
            type=type,
            decode=decode,
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            on_giving_up=on_giving_up,
            dead_letter=dead_letter,
            ordered=ordered,
            options=options,
            more=more,
        )
        self._mode = mode_of(handler, switch(inline, "inline"))
        self._concurrency = whole(concurrency, "concurrency", 1, CONCURRENCY_MAX)
        lookup = None
        if settings.lookups:
            fetch = settings.fetch or HttpFetch(settings.options)
            lookup = Lookup(settings.lookups, settings.lookup_timeout_s, fetch, names_logs=settings.names_logs)
        self._subscriptions = Subscriptions(settings, lookup, weakly(self._fail, None))
        self._dead_letters: DeadLetters | None = None
        if dead_letter is not None:
            self._dead_letters = DeadLetters(dead_letter, partial(LetterProducer, **settings.dead_letter_producer()))
        self._home = Home()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closing: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._consuming = Consuming(
            settings,
            self._subscriptions.reconnector,
            self._subscriptions.ask,
            nullcontext(),
            wake=_nothing,
            too_many=None,
            settle_given_up=partial(_settle_given_up, WeakCall(self._settle_given_up)),
            tell=weakly(self._tell, None),
            stop=weakly(self._stop, None),
            run=self._home.run,
        )
        self._works_alone = handler is not None
        self._unwatch: Callable[[], object] = _nothing
        if self._mode is Mode.INLINE:
            self._consuming.take_in = self._call_in_place

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close_behind(error)

    async def start(self) -> None:
        """Connect, subscribe, and start the handler.

        Returns when every nsqd known so far was tried once, or :meth:`stop` was called.
        An nsqd or nsqlookupd that cannot be reached is tried again in the background.

        Raises:
            NsqdError: every nsqd refuses us for good (not authorised, say).
            ConnectionFailed: every nsqd refuses our TLS, or we its certificate (TlsRefused).
        """
        if self._home.loop is not None:
            raise RuntimeError("a consumer is started once; make another one")
        loop = self._home.move_in("Consumer")
        if self._works_alone:
            self._consuming.user = self
        else:
            let_go = partial(_let_go, loop, self._consuming, self._subscriptions, self._dead_letters, None)
            self._unwatch = watch(self, loop, f"the consumer of {self.topic}/{self.channel}", let_go)
        try:
            await self._subscriptions.start(self._consuming)
            self._start_workers()
            await self._subscriptions.reconnector.all_tried()
            self._consuming.raise_failure()
        except BaseException as error:
            await self._close_behind(error)
            raise

    async def run(self) -> None:
        """Consume with the handler until :meth:`stop` is called, then drain and close; starts the consumer if need be.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        if self._settings.handler is None:
            raise RuntimeError("run() needs a handler; without one, iterate over the consumer")
        if self._home.loop is None:
            await self.start()
        else:
            self._check_loop()
        try:
            await self._stopped.wait()
        except BaseException as error:
            await self._close_behind(error)
            raise
        await self.close()
        self._consuming.raise_failure()

    def stop(self) -> None:
        """Stop the flow: RDY 0, messages not handed out are given back, iteration and :meth:`run` end.

        May be called in any thread, and in a signal handler: from now on nothing is handed out, the rest is done in a
        turn of the event loop.
        """
        self._consuming.inbox.is_closing = True
        self._home.run_soon(self._stop)

    def _stop(self) -> None:
        self._stopped.set()
        self._subscriptions.stop()
        self._consuming.stop()

    def cancel_handlers(self) -> None:
        """Cancel the handlers that still run: their messages go back at once. A thread goes on until it returns.

        For a consumer that was stopped: one that was not ends with a RuntimeError. May be called in any thread, and in
        a signal handler.
        """
        self._home.run_soon(self._cancel_tasks)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close_behind(self, error: BaseException | None) -> None:
        if not is_of_closed_loop(error, self._home.loop):
            await self.close()

    async def close(self) -> None:
        """Stop, let handlers end (at most ``drain_timeout``), send their answers, and close the connections."""
        if self._home.loop is None:
            self._stop()
            return
        self._check_loop()
        self._stop()
        if self._closing is None:
            self._unwatch()
            self._closing = self._home.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        consuming = self._consuming
        try:
            await self._end_tasks()
            await self._subscriptions.close()
            await asyncio.gather(*(_end(link) for link in consuming.leaving() if isinstance(link, Connection)))
            if self._dead_letters is not None:
                await self._dead_letters.close()
            await self._subscriptions.close_lookup()
        finally:
            consuming.unreadables.tell_rest()
            for link in consuming.flow.connections:
                link.abort("closing was cut short")
            consuming.flow.close()
            consuming.user = None

    async def _end_tasks(self) -> None:
        """Wait for handlers and callbacks, at most for the drain timeout."""
        if not self._tasks:
            return
        timeout_s = self._settings.drain_timeout_s
        _, late = await asyncio.wait([*self._tasks], timeout=min(DRAIN_SAID_S, timeout_s))
        if late and timeout_s > DRAIN_SAID_S:
            log.warning(DRAIN_WAITS, len(late), timeout_s)
            _, late = await asyncio.wait(late, timeout=timeout_s - DRAIN_SAID_S)
        if not late:
            return
        log.warning("%d handlers did not end within %g s and are cancelled", len(late), timeout_s)
        for task in late:
            task.cancel()
        await asyncio.wait(late, timeout=CLOSE_WAIT_S)

    # --- pulling ---

    def __aiter__(self) -> AsyncIterator[Message[Value]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message[Value]]:
        self._check_pulled()
        async for message in handlers.iterate(self._consuming.inbox):
            yield message
            pass_by((message,))
            del message  # while the next one is waited for, nobody but the application is to have it
        self._consuming.raise_failure()

    async def batches(self, size: int, timeout: Seconds = 1.0) -> AsyncIterator[list[Message[Value]]]:
        """Yield lists of messages.

        A list is complete with ``size`` messages, ``timeout`` after its first, or when no more will come before some
        are answered: an nsqd has delivered all it may (its part of ``max_in_flight``), and the others have nothing.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        self._check_pulled()
        whole(size, "size", 1, MAX_IN_FLIGHT_MAX)
        timeout_s = seconds(timeout, "timeout", 0.001)
        inbox = self._consuming.inbox
        while True:
            await handlers.wait(inbox)
            await asyncio.sleep(0)  # a body that waits for nothing must not keep the loop from answering heartbeats
            if batch := await self._batch(size, timeout_s):
                yield batch
                pass_by(batch)
                del batch
            elif inbox.is_ended:
                break
        self._consuming.raise_failure()

    async def _batch(self, size: int, timeout_s: float) -> list[Message[Value]]:
        inbox, time, flow = self._consuming.inbox, self._consuming.time, self._consuming.flow
        batch: list[Message[Value]] = []
        try:
            async with asyncio.timeout(timeout_s):
                while len(batch) < size:
                    if some := inbox.take_many(size - len(batch), time()):
                        batch += some
                    elif inbox.is_ended or (ends_in_s := flow.ends_in_s(time()) if batch else None) == 0.0:
                        break
                    elif ends_in_s is None:
                        await handlers.wait(inbox)
                    else:
                        await handlers.wait_shortly(inbox, ends_in_s)
        except TimeoutError:
            pass  # what is there by now is the batch
        except BaseException:
            give_back(batch)
            raise
        return batch

    def _check_pulled(self) -> None:
        self._check_loop()
        if self._settings.handler is not None:
            raise RuntimeError("this consumer has a handler; iterate over one without")

    def _check_loop(self) -> None:
        check_loop("consumer", self._home.loop)

    # --- handing out ---

    def _start_workers(self) -> None:
        handler = self._settings.handler
        if handler is None or self._mode is Mode.INLINE:
            return
        for number in range(self._concurrency):
            name = f"flintmq-{self.topic}/{self.channel}-{number}"
            worker = handlers.worker(self._mode, self._consuming.inbox, handler, self._settings.env, name)
            self._run_task(worker).add_done_callback(self._worker_ended)

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        """End the consumer with a worker that has ended by itself: with the last one it would stand still."""
        if not self._consuming.is_stopped:
            self._fail(RuntimeError(f"a worker of {self!r} was cancelled, and the consumer was not stopped"))

    def _call_in_place(self, delivery: Delivery) -> None:
        settings = self._settings
        assert settings.handler is not None
        try:
            call_in_place(
                settings.handler, delivery, self._consuming.attempts, self._consuming.give_up, asyncio.CancelledError
            )
        except BaseException as error:
            self._fail(error)
            raise

    def _settle_given_up(self, message: Message[Any], error: BodyError | None) -> None:
        """Let ``on_giving_up`` and the dead letters have a message, and settle it."""
        callback = self._settings.on_giving_up
        try:
            result = None if callback is None else callback(message)
            waits = inspect.isawaitable(result)
            if not waits and result is not None:
                refuse_unhandled(result, message)
        except Exception as raised:  # noqa: BLE001 - the application's error is answered with a requeue
            settle(message, raised, is_given_up=True)
            return
        except asyncio.CancelledError as raised:
            settle(message, cancelled_within(raised), is_given_up=True)
            return
        if waits or self._dead_letters is not None:
            self._run_task(self._settle_given_up_later(message, error, result))
        else:
            settle(message, None)

    async def _settle_given_up_later(self, message: Message[Any], error: BodyError | None, result: object) -> None:
        task = asyncio.current_task()
        try:
            await handlers.run_out(result, message)
            if self._dead_letters is not None and not message.is_answered:
                headers = letter_headers(message, self.topic, self.channel, error)
                await self._dead_letters.publish(message.body, headers)
        except BaseException as raised:  # noqa: BLE001 - what is not to be answered is raised again
            handlers.settle_raised(message, raised, task, is_given_up=True)
        else:
            settle(message, None)

    def _run_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that :meth:`close` waits for."""
        assert self._home.loop is not None
        task = self._home.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._consuming.fail(error)

    def _tell(self, error: FlintError) -> None:
        if self._settings.on_error is None:
            return
        try:
            refuse_unrun(self._settings.on_error(error))
        except Exception:
            log.exception("on_error raised")


async def _end(connection: Connection) -> None:
    """End a subscription politely, and close."""
    try:
        async with asyncio.timeout(CLOSE_WAIT_S):
            await connection.end_subscription()
    except TimeoutError:
        waited = f"no answer within {CLOSE_WAIT_S:g} s"
        log.warning("nsqd %s did not confirm the end of the subscription: %s", connection.address, waited)
    except FlintError as error:
        log.warning("nsqd %s did not confirm the end of the subscription: %s", connection.address, error)
    connection.close()


def _settle_given_up(settle: WeakCall, message: Message[Any], error: BodyError | None) -> None:
    """Have a message that is given up settled by its consumer; when that is gone, another one is to do it."""
    if not settle(message, error):
        message.requeue(0)


def _let_go(
    loop: asyncio.AbstractEventLoop,
    consuming: Consuming,
    subscriptions: Subscriptions,
    dead_letters: DeadLetters | None,
    until: float | None,
) -> None:
    """Close what belonged to a consumer that nothing refers to any more.

    Nothing more comes at once, and what is queued goes back. A message that the application has may still be answered:
    its connection is closed when it is, or when its time is over.

    Args:
        until: when that is; None: it begins now.
    """
    subscriptions.stop()
    consuming.stop()
    flow = consuming.flow
    if until is None:
        until = loop.time() + max((link.msg_timeout_s for link in flow.connections), default=0.0)
    if loop.time() < until and any(flow.held(link) > 0 for link in flow.connections):
        loop.call_later(DROPPED_CHECK_S, _let_go, loop, consuming, subscriptions, dead_letters, until)
        return
    for link in consuming.leaving():
        if isinstance(link, Connection):
            link.close()
    consuming.unreadables.tell_rest()
    flow.close()
    if dead_letters is not None or consuming.settings.lookups:
        finish(_close_rest(subscriptions, dead_letters), loop)


async def _close_rest(subscriptions: Subscriptions, dead_letters: DeadLetters | None) -> None:
    await subscriptions.close()
    if dead_letters is not None:
        await dead_letters.close()
    await subscriptions.close_lookup()


def _nothing() -> None:
    """Have what is to be sent flushed at the end of the turn; and there is nothing to be ended."""


class BulkConsumer(Consumer[bytes]):
    """A consumer for what passes messages on in bulk: it hands over what nsqd sends as it comes, a read at a time."""

    @property
    def links(self) -> tuple[Link, ...]:
        """Everything that is subscribed now."""
        return self._consuming.connections()

    def may_deliver(self, link: Link) -> bool:
        """Whether nsqd is to deliver over a connection what it has."""
        return self._consuming.flow.may_deliver(link)

    @property
    def lacking(self) -> str:
        """Say where the topic is and this consumer is not, as far as can be known; empty: nowhere."""
        return self._consuming.subscribing.lacking

    def take_deliveries(
        self,
        take: Callable[[Delivery], None],
        refused: Callable[[Link, bytes], None] | None = None,
        *,
        with_frames: bool = False,
    ) -> None:
        """Have deliveries handed over. To be called before :meth:`start`.

        Whoever takes a delivery answers each of its messages on its link, and touches those that wait. Nothing is given
        up here, whatever ``max_attempts`` says, and of answers that came too late nothing is logged: ``stats()`` has
        their number.

        Args:
            take: called on the event loop.
            refused: likewise, with the link and the id of a message whose FIN came too late.
            with_frames: deliveries have :attr:`Delivery.frames` as well, for whoever stores messages as they come.
        """
        if self._home.loop is not None or self._settings.handler is not None:
            raise RuntimeError("deliveries are taken of a consumer without a handler, before it is started")
        self._works_alone = True
        self._consuming.take_in = take
        self._consuming.tells_late = False
        self._consuming.fin_refused = refused
        self._consuming.keeps_frames = with_frames
