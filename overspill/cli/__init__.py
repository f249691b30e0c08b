"""The command line: `overspill train`.

Thin: parses options, calls the API, shows progress. One file per command, and what commands share: `workload` (what
is trained), `meters` (what it takes), `screen` (how it is shown).
May import: api (through the package), report, and layer 0.
"""


def main() -> None:
    """Entry point of the `overspill` command."""
    # Here, because they import typer and rich: `import overspill.cli` itself stays light.
    from overspill.cli import app, train  # noqa: F401 - a command registers itself when it is imported

    raise SystemExit(app.run())
