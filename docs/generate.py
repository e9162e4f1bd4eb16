"""Writes the pages and files that are derived from tables in the code; ``make docs`` runs it.

A test compares what it would write with what is in the tree, so neither can drift. Add a generated page by adding a row
to :func:`generated`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flintmq.env import Env
from flintmq.net.debug import DebugApi
from flintmq.net.http_auth import ADMIN_OF_ALL, PERMISSIONS, Table, permissions_table
from flintmq.net.http_router import Router
from flintmq.net.networks import Networks
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.http_permissions import CLUSTER_TABLE, STORE_TABLE
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import example_file, reference_page
from flintmq.sync import LookupdAdmin, NsqdAdmin
from flintmq.tools import admin, to_nsq
from flintmq.tools.nsq_stat import StatOptions
from flintmq.tools.nsq_tail import TailOptions
from flintmq.tools.nsq_to_file import ToFileOptions
from flintmq.tools.nsq_to_http import ToHttpOptions
from flintmq.tools.nsq_to_nsq import ToNsqOptions
from flintmq.wire.codes import CODES
from flintmq.wire.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


def generated() -> dict[str, str]:
    """Return path -> text of every generated file, paths relative to the root of the project."""
    return {
        "docs/reference/options.md": reference_page([NsqdOptions, NsqlookupdOptions, NsqadminOptions]),
        "docs/reference/utilities.md": reference_page(
            [TailOptions, ToFileOptions, ToHttpOptions, ToNsqOptions, to_nsq.ToNsqOptions, StatOptions]
        ),
        "docs/reference/protocol.md": protocol_page(),
        "docs/reference/http-permissions.md": http_permissions_page(),
        "docs/reference/admin.md": admin_page(),
        "contrib/nsqd.cfg.example": example_file(NsqdOptions),
        "contrib/nsqlookupd.cfg.example": example_file(NsqlookupdOptions),
        "contrib/nsqadmin.cfg.example": example_file(NsqadminOptions),
    }


_FLINTMQ_COMMANDS = """\
## Reading stored batches: OFFSETS, FETCH, CURSOR

These three are FlintMQ's own. They need no subscription, touch no message in flight, and may be mixed with
publishing on one connection. Integers are big-endian and unsigned.

**OFFSETS** answers JSON: `{"topic": "t", "partitions": [{"partition": 0, "log_id": "18e9b176265a2366",
"epoch": 0, "start": 1, "end": 13, "start_timestamp": 0, "end_timestamp": 0, "max_timestamp": 0,
"size_bytes": 719}]}`. `start` is the first stored sequence, `end` is one past the last that is durable and never
goes back. `log_id` names this log: a topic that is deleted and made again has another one. Timestamps are
nanoseconds, 0 when the log is empty: of the first message, of the last, and the latest of all, which is another
one's where a clock was set back. With a timestamp in the command each row has `at`, the first sequence with that
timestamp or a later one.

On a node of a cluster `epoch` is that of the leader, and the answer has `"elsewhere": [{"partition": 1, "log_id":
"18e9b176265a2367", "epoch": 4, "nsqd": "10.0.0.7:4150"}]`: the partitions of the topic that cannot be read here,
and who leads them; `nsqd` is empty when nobody does, or the node asked is not ready. `log_id` is the same on
every node.

**FETCH** answers `[8 next][batches]`: whole batches as they are stored, layout in `src/flintmq/batch.py`,
that overlap `start` to `end` (exclusive), about `bytes_max` bytes of them and at most 4 MiB, at least one if
there is any. The first and the last may reach beyond the range. Ask again from `next` until it is `end`;
sequences may be missing where damage was set aside. Outside of what is stored: `E_OFFSET_OUT_OF_RANGE
start=<n> end=<n>`. `epoch` is what OFFSETS said; when the log has another leader by then, or the same again,
`E_STALE_EPOCH`. With 2^31 added to `bytes_max` nsqd need not verify the batches; whoever does so verifies each CRC,
and asks without it when one is wrong.

**CURSOR** answers `{"sequence": <n>}`, the sequence below which the channel has confirmed everything. A
channel that does not exist is created at `sequence` (-1: the present end, -2: the first stored message); for
one that exists everything below `sequence` is confirmed, except what consumers hold now. It never goes back,
so repeating it is harmless.
"""


def protocol_page() -> str:
    """The commands and error codes of the TCP protocol, from their tables."""
    lines = [
        "# The TCP protocol",
        "",
        "NSQ's protocol V2, with commands added (column `from`). Generated from `src/flintmq/wire/commands.py` and",
        "`src/flintmq/wire/codes.py`.",
        "",
        "## Commands",
        "",
        "| command | form | answer | legal in | from | what it does |",
        "|---|---|---|---|---|---|",
    ]
    for command in COMMANDS.values():
        form = command.form.replace("|", "\\|")
        states = ", ".join(command.states)
        lines.append(
            f"| {command.name} | `{form}` | {command.reply or 'none'} | {states} | {command.origin} | {command.about} |"
        )
    lines += ["", _FLINTMQ_COMMANDS]
    lines += [
        "## Error codes",
        "",
        "| code | closes the connection | what a client does | from | when |",
        "|---|---|---|---|---|",
    ]
    for code in CODES.values():
        action = code.action.replace("_", " ")
        unknown = "; the message may have been stored" if code.unknown_outcome else ""
        lines.append(
            f"| {code.name} | {'yes' if code.fatal else 'no'} | {action}{unknown} | {code.origin} | {code.about} |"
        )
    return "\n".join(lines) + "\n"


def http_permissions_page() -> str:
    """What each HTTP request of the daemons asks for, from their tables."""
    lines = [
        "# Permissions of the HTTP APIs",
        "",
        "With `--http-auth-tokens-file`; see [http-auth.md](../http-auth.md). Every request is listed. Generated from",
        "the routes in `src/flintmq/nsqd/api` and `src/flintmq/nsqlookupd/http_permissions.py`.",
        "",
        *(f"- `{name}`: {about}" for name, about in PERMISSIONS.items()),
        "",
        *permissions_table("nsqd", NSQD_TABLE),
        "",
        *permissions_table("nsqlookupd", NSQLOOKUPD_TABLE),
        "",
        *permissions_table("nsqlookupd of a cluster", CLUSTER_TABLE),
        "",
        *permissions_table("nsqlookupd that keeps the coordination store", STORE_TABLE),
        "",
        *permissions_table("both, below `/debug`", debug_table()),
    ]
    return "\n".join(lines) + "\n"


def debug_table() -> Table:
    """What the requests below ``/debug`` ask for; they have no rows of their own."""
    router = Router()
    DebugApi(Env(), Networks(()), str).add_routes(router)
    return {(method, path): ADMIN_OF_ALL for method, path, _ in router.routes()}


def admin_page() -> str:
    """The methods of the admin clients, from their descriptions."""
    lines = [
        "# Methods of NsqdAdmin and LookupdAdmin",
        "",
        "What they are for is in [admin.md](../admin.md). Generated from `src/flintmq/client/admin/nsqd.py` and",
        "`src/flintmq/client/admin/nsqlookupd.py`. In `flintmq.sync` they are the same without `await`; each is a verb",
        "of `flintmq admin`, with `-` for `_`.",
    ]
    for kind in (NsqdAdmin, LookupdAdmin):
        lines += ["", f"## {kind.__name__}"]
        for name, method in admin.methods(kind).items():
            lines += ["", f"### {name}", "", f"`{_signature(name, method)}`", "", *_description(method)]
    return "\n".join(lines) + "\n"


def _signature(name: str, method: Callable[..., Any]) -> str:
    signature = inspect.signature(method)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    returned = str(signature.return_annotation).removeprefix("Question[").removesuffix("]")
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    unquoted = re.sub(r": '([^']+)'", r": \1", re.sub(r': "([^"]+)"', r": \1", shown))  # annotations are text
    return f"{name}{unquoted} -> {returned}"


def _description(method: Callable[..., Any]) -> list[str]:
    """A docstring as Markdown: paragraphs, and a list of the arguments."""
    lines: list[str] = []
    for line in (inspect.getdoc(method) or "").replace(":meth:", "").replace("``", "`").splitlines():
        if line in ("Args:", "Raises:"):
            continue
        text = line.removeprefix("    ")
        if line.startswith("    ") and not text.startswith(" "):
            named, _, about = text.partition(":")
            text = f"- **{named}**:{about}"
        elif line.startswith("    "):
            text = f"  {text.strip()}"
        lines.append(text)
    return lines


def main() -> None:
    """Write every generated file."""
    for name, text in generated().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
