"""The command line: `overspill train`.

Thin: parses options, calls the API, shows progress. One file per command.
May import: api (through the package), report, and layer 0.
"""


def main() -> None:
    """Entry point of the `overspill` command."""
    raise SystemExit("no commands yet")
