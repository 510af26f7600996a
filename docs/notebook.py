"""A notebook with what its cells come to: they are run one after another in an IPython shell of this process.

A kernel would be a second process, spoken to over ports, that imports torch anew.
"""

from base64 import b64encode

import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import select_figure_formats
from IPython.display import publish_display_data
from IPython.utils.capture import capture_output


class Published(DisplayHook):
    """Hands the value of a cell to whoever collects what is displayed; a terminal's prints it."""

    def write_output_prompt(self):
        """Print no `Out[1]:`."""

    def write_format_data(self, format_dict, md_dict=None):
        """Display the value in all its forms."""
        publish_display_data(format_dict, md_dict)


def read(text):
    """Return the notebook of a file's text, run; the first error of a cell is raised."""
    notebook = nbformat.reads(text, as_version=4)
    shell = InteractiveShell.instance(displayhook_class=Published)
    select_figure_formats(shell, {"png"})
    for number, cell in enumerate((each for each in notebook.cells if each.cell_type == "code"), 1):
        shell.compile.get_code_name = lambda *_, name=f"cell-{number}.py": name
        with capture_output() as said:
            shell.run_cell(cell.source, store_history=True).raise_error()
        cell.execution_count = number
        shown = [
            nbformat.v4.new_output("display_data", each.data, metadata=each.metadata) for each in said.outputs
        ]
        written = [nbformat.v4.new_output("stream", text=said.stdout)] if said.stdout else []
        cell.outputs = [*written, *map(_encoded, shown)]
    return notebook


def _encoded(output):
    # Pictures are kept as text, as a notebook's file has them.
    for kind, data in output.data.items():
        if isinstance(data, bytes):
            output.data[kind] = b64encode(data).decode()
    return output
