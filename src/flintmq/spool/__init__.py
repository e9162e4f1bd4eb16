"""A spool: a process that takes messages from any nsqd and serves them by offset, as FlintMQ's nsqd does its own.

Spark's source starts one for nsqds that keep no log (``mode=spool``, ``mode=direct``); it is no command for people.

::

    nsqd --> client/aio/consumer.py --> feed.py --> log --> server.py --> Spark: OFFSETS FETCH CURSOR
      ^                                  |  ^
      +------------- FIN, TOUCH ---- held.py +-- what is safe: synced (spool), or committed by Spark (direct)

    nsqd <-- headers.py: has the topic headers? asked before the consumer begins, where no nsqlookupd says it

The rules of this package: a message is finished when it is safe and not before; what waits for that is touched; offsets
are sequences of the log, so a range that was read once reads the same again.

Source: docs/decisions/0032.
"""
