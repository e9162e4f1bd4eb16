"""Copies of data directories: ``flintmq backup`` of one that is in use, ``flintmq restore`` into an empty one.

How a copy is consistent while nsqd goes on writing::

    channels.db   first, as of one moment        every sequence that a channel names is below the end of its log then
    logs          then, as far as they are       so all that was acknowledged before is there, and what channels name
    channels.db   once more, to be compared      a topic that was deleted, made anew or cut back meanwhile: all again

Progress that is not in the database yet (0.1 s of it) comes again after a restore, as after a kill.

Rules of this room: a directory in use is only read, but for what SQLite does with its own log; nothing that a complete
backup consists of is changed before the next one is complete; what was written is read back before it is believed.

Source: docs/decisions/0020.
"""
