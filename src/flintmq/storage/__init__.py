"""Synchronous, append-only storage: the log of each topic partition and the state of its channels."""

from flintmq.storage.cache import ReadCache
from flintmq.storage.channel_store import ChannelStore
from flintmq.storage.creation import Creation, create_logs
from flintmq.storage.damage import Damage
from flintmq.storage.files import (
    RESERVE_NAME,
    Database,
    DatabaseSnapshot,
    File,
    FileIdentity,
    Files,
    OsFile,
    OsFiles,
    bytes_of,
    database_error,
    prepare_connection,
    replace_file,
    salvaged_rows,
    shrink,
)
from flintmq.storage.floors import FloorFile
from flintmq.storage.identity import DamagedIdentity, node_id, read_number, write_number
from flintmq.storage.memory_log import MemoryLog
from flintmq.storage.partition_log import CutsCommitted, LogPlace, PartitionLog, SegmentInfo, SyncTicket, run_tickets
from flintmq.storage.recovery import is_made_empty, log_id_in
from flintmq.storage.segment import Corruption

__all__ = [
    "RESERVE_NAME",
    "ChannelStore",
    "Corruption",
    "Creation",
    "CutsCommitted",
    "Damage",
    "DamagedIdentity",
    "Database",
    "DatabaseSnapshot",
    "File",
    "FileIdentity",
    "Files",
    "FloorFile",
    "LogPlace",
    "MemoryLog",
    "OsFile",
    "OsFiles",
    "PartitionLog",
    "ReadCache",
    "SegmentInfo",
    "SyncTicket",
    "bytes_of",
    "create_logs",
    "database_error",
    "is_made_empty",
    "log_id_in",
    "node_id",
    "prepare_connection",
    "read_number",
    "salvaged_rows",
    "replace_file",
    "run_tickets",
    "shrink",
    "write_number",
]
