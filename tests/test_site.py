"""The documentation site, built as `make docs` does: without a warning, and without a need for a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. Links and headings are checked, docstrings are read, and the notebook is run."""
    out = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [*line, "-d", str(out / "read"), str(ROOT / "docs"), str(out / "html")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "html"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """Each page under docs/ was built, and the home page leads to it."""
    home = (site / "index.html").read_text(encoding="utf-8")
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    names = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in sources}
    assert len(names) > 25
    assert {name for name in names - {"index.html"} if f'href="{name}"' not in home} == set()


def test_no_page_asks_for_anything_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own; links that a reader may follow are not meant."""
    asks = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>|<link[^>]*href="(?:https?:)?//[^>]*>"""
    )
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {path.name: found for path, text in pages.items() if (found := asks.findall(text))} == {}
    styles = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    assert [
        path.name for path, text in styles.items() if re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", text)
    ] == []


def test_the_search_knows_pages_and_docstrings(site: Path) -> None:
    """Its index has words of a page, and names of the reference."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("straggler", "howto/coming-from", "AverageAllPolicy"))


def test_defaults_are_shown_by_name(site: Path) -> None:
    """As a program would write them: neither numbers of constants nor addresses of objects."""
    page = re.sub("<[^>]+>", "", (site / "reference" / "comm.html").read_text(encoding="utf-8"))
    found = set(re.findall(r"\w+: \w+ = [A-Z_]+", page))
    assert {"source: int = ANY_SOURCE", "op: Op = SUM", "lock_type: int = LOCK_EXCLUSIVE"} <= found
    assert "object at 0x" not in page


def test_the_notebook_shows_what_it_came_to(site: Path) -> None:
    """Figures, a table and the deadlock's report, in the page; no output is kept in the repository."""
    page = (site / "tutorial.html").read_text(encoding="utf-8")
    assert page.count("<img") >= 2
    assert "<table" in page
    assert "rank 0 waits for rank 3, whose program has ended" in page
    assert '"outputs": []' in (ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8")
    assert '"output_type"' not in (ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8")


def test_pictures_are_small() -> None:
    """All together under 1.5 MB: every clone has them."""
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()) < 1_500_000
