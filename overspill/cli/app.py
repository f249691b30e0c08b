"""The program that commands are registered with, and how an error leaves it."""

import sys

import typer

from overspill.errors import OverspillError

app = typer.Typer(
    name="overspill",
    help="Trains PyTorch models that do not fit in GPU memory, exactly as plain PyTorch would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def overspill() -> None:
    """Without a callback typer would make the only command the whole program."""


def run() -> int:
    """Run the command line. An error that the user can do something about is a paragraph, not a traceback."""
    try:
        app()
    except OverspillError as error:
        print(f"overspill: {error}", file=sys.stderr)
        return 2
    return 0
