"""Names of options that users of Kafka, of NSQ's own tools and of other sources write: those that mean the same here,
and the others.

The rules of this file: a name stands in ``ALIASES`` only if its values mean here what they mean there; one that means
something else, or nothing, is in ``ELSEWHERE`` with what to write instead, and refused. All are lower case, and Kafka's
are found behind ``kafka.`` as well.

Source: docs/decisions/0006.
"""

from __future__ import annotations

ALIASES = {
    "subscribe": "topics",
    "subscribepattern": "topic_pattern",
    "maxoffsetspertrigger": "max_messages_per_trigger",
    "minoffsetspertrigger": "min_messages_per_trigger",
    "maxrecordsperpartition": "max_messages_per_task",
    "fetchoffset.numretries": "retries",
    "security.protocol": "tls",
    "ssl.truststore.location": "tls_ca_file",
    "ssl.keystore.location": "tls_cert",
    "tls_v1": "tls",
    "tls_root_ca_file": "tls_ca_file",
    "tls_cert": "tls_cert",
    "tls_key": "tls_key",
    "tls_min_version": "tls_min_version",
    "auth_secret": "auth_secret",
}
"""Names with the field of each."""

_GROUP = "a query keeps its place in its checkpoint; channel=NAME shows it in nsqd, and holds what it has not read"
_BYTES = "body is the message's bytes as they were published; cast(body as string) makes a text of it"
_PEM = "files are PEM here, and a key has no password: set tlsCaFile, tlsCert, tlsKey"
_ONE_PLAN = (
    "Spark plans once what it reads for all queries of a load(), so what the filter of one left out would be missing "
    "in the others: leave it out, and bound the read by startingOffsets and endingOffsets, or startingTimestamp and "
    "endingTimestamp"
)
_SECRET = "a user and password are one secret here: authSecret=env:NAME or file:/path, checked by nsqd's auth server"

ELSEWHERE = {
    "bootstrap.servers": "set nsqd=host:4150 (NSQ's TCP port), or lookupd=host:4161",
    "nsqd_tcp_address": "set nsqd=host:4150",
    "lookupd_http_address": "set lookupd=host:4161",
    "group.id": _GROUP,
    "groupidprefix": _GROUP,
    "auto.offset.reset": "set startingOffsets=earliest or latest",
    "enable.auto.commit": _GROUP,
    "interceptor.classes": "there are none; transform the rows in Spark",
    "key.deserializer": _BYTES,
    "value.deserializer": _BYTES,
    "value.serializer": "write the column body as a string or binary",
    "fetchoffset.retryintervalms": "set retries: the pauses between them grow from 0.1 s to 5 s",
    "kafkaconsumer.polltimeoutms": "set fetchTimeout, a duration such as 30s",
    "request.timeout.ms": "set fetchTimeout for reading or pubTimeout for writing, a duration such as 30s",
    "max.partition.fetch.bytes": "set fetchMaxBytes",
    "fetch.max.bytes": "set fetchMaxBytes",
    "key.serializer": "write the column key as a string, binary or whole number",
    "acks": "nsqd answers when a message is as safe as its --durability says",
    "enable.idempotence": "set delivery=once or delivery=atLeastOnce",
    "transactional.id": "set delivery=once, and writeId for a batch write that may be run again",
    "batch.size": "set batchBytes and batchMessages",
    "linger.ms": "nothing waits here; set batchMessages for longer MPUBs",
    "compression.type": "set compression=none, snappy or deflate",
    "max.request.size": "set maxMessageSize as nsqd's --max-msg-size is",
    "sasl.mechanism": _SECRET,
    "sasl.jaas.config": _SECRET,
    "ssl.truststore.password": _PEM,
    "ssl.truststore.type": _PEM,
    "ssl.keystore.password": _PEM,
    "ssl.keystore.type": _PEM,
    "ssl.key.password": _PEM,
    "pushdown": _ONE_PLAN,
}
"""Names of what is done in another way here, with that way."""
