"""Every bound and default that is not an option, with its unit in the name and the relations between them asserted.

What a user can set lives in the ``options.py`` of each daemon; what is here holds for all of them.
"""

from __future__ import annotations

# names and identifiers (NSQ's TCP protocol, Youzan's TCP protocol)
NAME_SIZE_MAX = 64
MESSAGE_ID_SIZE = 16
SEQUENCE_BITS = 50
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
PARTITION_COUNT_MAX = 1024
ATTEMPTS_MAX = 65535

# wire (NSQ's TCP protocol)
COMMAND_LINE_SIZE_MAX = 16 * 1024
CLIENT_TEXT_SIZE_MAX = 1024  # characters kept of a text that a client says of itself in IDENTIFY, as its client_id
MAGIC_DEADLINE_S = 5.0
FIRST_COMMAND_DEADLINE_S = 30.0
FIRST_HEARTBEAT_S = 15.0  # to a client that has sent its magic and nothing else; a NOP is a command
WRITE_BUFFER_HIGH_BYTES = 1024 * 1024
WRITE_BUFFER_MAX_BYTES = 16 * 1024 * 1024

# memory (budget.py)
MEMORY_BUDGET_MIN = 64 * 1024 * 1024
MEMORY_BUDGET_MAX = 8 * 1024 * 1024 * 1024  # of the default; an option may say more

# delivery
DELIVERY_BYTES_MAX = 256 * 1024  # one slice handed to a connection
EPHEMERAL_DEPTH_MIN = 100  # what #ephemeral topics and channels hold with --mem-queue-size=0; NSQ's lose everything
CHANNEL_WINDOW_MAX = 1_000_000  # messages between the confirmed floor and the delivery cursor
CHANNEL_HOLES_MAX = 4096  # stretches ahead of a channel's cursor that it leaves out
TAG_WAITING_MAX = 4096  # messages a channel passes over because nobody who desires their tag is ready, per tag
WINDOW_DEFERRED_MAX = 4096  # deferred messages a channel keeps in its window before it moves them to disk
DEFER_IN_WINDOW_NS = 60 * 1_000_000_000  # longer delays go to disk at once
CURSOR_FLUSH_S = 0.1  # how often progress of channels is written: what a kill -9 may repeat

# log (docs/decisions/0001, docs/operations.md)
TAIL_CACHE_BYTES = 1024 * 1024
READ_AHEAD_BYTES = 256 * 1024
JOIN_SIZE_MAX = 8 * 1024  # stored batches up to this size are joined when they are read back
JOIN_TIME_NS = 100_000_000  # and lie at most this far apart in time
READ_CACHE_BYTES = 8 * 1024 * 1024
INDEX_INTERVAL_BYTES = 4096
FETCH_BYTES_MAX = 4 * 1024 * 1024  # one answer of FETCH
BATCH_SIZE_MAX = 64 * 1024 * 1024
BATCH_COUNT_MAX = 65536
DISK_RESERVE_BYTES = 64 * 1024 * 1024
SPACE_SAMPLE_BYTES = 256 * 1024  # appended by one log between two looks at the free space
TAIL_CACHES_BYTES = 16 * 1024 * 1024  # tail caches of all logs together
INDEX_ENTRIES_MAX = 4096  # per segment; the interval doubles when a segment would need more
SEALED_FILES_OPEN_MAX = 64  # handles of sealed segments kept open by all logs together
SYNC_THREADS = 8  # syncs of several logs under way at the same time
SYNC_HANDLES_MAX = 16  # handles of sealed segments one sync of one log keeps open
SCAN_WINDOW_BYTES = 4 * 1024 * 1024  # read at once by recovery
PAGE_BYTES = 4096  # an unreadable sector costs one page
BAD_FILES_MAX = 64  # copies of damaged stretches kept beside one segment
RESYNC_CRC_BYTES_MAX = 512 * 1024 * 1024  # hashed for doubtful candidates in one search behind damage
REWRITE_BYTES_MAX = 16 * 1024 * 1024  # written once more by recovery because a sync of them may have failed
CHECKPOINT_BYTES = 16 * 1024 * 1024  # synced by one log between two checkpoints: what recovery walks at most, about

# idempotent publishing (docs/idempotent.md)
PRODUCER_ID_SIZE_MAX = 64
PRODUCER_SEQUENCE_MAX = (1 << 63) - 1
PRODUCERS_MAX = 1000  # remembered by one partition
SINK_PRODUCERS_MAX = 4000  # besides, of sinks
PRODUCERS_SNAPSHOT_BYTES = 16 * 1024 * 1024  # of such publishes between two snapshots: what a start reads again, about

assert MAGIC_DEADLINE_S < FIRST_HEARTBEAT_S < FIRST_COMMAND_DEADLINE_S
assert CHANNEL_WINDOW_MAX > WINDOW_DEFERRED_MAX
assert WRITE_BUFFER_MAX_BYTES > WRITE_BUFFER_HIGH_BYTES > DELIVERY_BYTES_MAX
assert READ_CACHE_BYTES > READ_AHEAD_BYTES
assert TAIL_CACHES_BYTES > TAIL_CACHE_BYTES
assert DISK_RESERVE_BYTES > SPACE_SAMPLE_BYTES
