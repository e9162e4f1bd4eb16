"""The client on blocking sockets, without an event loop; :mod:`flintmq.sync` has its public names.

Layers inside, upper to lower: ``consumer``, ``producer | subscribing``, ``calls | queues | links | lookup``, ``pool``,
``connection | line | http``, ``opening``, ``stream``, ``crew | keeper | forking | timers``. What is not about waiting
is shared with the asyncio client: protocol, handshake, options, RDY, backoff, inbox, messages, order, trace, retry
table, routes, discovery's answers.

Rules of this package:

- Nothing here imports asyncio: who has no event loop should not load one.
- Whoever waits holds no lock, and has a deadline.
- One lock per producer or consumer guards all of its state; the user's callbacks are never called under it.
"""
