"""A program's file under the name that it has in a run, for processes that it starts by `multiprocessing`.

Their arguments were pickled under that name, and refer to `__program__`. These processes inherit a module path that
includes this folder.
"""

import os

__file__ = os.environ["SPAWNSIM_PROGRAM"]
with open(__file__, "rb") as source:
    exec(compile(source.read(), __file__, "exec"))  # in this module's own variables, as an import does
