"""The blocks of a page of documentation, and how a test runs them.

What stands behind the language of a block says what a test does with it; readers do not see it:

    ```sh                                         run as it stands
    ```sh in small: --ranks 256 → --ranks 8       run with these texts replaced, or left out; "; " between several
    ```sh exit 121                                ends with this status; may follow the above, after " | "
    ```sh not run: needs a cluster                its `spawnsim` commands are read, for options that do not exist

* `python`: run after those before it, in one namespace a page; one that begins with `# NAME.py` is that file.
* `toml`, `sh` with such a first line: likewise a file.
* `sh`: commands of spawnsim, pytest and `python FILE`, in the folder of the page's files. `# ...` is a comment.
* `text`, directly after a block that was run as it stands: lines of what it printed, in this order; `…` is anything.
"""

from __future__ import annotations

import io
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spawnsim import cli

_FENCE = re.compile(r"^( *)(```+)([a-z0-9]+)?[ \t]*([^\n]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|toml|sh|csv))\b.*\n")


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, line, language, what stands behind that, and its text."""

    page: str
    line: int
    language: str
    note: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if its first line says so."""
        named = _FILE.match(self.text)
        return named[1] if named else None

    @property
    def not_run(self) -> str | None:
        """Why the block is not run."""
        return self._after("not run: ")

    @property
    def small(self) -> str:
        text = self.text
        for change in filter(None, (self._after("in small: ") or "").split("; ")):
            old, arrow, new = (part.strip() for part in change.partition("→"))
            assert arrow, f"{self}: write OLD → NEW, not {change!r}"
            assert old in text, f"{self}: {old!r} is not in the block"
            text = text.replace(old, new)
        return text

    @property
    def exit_status(self) -> int:
        return int(self._after("exit ") or 0)

    def _after(self, word: str) -> str | None:
        notes = [each.removeprefix(word) for each in self.note.split(" | ") if each.startswith(word)]
        return notes[0] if notes else None

    def commands(self, text: str | None = None) -> list[list[str]]:
        joined = (self.text if text is None else text).replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path, root: Path) -> list[Block]:
    """Return the blocks of a page in Markdown."""
    text, page = path.read_text(encoding="utf-8"), str(path.relative_to(root))
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[3] or "",
            found[4].strip(),
            re.sub(rf"^{found[1]}", "", found[5], flags=re.MULTILINE),
        )
        for found in _FENCE.finditer(text)
    ]


def run_page(page: list[Block], folder: Path) -> None:
    """Run the blocks of a page in order, in one folder and one namespace."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed: str | None = None
    for block in page:
        if block.language == "text":
            if printed is not None:
                check_printed(block, printed)
            printed = None
        elif block.language in ("python", "sh", "toml"):
            out = _run(block, namespace, folder) if block.not_run is None else None
            printed = None if block.note.startswith("in small") else out


def check_printed(block: Block, printed: str) -> None:
    """Assert that the lines of a block were printed in this order; `…` stands for anything."""
    rest = iter(printed.splitlines())
    for line in filter(str.strip, block.text.splitlines()):
        wanted = re.compile(".*".join(map(re.escape, line.rstrip().split("…"))))
        assert any(wanted.fullmatch(each.rstrip()) for each in rest), (
            f"{block}: not printed: {line}\n{printed}"
        )


def _run(block: Block, namespace: dict[str, Any], folder: Path) -> str:
    text, out = block.small, io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(out):
        if block.file is not None:
            Path(block.file).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * block.line + text, block.page, "exec", dont_inherit=True), namespace)
        elif block.language == "sh":
            commands = block.commands(text)
            done = [_command(words) for words in commands]
            wanted = [0] * (len(commands) - 1) + [block.exit_status]
            assert done == wanted, f"{block}: exit status {done}\n{out.getvalue()}"
    return out.getvalue()


def _command(words: list[str]) -> int:
    if words[0] == "spawnsim":
        return cli.main(words[1:])
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return 0
    assert words[0] == "pytest", f"{words}: no command that a page's test knows; declare it as not run"
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    return done.returncode
