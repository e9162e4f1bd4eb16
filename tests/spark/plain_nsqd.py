"""An nsqd that knows no more commands than NSQ's own: the stand-in for one.

Usage: ``plain_nsqd.py <flags of nsqd>``
"""

from __future__ import annotations

import sys

from flintmq.cli import nsqd
from flintmq.wire import server
from flintmq.wire.commands import COMMANDS

if __name__ == "__main__":
    known = {name: row for name, row in COMMANDS.items() if row.origin == "nsq"}
    for routes in server._ROUTES.values():
        for name in COMMANDS.keys() - known.keys():
            routes.pop(name.encode(), None)
    server._NAMES = {name.encode() for name in known}
    sys.exit(nsqd(sys.argv[1:]))
