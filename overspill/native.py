"""The native library: csrc/, by ctypes.

Note [The library]: it is built when overspill is installed, and lies in the folder of kernels. Where there was no
compiler there is none, one line of each machine says so, and plain torch does what it would do.
"""

import ctypes
import functools
import logging
import os
from pathlib import Path

log = logging.getLogger("overspill")

LIBRARY = Path(__file__).with_name("kernels") / "liboverspill_native.so"
VERSION = 4
"""The version of the interface between csrc/ and this package."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library, loaded once; None where there is none. See Note [The library]."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
        version = found.overspill_version()
    except (OSError, AttributeError) as error:
        level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO
        cure = "install a compiler and overspill anew"
        log.log(
            level, "updates on the host run in plain torch, which is slower: no native library (%s); %s", error, cure
        )
        return None
    if version != VERSION:
        log.warning("expected version %d of %s, found %d: it is not used; install anew", VERSION, LIBRARY.name, version)
        return None
    return found
