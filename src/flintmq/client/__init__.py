"""The asyncio client: producer, consumer, and the policies they follow.

Layers inside, upper to lower: ``app``, ``consumer``, ``dead_letters``, ``producer``,
``flow | links | handlers | publish``, ``connection | discovery | inbox``, ``message``, ``rdy | backoff | options``.
The policies (``rdy``, ``backoff``) read no clock and draw no random number: values come in.
"""

from __future__ import annotations

from flintmq.client.app import App
from flintmq.client.consumer import Consumer
from flintmq.client.message import Discard, Message, Requeue
from flintmq.client.options import ConnectionOptions
from flintmq.client.producer import Producer

__all__ = ["App", "ConnectionOptions", "Consumer", "Discard", "Message", "Producer", "Requeue"]
