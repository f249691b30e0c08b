"""`overspill probe`: how fast link, memory, disk and GPU are. Measured once, then read from the user's cache folder."""

from pathlib import Path
from typing import Annotated

import typer

from overspill.bench import probing
from overspill.cli.app import app
from overspill.cli.options import folder
from overspill.errors import OptionError

Nvme = Annotated[Path | None, typer.Option(help="Folder whose disk is measured too.", parser=folder)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is in the cache.")]


@app.command()
def probe(nvme: Nvme = None, fresh: Fresh = False) -> None:
    """Measure link, host memory, disk, matrix products and updates of this machine, and keep what was found."""
    if nvme is not None and not nvme.is_dir():
        raise OptionError(f"expected --nvme to be a folder, found {str(nvme)!r}; make it, or give another one")
    found = probing.probe(nvme, fresh)
    typer.echo(probing.table(found.rates))
    if found.reason is not None:
        raise OptionError(
            f"expected all of it, found that something is missing: {found.reason}; mend that, and try again"
        )
    typer.echo(f"measured {found.date}, {'read from' if found.cached else 'kept in'} {probing.kept_in()}")
