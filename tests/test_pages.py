"""What stands in blocks on the documentation's pages is run, or says why not; support/pages.py has the rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.pages import Block, blocks, run_page

from spawnsim import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(path.relative_to(ROOT)): blocks(path, ROOT)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
ALL = [block for page in PAGES.values() for block in page]

_TRAIN = next(block for block in PAGES["docs/tutorial/simulate.md"] if block.file == "train.py")

# Pages that are read for syntax and options alone.
READ_ALONE = {
    "README.md": "tests/test_readme.py runs it",
    "docs/policies.md": "parts of programs; tests/policies has whole ones",
}


@pytest.mark.parametrize("page", [name for name, each in PAGES.items() if each and name not in READ_ALONE])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    """In order, in one folder that has the tutorial's train.py, and print what stands below them."""
    run_page([_TRAIN, *PAGES[page]], tmp_path)


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=str)
def test_a_python_block_is_python(block: Block) -> None:
    """Also one that is not run."""
    ast.parse(block.text)


def test_commands_have_no_options_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Those in blocks and those within sentences, on every page."""
    text = {path: (ROOT / path).read_text(encoding="utf-8").replace("\\\n", " ") for path in PAGES}
    found = {
        (path, line, name, option)
        for path, page in text.items()
        for line, name, rest in re.findall(r"(\bspawnsim ([a-z]+)\b([^\n`]*))", page)
        if name in cli.COMMANDS
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", re.split(r" -- |#|\|| mpiexec", rest)[0])
    }
    assert len(found) > 50  # the pattern finds some
    assert [each for each in sorted(found) if each[3] not in _options(each[2], capsys)] == []


_KNOWN: dict[str, set[str]] = {}


def _options(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    if command not in _KNOWN:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        _KNOWN[command] = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    more = _options("run", capsys) if command == "resume" else set()  # what it hands on
    return _KNOWN[command] | more
