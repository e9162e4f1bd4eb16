"""``/config``: options of a running nsqd, read by anybody, changed only from where that is allowed.

Rules of this file: names are those of the configuration file; values look as nsqd shows them: text bare, everything
else JSON, durations as nanoseconds, levels and versions as Go's numbers; what nsqd fills in itself is shown filled in.

Source: NSQ's HTTP API; docs/operations.md (who may change it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from flintmq.errors import UNREADABLE_JSON, OptionError, without_credentials
from flintmq.net import log as logs
from flintmq.net.http_messages import HttpError, Request, Response, json_response, text_response
from flintmq.net.networks import Networks
from flintmq.nsqd.api.route import ALL_ADMIN, DRY, Route
from flintmq.nsqd.options import NsqdOptions
from flintmq.options import Row, rows

log = logging.getLogger(__name__)

_LOOKUPDS = "nsqlookupd_tcp_addresses"
_LOG_LEVEL = "log_level"
_AUTH_SERVERS = "auth_http_addresses"
_NUMBERS: dict[str, dict[str, int]] = {
    _LOG_LEVEL: {word: number for number, word in enumerate(logs.LEVELS, 1)},
    "tls_required": {"false": 0, "tcp-https": 1, "true": 2},
    "tls_min_version": {"tls1.0": 0x301, "tls1.1": 0x302, "tls1.2": 0x303, "tls1.3": 0x304},
}


@dataclass(frozen=True, slots=True)
class Running:
    """The options of a running nsqd.

    Attributes:
        options: as they are now.
        change: puts other options into force.
        filled_in: values by name of options that nsqd completes itself.
    """

    options: Callable[[], NsqdOptions]
    change: Callable[[NsqdOptions], None]
    filled_in: Callable[[], dict[str, Any]]


class ConfigApi:
    """The handlers of ``/config``.

    Args:
        networks: from where options may be changed.
    """

    def __init__(self, running: Running, networks: Networks) -> None:
        self._running = running
        self._networks = networks
        self._rows: dict[str, Row] = {row.key: row for row in rows(NsqdOptions) if not row.deprecated}

    def show(self, request: Request) -> Response:
        """``GET /config/{opt}``."""
        return self._answer(request.parameters["opt"])

    def change(self, request: Request) -> Response:
        """``PUT /config/{opt}``."""
        if not self._networks.allows(request.remote_address):
            log.warning("%s may not change options, see --allow-config-from-cidr", request.remote_address)
            raise HttpError(403, "FORBIDDEN")
        if not request.body:
            raise HttpError(413, "INVALID_VALUE")
        name = request.parameters["opt"]
        read = {_LOOKUPDS: _addresses, _LOG_LEVEL: _level}.get(name)
        if read is None:
            raise HttpError(400, "INVALID_OPTION")
        try:
            options = self._running.options().replace(**{self._rows[name].attribute: read(request.body)})
        except (OptionError, ValueError):
            raise HttpError(400, "INVALID_VALUE") from None
        self._running.change(options)
        log.info("%s set %s", request.remote_address, name)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        row = self._rows.get(name)
        if row is None:
            raise HttpError(400, "INVALID_OPTION")
        filled_in = self._running.filled_in()
        value = filled_in[name] if name in filled_in else getattr(self._running.options(), row.attribute)
        if name == _AUTH_SERVERS:
            value = [without_credentials(each) for each in value]
        if name in _NUMBERS:
            return json_response(_NUMBERS[name][value])
        return text_response(value) if isinstance(value, str) else json_response(value)


def _addresses(body: bytes) -> tuple[str, ...]:
    try:
        addresses = msgspec.json.decode(body, type=list[str] | None)
    except UNREADABLE_JSON as error:
        raise ValueError("not a JSON array of addresses") from error
    return tuple(dict.fromkeys(addresses or ()))


def _level(body: bytes) -> str:
    return body.decode("ascii").lower()


ROUTES = (
    Route("GET", "/config/{opt}", ALL_ADMIN, ConfigApi.show, (), ()),
    Route("PUT", "/config/{opt}", ALL_ADMIN, ConfigApi.change, (), DRY,
          body_limit=attrgetter("max_msg_size"), too_big="INVALID_VALUE"),
)  # fmt: skip
