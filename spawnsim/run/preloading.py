"""The first module of the fork server of process pools: Ctrl-C ends the server silently while it loads more modules.

Python's fork server ignores Ctrl-C once it has loaded all modules; until then Ctrl-C would print a traceback of the
import. The server starts with SIGINT blocked (`study.executors`), since it has loaded nothing yet. Processes that it
forks inherit the handler set here.
"""

import signal

# If SIGINT is ignored, as in the background of a shell, it stays ignored.
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
