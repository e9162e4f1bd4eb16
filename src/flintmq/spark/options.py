"""Options of ``format("nsq")``: one row per option, from which parsing, checks and the tables of docs/spark.md follow.

The rules of this file: the field name in snake case is the option name in camel case; Spark hands options over as text
in any case; a name nobody knows is an error that says the nearest one. Names are Kafka's where the meaning is equal;
others' are in :mod:`flintmq.spark.names`. No option holds a secret, only where it is: Spark shows options in its
pages, plans and event logs, and what is refused is shown nowhere.

Source: docs/decisions/0006.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from flintmq.client.core.settings import MAX_IN_FLIGHT_MAX
from flintmq.client.core.sharding import SHARDINGS
from flintmq.errors import UNKNOWN, OptionError
from flintmq.limits import BATCH_SIZE_MAX, PARTITION_COUNT_MAX
from flintmq.names import is_valid_name, listed
from flintmq.net.tls import VERSIONS
from flintmq.spark.errors import SOURCE
from flintmq.spark.names import ALIASES, ELSEWHERE
from flintmq.spark.offsets import LISTED_MAX, RESERVED_TOPICS, TIME_MAX_MS, TIMES_FORM
from flintmq.spark.schema import COLUMNS, TYPES

# what Spark itself leaves among the options of a source or sink
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname", "numpartitions"})
# and what it hands over in the place of the options of a table that it makes
_OF_A_TABLE = re.compile(r"provider|option\..+", re.IGNORECASE)
_NO_TABLE = (
    "Spark's catalog keeps no options for a table of a source in Python: CREATE TEMPORARY VIEW name USING nsq "
    "OPTIONS (...) reads, and df.write.format('nsq') ... save() writes"
)
_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}
_DURATION_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

HIDDEN = "<hidden>"
_SECRET = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:(?://)?/[^\0]+")
_PROTOCOLS = {"plaintext": False, "ssl": True}
# anything else is a URL, or several addresses that no comma separates
_HOST = re.compile(r"\[[^\s\[\]/;]+\]|[^\s\[\]/;:]+")

EARLIEST = "earliest"
LATEST = "latest"
CURSOR = "cursor"

AUTO = "auto"
STORED = "stored"
DUE = "due"
OFFSET = "offset"
SPOOL = "spool"
DIRECT = "direct"
ONCE = "once"
AT_LEAST_ONCE = "atLeastOnce"

NO_BATCH = (
    "never says that rows are safe, so nothing could be finished in nsqd: use spark.readStream with "
    "trigger(availableNow=True), channel and spoolLocation, which reads what waits and ends"
)
"""Why a batch read consumes no channel."""
_NO_END = "a stream has no end; use spark.read"

T = TypeVar("T")
Parse = Callable[[str], Any]


class _NotAllowed(ValueError):
    """A value that is refused with more than what the option allows in general."""


def _option(
    default: T, parse: Parse, allowed: str, text: str, shown: str | None = None, *, is_secret: bool = False
) -> T:
    metadata = {"parse": parse, "allowed": allowed, "help": text, "shown": shown, "is_secret": is_secret}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


def _whole(low: int, high: int | None = None) -> Parse:
    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return parse


def _size(low: int, high: int) -> Parse:
    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
        if match is None or match[2] not in _SIZE_UNITS:
            raise ValueError(text)
        value = int(match[1]) * _SIZE_UNITS[match[2]]
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError(text)
    return float(match[1]) * _DURATION_UNITS[match[2]]


def _msg_timeout_s(text: str) -> float:
    value = _duration_s(text)
    if not 1.0 <= value <= 86_400.0:
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _tls(text: str) -> bool:
    """Read a flag, or Kafka's ``security.protocol``."""
    word = text.strip().lower()
    return _PROTOCOLS[word] if word in _PROTOCOLS else _flag(word)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text.strip()


def _one_of(*words: str) -> Parse:
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError(text)
        return text.strip().lower()

    return parse


def _secret(text: str) -> str:
    if not _SECRET.fullmatch(text.strip()):
        raise ValueError
    return text.strip()


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _topics(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names:
        raise ValueError(text)
    return tuple(sorted({_source_topic(name) for name in names}))


def _source_topic(text: str) -> str:
    if text in RESERVED_TOPICS:
        raise ValueError(text)
    return _name(text)


def _name(text: str) -> str:
    if not is_valid_name(text):
        raise ValueError(text)
    return text


def _delivery(text: str) -> str:
    return {word.lower(): word for word in (AUTO, ONCE, AT_LEAST_ONCE)}[text.strip().lower()]


def _write_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,24}", text.strip()):
        raise ValueError(text)
    return text.strip()


def _addresses(text: str) -> tuple[str, ...]:
    addresses = _names(text)
    for address in addresses:
        split_address(address)
    if not addresses:
        raise ValueError(text)
    return tuple(sorted(set(addresses)))


def _lookupds(text: str) -> tuple[str, ...]:
    """Read addresses of nsqlookupd: ``host:port``, or ``http://`` or ``https://`` in front."""
    addresses = tuple(address.rstrip("/") for address in _names(text))
    for address in addresses:
        scheme, _, place = address.rpartition("://")
        if scheme not in ("", "http", "https") or any(sign in place for sign in "/@?#"):
            raise ValueError(address)
        split_address(place)
    if not addresses:
        raise ValueError(text)
    return tuple(sorted(set(addresses)))


def _pattern(text: str) -> str:
    re.compile(text)
    return text


def _columns(text: str) -> tuple[str, ...]:
    names = _names(text.lower())
    if unknown := [name for name in dict.fromkeys(names) if name not in TYPES]:
        shown = listed(unknown, LISTED_MAX)
        raise _NotAllowed(f"{_COLUMNS}: there is no {shown}; there is {', '.join(TYPES)}")
    if not names or len(set(names)) != len(names):
        raise ValueError(text)
    return names


def _positions(*words: str) -> Parse:
    def parse(text: str) -> str:
        if text.strip().lower() in words:
            return text.strip().lower()
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(text)
        return text

    return parse


def _assigned(text: str) -> tuple[tuple[str, int], ...]:
    value = json.loads(text)
    if not isinstance(value, dict) or not value:
        raise ValueError(text)
    chosen = set()
    for topic, partitions in value.items():
        if not isinstance(partitions, list) or not partitions:
            raise ValueError(text)
        for partition in partitions:
            if (
                isinstance(partition, bool)
                or not isinstance(partition, int)
                or not 0 <= partition < PARTITION_COUNT_MAX
            ):
                raise ValueError(text)
            chosen.add((_source_topic(topic), partition))
    return tuple(sorted(chosen))


def _times(text: str) -> str:
    times = json.loads(text)
    if not isinstance(times, dict) or not any(times.values()):  # one that names no partition cannot be meant
        raise ValueError(text)
    return text


def parse_timestamp_ns(text: str) -> int:
    """Read milliseconds since 1970, or ISO 8601, in UTC unless it says otherwise; return ns.

    Raises:
        ValueError: it is neither, or before 1970 or after ``TIME_MAX_MS``.
    """
    if re.fullmatch(r"\d+", text.strip()):
        milliseconds = int(text)
        if milliseconds > TIME_MAX_MS:
            raise ValueError(text)
        return milliseconds * 1_000_000
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    nanoseconds = (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000_000_000 + since_epoch.microseconds * 1000
    if not 0 <= nanoseconds <= TIME_MAX_MS * 1_000_000:
        raise ValueError(text)
    return nanoseconds


TIME_FORM = f"milliseconds since 1970 up to {TIME_MAX_MS} (in 2286), or ISO 8601 (UTC unless it says otherwise)"


def in_ms(time_ns: int) -> str:
    """Show a time in an error as the options take it, with the microseconds that ISO 8601 may have had."""
    return f"{time_ns / 1e6:.16g} ms since 1970"


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, with brackets around an IPv6 host.

    Raises:
        ValueError: it has another form, or the port is not a number from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)


def camel(field_name: str) -> str:
    """Return the option name of a field: ``max_messages_per_task`` is ``maxMessagesPerTask``."""
    first, *rest = field_name.split("_")
    return first + "".join(word.capitalize() for word in rest)


_ADDRESSES = "host:port, such as 127.0.0.1:4150 or [::1]:4150, without http://; several separated by commas"
_LOOKUPDS = "host:port or https://host:port, without a user or a path; several separated by commas"
_COLUMNS = "distinct column names separated by commas"
_DURATION = "a duration such as 500ms, 30s, 15m"
_FETCH_SIZES = f"a size such as 256KiB, from 4KiB to {BATCH_SIZE_MAX >> 20}MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    @classmethod
    def markdown(cls) -> str:
        """Return the table of a class's own options for docs/spark.md; an error names the allowed values."""
        lines = ["| option | default | meaning |", "|---|---|---|"]
        inherited = {field.name for base in cls.__bases__ if base is not object for field in _fields(base)}
        for field in _fields(cls):
            if field.name not in inherited:
                shown = field.metadata["shown"]
                default = str(field.default).lower() if shown is None else shown
                lines.append(f"| `{camel(field.name)}` | {default} | {field.metadata['help']} |")
        return "\n".join(lines)

    @classmethod
    def parse(cls, raw: Mapping[str, str]) -> Self:
        """Read the options of one source or sink.

        Raises:
            OptionError: a name is unknown, a value is not allowed, or two options exclude each other.
        """
        if any(_OF_A_TABLE.fullmatch(option) for option in raw):
            raise _refuse("provider", "nsq", _NO_TABLE)
        if not raw:
            raise _refuse("nsqd", "", f"give either nsqd or lookupd. {_NO_TABLE}")
        fields = {field.name: field for field in _fields(cls)}
        known = {camel(name).lower(): name for name in fields}
        known |= {alias: name for alias, name in ALIASES.items() if name in fields}
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for option, text in raw.items():
            name = known.get(option.lower()) or known.get(option.lower().removeprefix("kafka."))
            if name is None:
                if option.lower() in _SPARKS_OWN:
                    continue
                if way := ELSEWHERE.get(option.lower()) or ELSEWHERE.get(option.lower().removeprefix("kafka.")):
                    raise OptionError(option, UNKNOWN, way, SOURCE)
                near = difflib.get_close_matches(option.lower(), known, 1)
                hint = f"did you mean {camel(known[near[0]])}?" if near else "see docs/spark.md for the list"
                raise OptionError(option, UNKNOWN, hint, SOURCE)
            shown = camel(name) if option.lower() == camel(name).lower() else option
            value = _parsed(fields[name], shown, text)
            if values.setdefault(name, value) != value:
                raise _refuse(shown, text, f"it is another name of {given[name]}, which says something else: give one")
            given[name] = shown
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        raise NotImplementedError


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _parsed(field: dataclasses.Field[Any], option: str, text: str) -> Any:
    try:
        return field.metadata["parse"](text)
    except _NotAllowed as error:
        raise _refuse(option, text, str(error)) from None
    except (ValueError, KeyError, re.error):
        shown = HIDDEN if field.metadata["is_secret"] else text
        raise _refuse(option, shown, field.metadata["allowed"]) from None


def _refuse(option: str, value: object, allowed: str) -> OptionError:
    return OptionError(option, value, allowed, SOURCE)


_PATH = "the path of a PEM file, the same on the driver and on every executor"
_SECRET_ALLOWED = (
    "Spark shows options in its pages, plans and event logs, so write where the secret is, env:NAME or "
    "file:/path, which driver and executors read for themselves"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions(_Options):
    """Options that secure the connections to nsqd and nsqlookupd; the same for reading and writing.

    Secrets are references, ``env:NAME`` or ``file:/path``; :mod:`flintmq.spark.link` makes something of all this.
    """

    tls: bool = _option(
        False,
        _tls,
        "true or false (as security.protocol: SSL or PLAINTEXT; what SASL is for is authSecret)",
        "secure connections to nsqd; its chain and its name are verified",
    )
    tls_ca_file: str = _option("", _text, _PATH, "PEM file with the authorities to trust; without it the system's", "")
    tls_cert: str = _option("", _text, _PATH, "PEM file with this client's certificate and chain, if one is wanted", "")
    tls_key: str = _option("", _text, _PATH, "PEM file with its key, if that is not in `tlsCert`", "")
    tls_server_name: str = _option(
        "", _text, "a host name", "name expected in the certificate, if not the one that is connected to", ""
    )
    tls_min_version: str = _option(
        "tls1.2", _one_of(*VERSIONS), f"one of {', '.join(VERSIONS)}", "oldest version of TLS that is spoken"
    )
    tls_verify: bool = _option(
        True, _flag, "true or false", "false trusts everybody, also whoever sits between; said in the log"
    )
    compression: str = _option(
        "none", _one_of("none", "snappy", "deflate"), "none, snappy or deflate", "of connections to nsqd, on slow links"
    )
    deflate_level: int = _option(6, _whole(1, 9), "1, fast, to 9, small", "with `compression=deflate`")
    auth_secret: str = _option(
        "",
        _secret,
        _SECRET_ALLOWED,
        "where the secret for AUTH is: `env:NAME` or `file:/path`, read in every process that connects",
        "",
        is_secret=True,
    )
    nsqlookupd_token: str = _option(
        "",
        _secret,
        _SECRET_ALLOWED,
        "where the bearer token for nsqlookupd is, likewise; only for `https://` addresses in `lookupd`",
        "",
        is_secret=True,
    )

    @property
    def link(self) -> LinkOptions:
        """These options without those of a subclass: connections are alike when theirs are equal."""
        return LinkOptions(**{field.name: getattr(self, field.name) for field in _fields(LinkOptions)})

    def _check(self) -> None:
        self._check_link(())

    def _check_link(self, lookupd: tuple[str, ...]) -> None:
        has_https = any(address.startswith("https://") for address in lookupd)
        if not self.tls and not has_https:
            for option in ("tls_ca_file", "tls_cert", "tls_server_name", "tls_min_version", "tls_verify"):
                if getattr(self, option) != LinkOptions.__dataclass_fields__[option].default:
                    allowed = "nothing is secured that it could be for: set tls=true, or lookupd to https:// addresses"
                    raise _refuse(camel(option), getattr(self, option), allowed)
        if self.tls_key and not self.tls_cert:
            raise _refuse("tlsKey", self.tls_key, "it needs the certificate it belongs to: set tlsCert")
        if self.tls_ca_file and not self.tls_verify:
            raise _refuse("tlsVerify", "false", "nobody is verified then: leave it out, or tlsCaFile")
        if self.tls_server_name and not (self.tls and self.tls_verify):
            raise _refuse("tlsServerName", self.tls_server_name, "it needs tls=true, and tlsVerify=true")
        if self.deflate_level != 6 and self.compression != "deflate":
            raise _refuse("deflateLevel", self.deflate_level, "it needs compression=deflate")
        if self.nsqlookupd_token and not lookupd:
            raise _refuse("nsqlookupdToken", self.nsqlookupd_token, "it needs lookupd, whom it is for")
        if self.nsqlookupd_token and not all(address.startswith("https://") for address in lookupd):
            open_ones = ",".join(address for address in lookupd if not address.startswith("https://"))
            raise _refuse(
                "nsqlookupdToken",
                self.nsqlookupd_token,
                f"whoever sees the traffic could read it: {open_ones} must be https://",
            )


PLAIN = LinkOptions()
"""Neither secured nor compressed, and without secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(LinkOptions):
    """Options of ``spark.read`` and ``spark.readStream``; durations in seconds, sizes in bytes, times in ns."""

    nsqd: tuple[str, ...] = _option((), _addresses, _ADDRESSES, "nsqd TCP addresses to read from", "")
    lookupd: tuple[str, ...] = _option(
        (), _lookupds, _LOOKUPDS, "nsqlookupd HTTP or `https://` addresses that know the nsqds; instead of `nsqd`", ""
    )
    topic: str = _option("", _source_topic, "a topic name (not _log, _from, _lag, _mode)", "topic to read", "")
    topics: tuple[str, ...] = _option(
        (),
        _topics,
        "topic names separated by commas (not _log, _from, _lag, _mode)",
        "several topics; instead of `topic`",
        "",
    )
    topic_pattern: str = _option(
        "", _pattern, "a regular expression", "all topics that match it wholly; needs `lookupd`; instead of `topic`", ""
    )
    assign: tuple[tuple[str, int], ...] = _option(
        (),
        _assigned,
        'JSON such as {"topic": [0, 2]}',
        "these partitions of these topics alone; instead of `topic`",
        "",
    )
    channel: str = _option(
        "",
        _name,
        "a channel name",
        "channel of this query alone: holds retention, makes the lag visible, makes `latest` safe. A batch read "
        "leaves it alone",
        "",
    )
    mode: str = _option(
        AUTO,
        _one_of(AUTO, OFFSET, SPOOL, DIRECT),
        "auto, offset, spool or direct",
        "`offset`: FlintMQ's nsqd by offset, exactly once. `spool`: any nsqd, at least once into files on the "
        "driver's host, exactly once from there. `direct`: any nsqd, at least once, nothing on disk. `auto`: `offset` "
        "where nsqd can, else `spool`",
    )
    deferred: str = _option(
        "",
        _one_of(STORED, DUE),
        "stored or due",
        "when messages with a delay are read: when they are stored, or, as a consumer gets them, when they are due. "
        "`due` reads through a spool, of FlintMQ's nsqd as well",
        "`stored`; `due` with `spool` and `direct`",
    )
    spool_location: str = _option(
        "",
        _text,
        "a directory on a disk of the driver's host that survives it, of this query alone",
        "`spool`: where messages are kept from the moment they are finished in nsqd until a micro-batch has them",
        "",
    )
    spool_max_bytes: int = _option(
        0,
        _size(1 << 20, 1 << 50),
        "a size such as 10GiB, from 1MiB",
        "most bytes of one topic that wait in the spool; the rest waits in nsqd. With `direct` they are in memory",
        "10GiB, 256MiB with `direct`",
    )
    spool_host: str = _option(
        "127.0.0.1",
        _text,
        "an address of the driver's host that executors reach",
        "`spool`: where executors read it; on other hosts they have to see `spoolLocation` as well, for its token",
    )
    max_in_flight: int = _option(
        2500,
        _whole(1, MAX_IN_FLIGHT_MAX),
        f"1 to {MAX_IN_FLIGHT_MAX}",
        "`spool`, `direct`: messages of a topic that nsqd has delivered and that are not finished; `direct` reads no "
        "more in a micro-batch",
    )
    msg_timeout: float = _option(
        15.0,
        _msg_timeout_s,
        "a duration from 1s, and at most nsqd's --max-msg-timeout",
        "`spool`, `direct`: after so long without a word nsqd delivers a message again, as behind a kill; what "
        "waits is touched",
        "15s",
    )
    starting_offsets: str = _option(
        EARLIEST,
        _positions(EARLIEST, LATEST, CURSOR),
        "earliest, latest, cursor, or JSON such as "
        '{"topic": {"host:4150/0": 23}} with -1 for latest and -2 for earliest',
        "where a new query (or a batch read) starts; `cursor`, for a stream, is where `channel` stands",
    )
    starting_timestamp: int | None = _option(
        None,
        parse_timestamp_ns,
        TIME_FORM,
        "start at the first message stored at or after this time, in milliseconds since 1970 or as ISO 8601, such as "
        "`2026-11-30T12:00:00Z` (without a zone it is UTC, whatever the session's is); overrides `startingOffsets`",
        "",
    )
    starting_offsets_by_timestamp: str = _option(
        "",
        _times,
        TIMES_FORM,
        "the same for partitions one by one, in milliseconds since 1970; overrides `startingOffsets`",
        "",
    )
    starting_offsets_by_timestamp_strategy: str = _option(
        LATEST,
        _one_of("error", LATEST),
        "error or latest",
        "where to start in a partition that has nothing stored at or after the time: at its end, or not at all",
    )
    ending_offsets: str = _option(
        LATEST,
        _positions(LATEST),
        'latest, or JSON such as {"topic": {"host:4150/0": 1000}} with -1 for latest; ends are exclusive',
        "where a batch read ends",
    )
    ending_timestamp: int | None = _option(
        None,
        parse_timestamp_ns,
        TIME_FORM,
        "a batch read ends before the first message stored at or after this time, likewise; overrides `endingOffsets`",
        "",
    )
    ending_offsets_by_timestamp: str = _option(
        "",
        _times,
        TIMES_FORM,
        "the same for partitions one by one, in milliseconds since 1970; overrides `endingOffsets`",
        "",
    )
    max_messages_per_trigger: int = _option(
        2_000_000,
        _whole(0),
        "a whole number, 0 for no limit",
        "most messages of one micro-batch; one of each partition that has any is read even if that is more",
    )
    max_bytes_per_trigger: int = _option(
        0,
        _size(0, 1 << 50),
        "a size such as 512MiB, 0 for no limit",
        "most bytes of one micro-batch, estimated from the mean size of the messages of each partition",
    )
    min_messages_per_trigger: int = _option(
        0, _whole(0), "a whole number", "wait until so many messages are there, at most `maxTriggerDelay`"
    )
    max_trigger_delay: float = _option(
        900.0, _duration_s, _DURATION, "how long `minMessagesPerTrigger` may hold a micro-batch back", "15m"
    )
    min_partitions: int = _option(
        1, _whole(1, 10_000), "1 to 10000", "least number of Spark tasks, as far as there are messages"
    )
    max_messages_per_task: int = _option(
        500_000, _whole(1), "a whole number from 1", "a longer range is split into several Spark tasks"
    )
    fail_on_data_loss: bool = _option(
        True, _flag, "true or false", "fail when messages that are due are gone; false: warn and go on"
    )
    allow_unsafe_latest: bool = _option(
        False,
        _flag,
        "true or false",
        "accept startingOffsets=latest without `channel`: a crash before the first micro-batch skips messages",
    )
    columns: tuple[str, ...] = _option(COLUMNS, _columns, _COLUMNS, "read only these columns, in this order", "all")
    include_headers: bool = _option(
        False,
        _flag,
        "true or false",
        "a last column `headers`, which costs about 1 us a message: each is JSON that is taken apart",
    )
    fetch_max_bytes: int = _option(
        1 << 20, _size(1 << 12, BATCH_SIZE_MAX), _FETCH_SIZES, "bytes asked from nsqd at a time", "1MiB"
    )
    driver_read_max_bytes: int = _option(
        256 << 10,
        _size(0, 16 << 20),
        "a size such as 256KiB, up to 16MiB; 0: never",
        "a micro-batch of one task and at most 5,000 messages that is no larger is read on the driver: no Python task",
        "256KiB",
    )
    batch_rows: int = _option(20_000, _whole(1, 1_000_000), "1 to 1000000", "rows of an Arrow batch")
    connect_timeout: float = _option(5.0, _duration_s, _DURATION, "how long a connection may take to be made", "5s")
    fetch_timeout: float = _option(30.0, _duration_s, _DURATION, "how long nsqd may take to answer", "30s")
    retries: int = _option(
        10,
        _whole(0, 1000),
        "0 to 1000",
        "attempts after a failure, 0.1 s to 5 s apart (10 are about 25 s). An nsqd that is away for longer "
        "while a micro-batch reads from it ends the query",
    )
    nsqd_down_timeout: float = _option(
        300.0,
        _duration_s,
        _DURATION,
        "how long a stream waits between micro-batches for an nsqd that is away, reading from the others, before it "
        "fails; with failOnDataLoss=false it waits for ever. Within a micro-batch `retries` counts",
        "5m",
    )
    lookupd_poll_interval: float = _option(
        10.0,
        _duration_s,
        _DURATION,
        "how often each nsqlookupd is asked, from the end of the last time: 3 requests with `topicPattern`, however "
        "many topics there are; one for each topic that is named, 8 at a time. A micro-batch waits for that",
        "10s",
    )

    def __post_init__(self) -> None:
        if self.deferred == DUE and self.mode == AUTO:
            object.__setattr__(self, "mode", SPOOL)

    @property
    def all_columns(self) -> tuple[str, ...]:
        """The columns, with headers if they are wanted."""
        has_headers = not self.include_headers or "headers" in self.columns
        return self.columns if has_headers else (*self.columns, "headers")

    def _check(self) -> None:
        if bool(self.nsqd) == bool(self.lookupd):
            raise _refuse("nsqd", ",".join(self.nsqd), "give either nsqd or lookupd")
        self._check_link(self.lookupd)
        if sum(map(bool, (self.topic, self.topics, self.topic_pattern, self.assign))) != 1:
            raise _refuse("topic", self.topic, "give exactly one of topic, topics (subscribe), topicPattern, assign")
        if self.topic_pattern and not self.lookupd:
            raise _refuse("topicPattern", self.topic_pattern, "it needs lookupd, which knows the topics")
        if self.starting_offsets == CURSOR and not self.channel:
            raise _refuse("startingOffsets", CURSOR, "it needs channel, whose position it is")
        if 0 < self.max_messages_per_trigger < self.min_messages_per_trigger:
            allowed = f"a micro-batch has at most maxMessagesPerTrigger ({self.max_messages_per_trigger}): raise that"
            raise _refuse("minMessagesPerTrigger", self.min_messages_per_trigger, allowed)
        if self.mode in (SPOOL, DIRECT):
            self.check_spooled(self.mode)
        elif self.mode == OFFSET:
            if self.deferred == DUE:
                allowed = (
                    "reading by offset passes what is not due, or waits with all that is stored behind it: leave mode "
                    "out, and give channel and spoolLocation (mode=spool), or set mode=direct"
                )
                raise _refuse("deferred", DUE, allowed)
            for name in ("spool_location", "spool_max_bytes", "spool_host", "max_in_flight", "msg_timeout"):
                if getattr(self, name) != SourceOptions.__dataclass_fields__[name].default:
                    allowed = "nothing is spooled with mode=offset: leave it out, or set mode=spool"
                    raise _refuse(camel(name), getattr(self, name), allowed)

    def check_spooled(self, mode: str) -> None:
        """Refuse what an nsqd without offsets cannot do, and ask for what it takes.

        Args:
            mode: ``spool`` or ``direct``, as it was set or found.

        Raises:
            OptionError: which option, and what to give instead.
        """
        if self.deferred == STORED:
            allowed = f"mode={mode} gets messages when they are due: leave it out, or set mode=offset"
            raise _refuse("deferred", STORED, allowed)
        if not self.channel:
            allowed = f"mode={mode} consumes a channel: set channel to one that nobody else consumes"
            raise _refuse("channel", "", allowed)
        if mode == SPOOL and not self.spool_location:
            allowed = (
                "mode=spool finishes messages in nsqd when they are in files on the driver's host (at least once into "
                "them, exactly once from there): set spoolLocation to a directory, or mode=direct (at least once, "
                "nothing on disk)"
            )
            raise _refuse("spoolLocation", "", allowed)
        if mode == DIRECT:
            for name in ("spool_location", "spool_host"):
                if getattr(self, name) != SourceOptions.__dataclass_fields__[name].default:
                    allowed = (
                        "mode=direct keeps nothing on disk, for executors of the driver's host alone: leave it out"
                    )
                    raise _refuse(camel(name), getattr(self, name), allowed)
            if self.min_messages_per_trigger > self.max_in_flight * max(1, len(self.named_topics)):
                allowed = (
                    f"mode=direct has at most maxInFlight ({self.max_in_flight}) messages of a topic at a time: ask "
                    "for no more than that, or raise maxInFlight"
                )
                raise _refuse("minMessagesPerTrigger", self.min_messages_per_trigger, allowed)
        if not self.named_topics or self.assign:
            raise _refuse("topic", "", f"mode={mode} consumes topics by name: give topic or topics")
        if self.starting_offsets not in (EARLIEST, CURSOR) or not self._starts_by_offset:
            shown = self.starting_offsets if self._starts_by_offset else "a time"
            allowed = f"with mode={mode} reading starts where the channel stands: leave it out"
            raise _refuse("startingOffsets", shown, allowed)

    @property
    def spool_bytes_max(self) -> int:
        """The option ``spoolMaxBytes``, or its default on disk."""
        return self.spool_max_bytes or 10 << 30

    @property
    def memory_bytes_max(self) -> int:
        """The option ``spoolMaxBytes``, or its default in memory."""
        return self.spool_max_bytes or 256 << 20

    def check_batch(self) -> None:
        """Refuse what makes no sense in ``spark.read``.

        Raises:
            OptionError: which option, and what to give instead.
        """
        if self.mode in (SPOOL, DIRECT):
            name, value = ("deferred", DUE) if self.deferred else ("mode", self.mode)
            raise _refuse(name, value, f"spark.read {NO_BATCH}")
        if self._starts_by_offset and self.starting_offsets == LATEST:
            raise _refuse("startingOffsets", LATEST, "a batch read from the latest message reads nothing")
        if self._starts_by_offset and self.starting_offsets == CURSOR:
            allowed = (
                "nsqd cannot be asked where a channel stands without creating one that is not there, and a batch read "
                "creates none: use spark.readStream with trigger(availableNow=True), or give offsets or a time"
            )
            raise _refuse("startingOffsets", CURSOR, allowed)
        start_ns, end_ns = self.starting_timestamp, self.ending_timestamp
        if start_ns is not None and end_ns is not None and end_ns < start_ns:
            allowed = f"startingTimestamp is later, {in_ms(start_ns)}: there is nothing between the two"
            raise _refuse("endingTimestamp", in_ms(end_ns), allowed)

    def check_by_offset(self, what: str) -> None:
        """Refuse options of a spool where something other than a stream of Spark's reads.

        Args:
            what: reads, and what reads a channel instead.

        Raises:
            OptionError: which option.
        """
        if self.mode in (SPOOL, DIRECT):
            name, value = ("deferred", DUE) if self.deferred else ("mode", self.mode)
            raise _refuse(name, value, what)

    def check_stream(self, what: str = _NO_END) -> None:
        """Refuse what would lose messages in ``spark.readStream``.

        Args:
            what: has no end, and what to do instead where one is given.

        Raises:
            OptionError: which option, and what to give instead.
        """
        if self.ending_timestamp is not None:
            raise _refuse("endingTimestamp", in_ms(self.ending_timestamp), what)
        if self.ending_offsets_by_timestamp:
            raise _refuse("endingOffsetsByTimestamp", self.ending_offsets_by_timestamp, what)
        if self.ending_offsets != LATEST:
            raise _refuse("endingOffsets", self.ending_offsets, what)
        # a query that crashes before its first micro-batch is planned starts anew, and "latest" has moved on by then;
        # only a position that nsqd keeps makes it safe
        if not self.channel and not self.allow_unsafe_latest and self._starts_at_latest():
            raise _refuse(
                "startingOffsets",
                self.starting_offsets,
                "latest needs channel, so that nsqd remembers the start; or set allowUnsafeLatest=true",
            )

    @property
    def _starts_by_offset(self) -> bool:
        return self.starting_timestamp is None and not self.starting_offsets_by_timestamp

    def _starts_at_latest(self) -> bool:
        if not self._starts_by_offset:
            return False
        if self.starting_offsets in (EARLIEST, LATEST, CURSOR):
            return self.starting_offsets == LATEST
        given = json.loads(self.starting_offsets)
        return any(-1 in labels.values() for labels in given.values() if isinstance(labels, dict))

    @property
    def named_topics(self) -> tuple[str, ...]:
        """The topics given by name; empty with ``topicPattern``."""
        if self.assign:
            return tuple(sorted({topic for topic, _ in self.assign}))
        return (self.topic,) if self.topic else self.topics

    def reads(self, topic: str, partition: int) -> bool:
        """Whether these options choose a partition of a topic."""
        if self.assign:
            return (topic, partition) in self.assign
        if self.topic_pattern:
            return re.fullmatch(self.topic_pattern, topic) is not None and topic not in RESERVED_TOPICS
        return topic in self.named_topics


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(LinkOptions):
    """Options of ``df.write`` and ``df.writeStream``; durations in seconds, sizes in bytes."""

    nsqd: tuple[str, ...] = _option(
        (), _addresses, _ADDRESSES, "nsqd TCP addresses to publish to; tasks are spread over them", ""
    )
    lookupd: tuple[str, ...] = _option(
        (), _lookupds, _LOOKUPDS, "nsqlookupd HTTP or `https://` addresses that know the nsqds; instead of `nsqd`", ""
    )
    topic: str = _option("", _name, "a topic name", "topic for all rows; without it the column `topic` decides", "")
    delivery: str = _option(
        AUTO,
        _delivery,
        "auto, once or atLeastOnce",
        "`auto`: once where nsqd is FlintMQ's, else at least once, which is logged; `once`: or fail; `atLeastOnce`: "
        "plain publishes",
    )
    write_id: str = _option(
        "",
        _write_id,
        "1 to 24 of [A-Za-z0-9._-]",
        "name of a `df.write` that may be run again: rows that it has stored already are not stored twice",
        "",
    )
    order_by: tuple[str, ...] = _option(
        (),
        _names,
        "column names separated by commas",
        "columns by which each task sorts its rows first, where their order is not repeatable (after a shuffle)",
        "",
    )
    sharding: str = _option(
        "murmur3",
        _one_of(*SHARDINGS),
        f"one of {', '.join(SHARDINGS)}",
        "how a `key` becomes a partition; all producers of a topic have to agree",
    )
    batch_messages: int = _option(1000, _whole(1, 65_536), "1 to 65536", "most messages of one MPUB")
    batch_bytes: int = _option(
        1 << 20,
        _size(1, 1 << 30),
        "a size such as 1MiB",
        "most bytes of one MPUB, if no message is longer",
        "1MiB",
    )
    max_in_flight: int = _option(8, _whole(1, 1000), "1 to 1000", "MPUBs sent and not yet answered, per task")
    oversize: str = _option(
        "fail",
        _one_of("fail", "drop"),
        "fail or drop",
        "what to do with a body longer than `maxMessageSize`; drops are counted",
    )
    max_message_size: int = _option(1 << 20, _size(1, 1 << 30), "a size such as 1MiB", "nsqd's --max-msg-size", "1MiB")
    max_body_size: int = _option(
        5 << 20, _size(64, 1 << 30), "a size such as 5MiB", "nsqd's --max-body-size, a bound on one MPUB", "5MiB"
    )
    connect_timeout: float = _option(5.0, _duration_s, _DURATION, "how long a connection may take to be made", "5s")
    pub_timeout: float = _option(30.0, _duration_s, _DURATION, "how long nsqd may take to answer", "30s")
    retries: int = _option(
        10,
        _whole(0, 1000),
        "0 to 1000",
        "attempts after a failure, 0.1 s to 5 s apart (10 are about 25 s). An nsqd that is away for longer "
        "while a micro-batch publishes to it ends the query",
    )

    def _check(self) -> None:
        if bool(self.nsqd) == bool(self.lookupd):
            raise _refuse("nsqd", ",".join(self.nsqd), "give either nsqd or lookupd")
        self._check_link(self.lookupd)
        if self.batch_bytes > self.max_body_size:
            raise _refuse("batchBytes", self.batch_bytes, f"at most maxBodySize={self.max_body_size}")
