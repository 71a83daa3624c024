"""``python -m podgraph``."""

from podgraph.cli import main

main(prog_name="podgraph")
