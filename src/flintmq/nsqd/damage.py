"""The damage that was found in the data directory, until somebody has acknowledged it (``/damage``).

It is kept in the database, so that a restart does not hide it. What was acknowledged stays known: damage that is found
again at every start, because the bytes are still there, is not told of twice.

Rules of this file: each report is a line of the log, once; at most :data:`REPORTS_MAX` are kept, of more the number.

Source: docs/decisions/0011.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from flintmq.broker.broker import Broker
from flintmq.env import Env
from flintmq.storage import Corruption, Damage, channel_store

log = logging.getLogger(__name__)

REPORTS_MAX = 1000
_NS_PER_S = 1_000_000_000
_NS_PER_NUMBER = 1000


class StoredDamage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A report as the database has it.

    Attributes:
        is_settled: what is elsewhere comes from there: the same may be damaged once more.
    """

    damage: Damage
    is_acknowledged: bool = False
    is_settled: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StoredDamage).decode


def damage_of(found: Corruption) -> Damage | None:
    """Return what a log found, if it is a loss; None for a write that was torn at its end."""
    if found.kind == "torn":
        return None
    first, end = found.first_sequence_lost, found.end_sequence_lost
    if end <= first:
        first = end = 0
    reason = f"at byte {found.position}, {found.size} bytes: {found.reason}"
    elsewhere = end - first if found.is_elsewhere and not is_allowed_for(found) else 0
    return Damage(found.path, reason, first=first, end=end, lost=end - first - elsewhere, elsewhere=elsewhere)


def is_allowed_for(found: Corruption) -> bool:
    """Whether nobody was promised what is lost: it was not synced when the machine lost its power."""
    return found.first_sequence_lost >= found.synced_before and found.end_sequence_lost > found.first_sequence_lost


class DamageRegister:
    """Everything that one nsqd knows of damage."""

    def __init__(self, env: Env, broker: Broker) -> None:
        self._env = env
        self._broker = broker
        self._reports: dict[int, tuple[int, StoredDamage]] = {}
        self._known: dict[tuple[Any, ...], None] = {}
        self._number = 0
        self.found_count = 0
        self.unlisted_count = 0

    @property
    def reports(self) -> list[tuple[int, Damage]]:
        """Damage that is not acknowledged, the oldest first: wall time in ns, and what it is."""
        return [(at_ns, each.damage) for at_ns, each in self._reports.values() if not each.is_acknowledged]

    @property
    def count(self) -> int:
        """The number of reports that are not acknowledged."""
        return sum(not each.is_acknowledged for _, each in self._reports.values()) + self.unlisted_count

    @property
    def lost(self) -> int:
        """The number of messages that are lost by what is not acknowledged; there may be more."""
        return sum(damage.lost for _, damage in self.reports)

    def restore(self, stored: Iterable[tuple[int, int, bytes]]) -> None:
        """Take what an earlier process has found: number, wall time in ns, report."""
        for number, at_ns, report in stored:
            try:
                each = _decode(report)
            except msgspec.MsgspecError:
                log.error("a report of damage in the database cannot be read: %r", report[:200])
                continue
            self._keep(number, at_ns, each)

    def _keep(self, number: int, at_ns: int, each: StoredDamage) -> None:
        self._number = max(number, self._number)
        self._reports[number] = at_ns, each
        if not each.is_settled:
            self._known[_key(each.damage)] = None

    def found(self, corruption: Corruption) -> None:
        """Take what a log has found; a torn end, or what was not synced, is only logged.

        What was not synced is remembered too: a later start finds the same gap among messages that are synced by then.
        """
        damage = damage_of(corruption)
        if damage is None:
            self.found_count += 1
            log.error("%s", corruption)
        else:
            self.add(damage, str(corruption), is_known=is_allowed_for(corruption))

    def add(self, damage: Damage, text: str = "", is_known: bool = False) -> None:
        """Remember damage and tell of it.

        Args:
            text: for the log, when it is not the damage's own.
            is_known: nobody is to be told of it but the log.
        """
        self.found_count += 1
        log.error("%s", text or damage)
        if _key(damage) in self._known:
            return
        if len(self._reports) >= REPORTS_MAX and not self._forget_one():
            self.unlisted_count += not is_known
            return
        at_ns = self._env.clock.wall_ns()
        each = StoredDamage(damage, is_known)
        number = max(self._number + 1, at_ns // _NS_PER_NUMBER)
        self._keep(number, at_ns, each)
        self._broker.remember(channel_store.put_damage([(number, at_ns, _encode(each))]))

    def _forget_one(self) -> bool:
        """Make room by what was acknowledged longest ago."""
        for number, (_, each) in self._reports.items():
            if each.is_acknowledged:
                del self._reports[number]
                self._broker.remember(channel_store.delete_damage(number))
                return True
        return False

    def settled(self, directory: str, is_lost: bool) -> None:
        """Take note of what becomes of the messages that the copy in a directory is to get from elsewhere.

        Args:
            is_lost: nobody else has them; else somebody sends them.
        """
        changed = []
        for number, (at_ns, each) in self._reports.items():
            damage = each.damage
            if not damage.elsewhere or each.is_settled or damage.path.rpartition("/")[0] != directory:
                continue
            if is_lost:
                now = StoredDamage(msgspec.structs.replace(damage, lost=damage.elsewhere, elsewhere=0))
                log.error("%s", now.damage)
            else:
                now = StoredDamage(damage, each.is_acknowledged, is_settled=True)
                self._known.pop(_key(damage), None)
            self._reports[number] = at_ns, now
            changed.append((number, at_ns, _encode(now)))
        if changed:
            self._broker.remember(channel_store.put_damage(changed))

    def acknowledge(self) -> None:
        """Somebody knows of all of it; durable once the broker's changes are."""
        changed = []
        for number, (at_ns, each) in self._reports.items():
            if not each.is_acknowledged:
                known = StoredDamage(each.damage, True, each.is_settled)
                self._reports[number] = at_ns, known
                changed.append((number, at_ns, _encode(known)))
        self.unlisted_count = 0
        if changed:
            self._broker.remember(channel_store.put_damage(changed))
            log.info("damage acknowledged: %d reports", len(changed))

    def health(self) -> str:
        """``OK``, or that there is damage."""
        count = self.count
        if not count:
            return "OK"
        lost = f"{self.lost} messages lost"
        if any(damage.is_more_possible for _, damage in self.reports):
            lost = f"at least {lost}" if self.lost else "messages may be lost"
        return f"NOK - damage: {count} reports, {lost}; see flintmq admin damage"

    def state(self) -> dict[str, Any]:
        """The answer to ``GET /damage``."""
        reports = self.reports
        return {
            "count": self.count,
            "lost": self.lost,
            "is_more_possible": any(damage.is_more_possible for _, damage in reports),
            "reports": [
                {"at": at_ns // _NS_PER_S, **msgspec.to_builtins(damage)} for at_ns, damage in reversed(reports)
            ],
        }


def _key(damage: Damage) -> tuple[Any, ...]:
    """Return what is the same of damage that is found again."""
    detail = (damage.first, damage.end) if damage.first else damage.reason
    return damage.path, damage.topic, damage.partition, damage.channel, detail
