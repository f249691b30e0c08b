"""What a user sees while benchmarks run: a live line on a terminal, a line per phase elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Told = Callable[[str], None]


@contextlib.contextmanager
def working(name: str, count: str = "") -> Iterator[Told]:
    """Shows what the job of this name is doing, as the yielded function hears it; `count` says which of how many."""
    begin = time.monotonic()
    title = f"[{count}] {name}" if count else name
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console().status(escape(title)) as status:
            yield lambda text: status.update(escape(f"{title}: {text}, {time.monotonic() - begin:.0f} s"))
        return
    last = ""

    def told(text: str) -> None:
        """Of steps the last one is enough."""
        nonlocal last
        count, slash, total = text.rpartition(" ")[2].partition("/")
        if text != last and (not slash or count == total):
            print(f"{title}: {text}, {time.monotonic() - begin:.0f} s", flush=True)
        last = text

    print(f"{title}: starts", flush=True)
    yield told
