"""An answer over HTTP that waits until something is stored, without a task per request.

Source: reference/nsq.md 2.1, reference/youzan.md 1.4 (the answer that says where a message is).
"""

from __future__ import annotations

from flintmq.broker.partition import Ended
from flintmq.broker.producers import SequenceGap
from flintmq.net.http_messages import HttpError, PendingResponse, Response, json_response
from flintmq.nsqd.http_names import publish_refusal
from flintmq.nsqd.pending_reply import Place


class PendingAnswer:
    """Answers one request when what it waits for has ended.

    Args:
        ok: the answer when it ended well.
        place: says more than that, of a message with a trace id.
    """

    __slots__ = ("_ok", "_place", "_source", "pending")

    def __init__(self, source: Ended, ok: Response, place: Place | None = None) -> None:
        self.pending = PendingResponse()
        self._source = source
        self._ok = ok
        self._place = place
        source.waiters.append(self)
        if source.ended:
            self.publish_ended()

    def publish_ended(self) -> None:
        """What was waited for has ended."""
        error = self._source.error
        if error is None:
            self.pending.complete(self._ok if self._place is None else _answer_of(self._place, self._ok))
        elif isinstance(error, SequenceGap):
            self.pending.fail(publish_refusal(error))
        else:
            # nsqd answers EXITING for any failure of a put; the reason is in /ping and the log
            self.pending.fail(HttpError(503, "EXITING"))


def _answer_of(place: Place, ok: Response) -> Response:
    stored = place.stored() if place.is_traced else None
    if stored is None:
        return ok
    answer = {
        "status": "OK",
        "id": stored.internal_id,
        "trace_id": str(stored.trace_id),
        "queue_offset": stored.offset,
        "rawsize": stored.raw_size,
    }
    return json_response(answer)
