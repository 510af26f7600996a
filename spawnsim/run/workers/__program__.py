"""A program's file under the name that it has in a run, for processes that it starts by `multiprocessing`.

What they are given was pickled there, and names `__program__`. This folder is on the path of modules that they inherit.
"""

import os

__file__ = os.environ["SPAWNSIM_PROGRAM"]
with open(__file__, "rb") as source:
    exec(compile(source.read(), __file__, "exec"))  # in this module's own variables, as an import does
