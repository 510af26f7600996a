"""Claims: the verdict follows from checks; one table of all studies that state any, of which no word is by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from spawnsim.cli import serve
from spawnsim.study import Context
from spawnsim.study.claims import FAILS, HOLDS, IN_PART, claiming, read, table, verdict

ROOT = Path(__file__).parents[2]
STUDY = '''
def study(context):
    """State a claim."""
    measured = 3 if context.quick else 4
    checks = {{"four": measured == 4, "number": {number}}}
    context.claim("Four is four", source="arXiv 1", checks=checks, found=f"{{measured}}")
'''


def test_the_verdict_follows_from_the_checks() -> None:
    """All, some, none."""
    assert verdict({"a": True, "b": True}) == HOLDS
    assert verdict({"a": True, "b": False}) == IN_PART
    assert verdict({"a": False}) == FAILS
    with pytest.raises(ValueError, match="at least one check"):
        verdict({})


def test_one_command_makes_the_table_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the study, and in docs/ of a checkout unless the version was a small one."""
    home, docs = tmp_path / "studies", tmp_path / "docs"
    home.mkdir()
    docs.mkdir()
    (docs / "claims.md").write_text("old")
    (home / "b_part.py").write_text(STUDY.format(number="False"))
    (home / "a_whole.py").write_text(STUDY.format(number="True"))
    (home / "other.py").write_text("def study(context):\n    raise AssertionError('states nothing')\n")
    (home / "claims.py").write_text((ROOT / "studies" / "claims.py").read_text())
    monkeypatch.chdir(tmp_path)
    assert serve("study", ["claims", "--quick", "--jobs", "0", "--out", "quick"]) == 0
    assert (docs / "claims.md").read_text() == "old"
    assert [claim.verdict for claim in read(tmp_path / "quick" / "a_whole")] == [IN_PART]
    assert serve("study", ["claims", "--jobs", "0", "--out", "full"]) == 0
    page = (docs / "claims.md").read_text()
    assert page == (tmp_path / "full" / "claims.md").read_text()
    assert [line.split("|")[3:6] for line in page.splitlines() if "Four" in line] == [
        [" **holds** ", " 4 ", " `a_whole` "],
        [" **holds in part** ", " 4 (not: number) ", " `b_part` "],
    ]


def test_a_claim_is_stated_once(tmp_path: Path) -> None:
    """A second run of a study replaces what the first has found."""
    context = Context("some", tmp_path, tmp_path / "out")
    for held in (True, False):
        assert context.claim("It is so", source="x", checks={"a": held}, found="1") == (
            HOLDS if held else FAILS
        )
    assert [claim.verdict for claim in read(tmp_path / "out")] == [FAILS]


def test_the_page_in_docs_is_that_of_the_studies_here() -> None:
    """Each row is of a study that states claims; the head is the generator's."""
    page = (ROOT / "docs" / "claims.md").read_text()
    assert page.startswith(table([]).rstrip("\n"))
    rows = [line for line in page.splitlines()[8:] if line]
    assert rows
    assert {row.split("|")[5].strip(" `") for row in rows} <= {
        path.stem for path in claiming(ROOT / "studies")
    }
    assert {row.split("|")[3].strip(" *") for row in rows} <= {HOLDS, IN_PART, FAILS}
