"""All published claims that studies check: runs each study that states one, and writes the table of docs/claims.md.

    spawnsim study claims [--quick]

In a checkout the full version replaces docs/claims.md; the study's folder always gets the table as `claims.md`.
"""

from dataclasses import replace

from spawnsim.cli.sweep import load
from spawnsim.study import Context
from spawnsim.study.claims import claiming, read, table


def study(context: Context) -> None:
    """Run the other studies in this folder that call `context.claim`, each in a separate output folder."""
    found = []
    for path in claiming(context.home):
        part = replace(context, name=path.stem, out=context.out / path.stem)
        load(path)(part)
        found += read(part.out)
    context.out.mkdir(parents=True, exist_ok=True)
    page = context.out / "claims.md"
    page.write_text(table(found), encoding="utf-8")
    context.say(f"table: {page}")
    published = context.home.parent / "docs" / "claims.md"
    if published.exists() and not context.quick:
        published.write_text(table(found), encoding="utf-8")
        context.say(f"table: {published}")
