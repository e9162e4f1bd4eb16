"""What the load of the other tests says when it goes wrong: CI shows a failure without the machine it came from."""

from __future__ import annotations

import pytest
from tests.integration.daemons import Nsqd, wait_until
from tests.integration.load import Consumer, body_of, drain


def test_a_channel_that_is_not_drained_shows_what_is_left(nsqd: Nsqd):
    nsqd.publish("t", *(body_of(number) for number in range(5)))
    with nsqd.connect() as holder:
        holder.subscribe("t", "c", 2)
        holder.messages(2)
        with pytest.raises(AssertionError) as failure:
            drain(nsqd, "t", "c", timeout_s=1)
    told = str(failure.value)
    assert "t/c drained" in told
    assert "the consumer reads; 3 deliveries of 3 messages, the last one " in told and "3 finished" in told
    assert '"in_flight_count": 2' in told
    assert "TCP: listening on" in told


def test_a_consumer_whose_connection_ended_ends_the_wait(nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch):
    """Its messages come back to nobody: waiting longer is no use, and hides the reason."""
    nsqd.publish("t", body_of(0))
    monkeypatch.setattr(Consumer.__init__, "__defaults__", (500, lambda message_id: b"NO SUCH COMMAND\n"))
    with pytest.raises(AssertionError) as failure:
        drain(nsqd, "t", "c")
    told = str(failure.value)
    assert "too early an end" in told and "the consumer ended: " in told
    assert "E_INVALID" in told


def test_how_a_consumer_came_to_its_end(nsqd: Nsqd):
    killed, stopped = (Consumer(nsqd.tcp, "t", channel).begin() for channel in ("a", "b"))
    assert not killed.ended
    stopped.stop()
    assert stopped.ended == "it was told to stop"
    nsqd.kill()
    wait_until(lambda: killed.ended, "the end of the connection")
    assert "told to stop" not in killed.ended
