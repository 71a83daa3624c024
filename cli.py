"""``python cli.py`` from a checkout: the same tool as ``podgraph``."""

from podgraph.cli import main

main(prog_name="podgraph")
