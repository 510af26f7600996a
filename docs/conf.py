"""The documentation site, built by `make docs` into build/site. Neither building nor reading it needs a network."""

import contextlib
import io
import os
import re
import sys

from docutils import nodes
from docutils.parsers.rst import Directive

import spawnsim
from spawnsim import cli
from spawnsim.policies import SpawnPolicy

project = "spawnsim"
version = release = spawnsim.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"  # the system's fonts, and scripts of its own
html_title = "spawnsim"
html_static_path, html_css_files = ["style"], ["site.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False
myst_heading_anchors = 4  # page.md#a-heading is a link that is checked

# The notebook is run in each build, by notebook.py beside this file.
sys.path.insert(0, os.path.dirname(__file__))
nb_custom_formats = {".ipynb": "notebook.read"}
nb_execution_mode = "off"

default_role = "code"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # names of constants, as a program writes them, and not their numbers
toc_object_entries_show_parents = "hide"


def as_restructured_text(app, what, name, obj, options, lines):
    """Turn the Markdown of a docstring, in place, into what Sphinx reads: code, tables, names."""
    if what == "module":  # what comes after its first line is for who changes it
        del lines[1:]
    if what in ("property", "attribute"):  # napoleon takes what stands before a colon for a type
        lines[:1] = [line.replace(": ", " – ", 1) for line in lines[:1]]
    text, code = [], False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith("```"):
            code = not code
            text += ["", f"{indent}::", ""] if code else [""]
        elif code:
            text.append(f"    {line}")
        elif line.lstrip().startswith("|"):
            text += [
                *([] if text and text[-1].startswith(f"{indent}    |") else ["", f"{indent}::", ""]),
                f"    {line}",
            ]
        else:
            quoted = re.split(r"(`+[^`]+`+)", line)
            plain = [part if part.startswith("`") else part.replace("|", r"\|") for part in quoted]
            if text and text[-1].lstrip().startswith("|") and line.strip():
                text.append("")
            text.append(re.sub(r"(?<=`)(?=s\b)", r"\\ ", "".join(plain)))
    lines[:] = text


def documented_once(app, what, name, obj, skip, options):
    """Leave out the methods by which a policy does what `SpawnPolicy` says of all."""
    owner = getattr(obj, "__qualname__", "").rpartition(".")[0]
    inherited = owner.endswith("Policy") and owner != "SpawnPolicy" and name in vars(SpawnPolicy)
    return True if inherited else None


class Commands(Directive):
    """`{commands}`: what `--help` prints of spawnsim and each of its commands."""

    def run(self):
        """Return a section for each command."""
        os.environ["COLUMNS"] = "100"
        found = []
        for command in cli.COMMANDS:
            section = nodes.section("", nodes.title(text=command), ids=[command], names=[command])
            section += nodes.literal_block(text=_help(command, "--help"), language="text")
            found.append(section)
        return [nodes.literal_block(text=_help("--help"), language="text"), *found]


def _help(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(words)
    return out.getvalue()


def setup(app):
    """Connect the above; docstrings are turned before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)
    app.connect("autodoc-skip-member", documented_once)
    app.add_directive("commands", Commands)
