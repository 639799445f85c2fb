"""`python -m overlaplab` is the command `overlaplab`."""

from overlaplab.cli import main

main(prog_name="overlaplab")
