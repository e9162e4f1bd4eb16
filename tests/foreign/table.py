"""The table of docs/compatibility.md: what the tests declare of each client, so that it says what was seen.

``python -m tests.foreign.table`` writes it.
"""

from __future__ import annotations

from pathlib import Path

from tests.foreign import test_ansq, test_asyncnsq, test_gnsq, test_nsqjs, test_pynsq, upgrades
from tests.foreign.harness import Client

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
BEGIN = "<!-- written by python -m tests.foreign.table -->\n"
END = "<!-- end -->\n"
CLIENTS: list[Client] = [module.CLIENT for module in (test_pynsq, test_gnsq, test_ansq, test_asyncnsq, test_nsqjs)]

SCENARIOS = {
    "publish": "PUB, MPUB, DPUB",
    "publish-bodies": "bodies from 1 byte to `--max-msg-size`, every byte value; one too large is refused",
    "consume": "SUB, RDY, FIN; each message once",
    "consume-partitions": "the same of a topic with two partitions",
    "consume-bodies": "the bodies above, delivered",
    "requeue": "REQ with a delay",
    "touch": "TOUCH for 2.5 times the message timeout; a message not touched comes again",
    "drain": "stopping in the middle: nothing lost, nothing finished comes again",
    "idle": "heartbeats of 1 s while idle, as producer and consumer",
    "sample": "sample rate",
    "max-in-flight": "max in flight changed while it runs",
    "backoff": "backing off after a failure: RDY 0, then 1, then all",
    "discover": "one nsqlookupd, two nsqds",
    "discover-late": "an nsqd that gets the topic later",
    "discover-two": "two nsqlookupds, each knowing one nsqd",
    "discover-dead": "two nsqlookupds, one dead",
    "survive-consuming": "consumer, when nsqd is killed (-9) and comes back",
    "survive-publishing": "producer, the same",
}
PARTS = {
    "unverified": "TLS, not verified",
    "verified": "TLS, verified by the authority; another authority's server is refused",
    "require": "TLS with any certificate, `--tls-client-auth-policy=require`",
    "require-verify": "TLS with a good certificate, `require-verify`",
    "deflate": "deflate",
    "snappy": "snappy",
    "auth": "AUTH",
}


class Notes:
    """Numbers reasons in the order in which the table names them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, client: Client, reason: str) -> str:
        text = f"{client.word}: {reason}"
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    @property
    def lines(self) -> list[str]:
        return [f"{number}. {text}." for text, number in self._numbers.items()]


def cell(client: Client, name: str, notes: Notes) -> str:
    """What a client does in a case: yes, no by an error of its own, or a dash for what it does not have."""
    if name in client.absent:
        return f"– {notes.mark(client, client.absent[name])}"
    if name in client.defects:
        return f"**no** {notes.mark(client, client.defects[name].reason)}"
    return "yes"


def part_cell(client: Client, part: str, notes: Notes) -> str:
    """The same for a part of an upgrade, which may work in one role only."""
    if part in client.absent:
        return cell(client, part, notes)
    cells = {role: cell(client, f"{role}-{part}", notes) for role in upgrades.ROLES}
    if len(set(cells.values())) == 1:
        return cells["publish"]
    return ", ".join(f"{role}: {text}" for role, text in cells.items())


def large_cell(client: Client, notes: Notes) -> str:
    """Large messages over TLS, with and without compression."""
    names = {upgrade.name: upgrade.role for upgrade in upgrades.combinations() if upgrade.is_large}
    failing = [client.defects[name].reason for name in names if name in client.defects]
    if failing:
        return f"**no** {notes.mark(client, failing[0])}"
    roles = {names[name] for name in run_by(client) if name in names}
    return "yes" if roles == set(upgrades.ROLES) else "".join(f"{role}: yes" for role in sorted(roles)) or "–"


def run_by(client: Client) -> set[str]:
    """The cases of upgrades that a client must pass."""
    return {case.name for case in upgrades.cases(client)} - set(client.absent) - set(client.defects)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table and its notes as Markdown."""
    notes = Notes()
    lines = [row("", *(client.name for client in CLIENTS)), row(*["---"] * (len(CLIENTS) + 1))]
    for name, title in SCENARIOS.items():
        lines.append(row(title, *(cell(client, name, notes) for client in CLIENTS)))
    for part, title in PARTS.items():
        lines.append(row(title, *(part_cell(client, part, notes) for client in CLIENTS)))
    lines.append(row("messages of 200 kB over TLS", *(large_cell(client, notes) for client in CLIENTS)))
    counts = [len(run_by(client) & {upgrade.name for upgrade in upgrades.combinations()}) for client in CLIENTS]
    lines.append(row("combinations of the above that pass", *map(str, counts)))
    lines += ["", *notes.lines, "", "Also of note, and not in the table:", ""]
    lines += [f"- {client.word}: {'; '.join(client.notes)}." for client in CLIENTS]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table as it must be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
