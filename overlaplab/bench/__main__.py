"""`python -m overlaplab.bench`."""

import sys

from overlaplab.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
