"""`python -m spawnsim` is the command line."""

from spawnsim.cli import entry

if __name__ == "__main__":
    entry()
