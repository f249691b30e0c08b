"""`python -m overspill`: the same as the `overspill` command."""

from overspill.cli import main

main()
