"""The program that commands are registered with, and how an error leaves it."""

import importlib.util
import os
import sys

import typer

from overspill.cli.ranks import Elsewhere
from overspill.cli.wording import as_options, options_of
from overspill.errors import OptionError, OverspillError

app = typer.Typer(
    name="overspill",
    help="Trains PyTorch models that do not fit in GPU memory, exactly as plain PyTorch would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def overspill() -> None:
    """Without a callback typer would make a command the whole program where only one is imported."""


def need(*packages: str) -> None:
    """Say what to install, before something else fails for the lack of it."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise OptionError(f"expected the package {name}, found none; install it: pip install {name}")


def run() -> int:
    """Run the command line. An error that the user can do something about is a paragraph, not a traceback."""
    try:
        app()
    except Elsewhere:
        return 2
    except OverspillError as error:
        rank, told = os.environ.get("RANK", "0"), as_options(str(error), options_of(app, sys.argv[1:]))
        print(f"overspill{f', rank {rank}' if rank != '0' else ''}: {told}", file=sys.stderr)
        return 2
    return 0
