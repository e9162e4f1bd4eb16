"""``flintmq node list`` where there is no cluster: every nsqd that is named or known, its version and what it has."""

from __future__ import annotations

import argparse
from typing import Any

from flintmq.addresses import format_address
from flintmq.errors import FlintError
from flintmq.tools.shell.lines import time_text
from flintmq.tools.shell.link import Link
from flintmq.tools.shell.output import say_json, say_table
from flintmq.tools.shell.stats import rows_of

_NS_PER_S = 1_000_000_000


def run(given: argparse.Namespace) -> int:
    """Print the nsqds; return the exit code: 1 if one does not answer, or an nsqlookupd that may know more of them.

    Raises:
        FlintError: nobody is known.
    """
    link = Link(given)

    def ask(admin: Any) -> dict[str, Any]:
        try:
            info, found = admin.info(), admin.stats(clients=False)
        except FlintError as error:
            return {"error": str(error)}
        rows = rows_of([(admin.address, found)])
        return {
            "version": f"FlintMQ {info['flintmq_version']}" if "flintmq_version" in info else info.get("version", ""),
            "tcp": format_address(str(info.get("broadcast_address")), info.get("tcp_port")),
            "topics": sum(not row.channel for row in rows),
            "depth": sum(row.depth for row in rows),
            "since": time_text(int(info.get("start_time", 0)) * _NS_PER_S),
            "health": found.get("health", ""),
        }

    answers = link.each(link.nsqds(), ask)
    if given.json:
        say_json({"node": admin.address.removeprefix("http://"), **found} for admin, found in answers)
    else:
        say_table(
            ("NODE", "TCP", "VERSION", "TOPICS", "DEPTH", "SINCE", "HEALTH"),
            [
                (
                    admin.address.removeprefix("http://"), str(found.get("tcp", "-")), str(found.get("version", "-")),
                    str(found.get("topics", "-")), str(found.get("depth", "-")), str(found.get("since", "-")),
                    str(found.get("error") or found.get("health")),
                )
                for admin, found in answers
            ],
            "there are no nsqds",
        )  # fmt: skip
    return 1 if any("error" in found for _, found in answers) else link.exit_code
