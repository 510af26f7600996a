"""The first module that the process loads from which pools fork: Ctrl-C ends that without a word, while it loads more.

Python's own process ignores Ctrl-C once it has loaded all, and until then would say in a traceback what it was loading.
It begins with SIGINT blocked (`study.executors`), for it has loaded nothing yet. What it forks begins as it is here.
"""

import signal

# Where it is ignored, as in the background of a shell, it stays so.
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
