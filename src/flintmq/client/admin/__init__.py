"""The HTTP APIs of nsqd and nsqlookupd, for applications and operators; asyncio here, blocking in ``blocking.admin``.

Layers inside, upper to lower: ``clients``, ``nsqd | nsqlookupd | route``, ``question | results``.

Rules of this package: what is asked and how an answer is read is said once, in a function that returns a
:class:`flintmq.client.admin.question.Question`; the classes of both flavours are lists of these functions. One request
has a connection of its own, a deadline, and an answer of at most 16 MiB; redirects are not followed; nothing is asked
twice, because what was not answered may have been done; only a daemon that has refused is, if it wants TLS or a token.
"""
