"""The client on blocking sockets, without an event loop; :mod:`flintmq.sync` has its public names.

Layers inside, upper to lower: ``consumer``, ``producer | subscribing``, ``discovery | queues | turns | reconnect``,
``lookup``, ``pool``, ``line | pipeline | pump``, ``connection | http``, ``handshake``, ``stream``, and below all
``thread_pool | ticker | fork | timers``.
What is decided is :mod:`flintmq.client.core`'s; here is who waits, and where.

Rules of this package:

- Nothing here imports asyncio: who has no event loop should not load one.
- Whoever waits holds no lock, and has a deadline.
- One lock per producer or consumer guards all of its state; the user's callbacks are never called under it.
"""
