"""The command line: `overspill train`, `plan`, `bench`, `probe`.

Thin: parses options, calls the API, shows progress. One file per command (`train`, `plan`, `bench`, `probe`;
`app` holds them), and what they share: `options` and `settings` (what is said), `loop` (how a step goes), `meters`
(what it takes), `recording` (what the log says of it), `screen` (how it is shown), `ranks` (the processes of a run),
`wording` (keywords of the library, said as options).
A run without --model: `built_in`, `workload`, `verify`. With --model: `documents` -> `data`, `text_model`,
`fine_tune` and its `session`, `checkpoints`, `randomness`, `signals`. For `plan`: `sizes`. For `bench` and
`probe`: the folder overspill/bench.
May import: api (through the package), report, bench, and layer 0.
"""

from overspill.interrupts import ending_at_once


def main() -> None:
    """Entry point of the `overspill` command."""
    with ending_at_once():
        # Here, because they import typer and rich: `import overspill.cli` itself stays light.
        from overspill.cli import app, bench, plan, probe, train  # noqa: F401 - importing a command registers it

    raise SystemExit(app.run())
