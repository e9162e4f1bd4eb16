"""Runs scenario scripts, and with ``--rewrite`` writes down what they do now, to be reviewed as a diff.

A script is a text of blocks::

    # why, and which rule of NSQ it shows
    publish a b
    consume alice rdy=2
    ----
    alice: 1 a, 2 b
                                <- an empty line ends what is expected

Each script has a broker of its own, with a disk in memory and a clock that only the script moves. What the commands
mean is in ``README.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.scripts.commands import Script, ScriptError

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*/*.txt"))
RULE = "----"
NOTHING = "(nothing)"


@dataclass
class Block:
    """Some commands and what is to be seen of them; or, at the end of a script, only remarks.

    Attributes:
        first_line: number of its first line.
        head: comments, empty lines and commands.
        expected: what stands below the rule.
    """

    first_line: int
    head: list[str] = field(default_factory=list)
    expected: list[str] | None = None

    def commands(self) -> Iterator[tuple[int, str]]:
        """Its commands, with the numbers of their lines."""
        for number, line in enumerate(self.head, self.first_line):
            if line.strip() and not line.startswith("#"):
                yield number, line

    def text(self, output: list[str]) -> str:
        if not any(self.commands()):
            return "\n".join(self.head)
        return "\n".join([*self.head, RULE, *output])


def parse(text: str) -> list[Block]:
    """Cut a script into its blocks."""
    blocks = [Block(1)]
    for number, line in enumerate(text.splitlines(), 1):
        block = blocks[-1]
        if block.expected is None:
            if line == RULE:
                block.expected = []
            else:
                block.head.append(line)
        elif line:
            block.expected.append(line)
        else:
            blocks.append(Block(number + 1))
    return [block for block in blocks if any(line.strip() for line in block.head)]


def run(block: Block, script: Script) -> list[str]:
    """Do a block's commands; return what there was to see."""
    output: list[str] = []
    for number, line in block.commands():
        try:
            output += script.run(line)
        except (ScriptError, TypeError, KeyError, ValueError) as error:
            raise ScriptError(f"line {number}: {line}: {error!r}") from error
    return output or [NOTHING]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_script(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    blocks = parse(text)
    script = Script()
    seen = [run(block, script) for block in blocks]
    if request.config.getoption("--rewrite", default=False):
        new = "\n\n".join(block.text(output) for block, output in zip(blocks, seen, strict=True)) + "\n"
        if new != text:
            path.write_text(new, encoding="utf-8")
        return
    for block, output in zip(blocks, seen, strict=True):
        if any(block.commands()):
            where = f"{path.relative_to(HERE)}:{block.first_line}"
            shown = "\n".join(block.head).strip()
            assert output == block.expected, f"{where}\n{shown}\n{RULE}\n(--rewrite writes down what is seen now)"


def test_there_are_scripts_of_every_area() -> None:
    assert {path.parent.name for path in SCRIPTS} == {"channel", "ordered", "rdy"}


def test_a_line_that_is_no_command_is_told_with_its_place() -> None:
    (block,) = parse("topic\n\nfly away\n----\n")
    with pytest.raises(ScriptError, match=r"line 3: fly away: .*no command 'fly'"):
        run(block, Script())


def test_what_differs_is_found_and_rewritten_to_what_is_seen() -> None:
    text = "# why\ntopic\nchannel c\npublish a\nconsume x rdy=1\n----\nx: 1 b\n\nrdy x 0\n----\n(nothing)\n"
    blocks, script = parse(text), Script()
    seen = [run(block, script) for block in blocks]
    assert [block.expected for block in blocks] == [["x: 1 b"], ["(nothing)"]]
    assert seen == [["x: 1 a"], ["(nothing)"]]
    rewritten = "\n\n".join(block.text(output) for block, output in zip(blocks, seen, strict=True)) + "\n"
    assert rewritten == text.replace("1 b", "1 a")


def test_every_command_is_in_the_readme() -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    commands = [name[3:].replace("_", "-") for name in dir(Script) if name.startswith("do_")]
    assert [name for name in commands if f"`{name}" not in readme] == []
