"""`python benchmarks PROBE`, implemented in command.py."""

import sys

from command import main

if __name__ == "__main__":
    sys.exit(main())
