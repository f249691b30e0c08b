"""The update rules on the cores of the host: csrc/, by ctypes. The bits of kernels/reference.py with an IEEE root, in
one pass over memory, whatever the instruction set.
"""

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from overspill.cgroups import cores
from overspill.kernels.codecs import blocks_of
from overspill.kernels.elements import Elements
from overspill.kernels.numbers import NUMBERS
from overspill.kernels.reference import Hypers
from overspill.native import library

log = logging.getLogger("overspill")

SETS = ("portable", "avx2", "avx512")
"""Instruction sets, from the one that every machine has to the widest."""
FORMATS = {"exact": torch.float32, "bf16": torch.bfloat16, "compact": torch.uint8}
"""What fields are kept as."""
FORCE = "OVERSPILL_CPU"
"""The environment variable that forces one of them."""
_F, _I = ctypes.c_float, ctypes.c_int32


class _Elements(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("fields", ctypes.c_void_p * 3),
        ("tops", ctypes.c_void_p * 3),
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("key", ctypes.c_uint32),
        ("format", _I),
        ("narrow_kept", _I),
        ("narrow_gradient", _I),
        ("factors", _I),
        ("factor", _F * 2),
        ("maximize", _I),
    ]


def _structure(floats: str, flags: str) -> type[ctypes.Structure]:
    """Of the numbers that a rule takes, by their names in csrc/native.h."""
    fields = [*((name, _F) for name in floats.split()), *((name, _I) for name in flags.split())]
    return type("Numbers", (ctypes.Structure,), {"_fields_": fields})


_STRUCTURES = {
    "adam": _structure("shrink decay lerp less beta2 rest2 size root eps", "decay_kind near amsgrad"),
    "sgd": _structure("decay momentum fresh less_lr", "decays has_momentum begin nesterov"),
    "adagrad": _structure("decay less_lr eps", "decays"),
}


def sets() -> tuple[str, ...]:
    """Instruction sets that can run here; none without the library."""
    found = library()
    return () if found is None else tuple(name for i, name in enumerate(SETS) if found.overspill_has(i))


def chosen_set() -> str | None:
    """The widest one, or the one that is forced; None: there is no library."""
    there, forced = sets(), os.environ.get(FORCE)
    if not there or not forced:
        return there[-1] if there else None
    if forced not in there:
        log.warning("expected %s as one of %s, found %r: %s is used", FORCE, ", ".join(there), forced, there[-1])
        return there[-1]
    return forced


def takes(on: Elements) -> bool:
    """Whether the library works on arrays of these kinds."""
    if on.kept is None:
        own = on.weight.dtype == torch.float32
    else:
        kept = torch.int8 if on.format == "compact" else torch.int16
        own = on.weight.dtype == torch.bfloat16 and on.kept.dtype == kept
    return own and on.gradient.dtype in (torch.float32, torch.bfloat16)


def _update(rule: str, on: Elements, h: Hypers, step: int, how: "How") -> None:
    told = NUMBERS[rule](h, step, on.fields)
    how.run(rule, on, _STRUCTURES[rule](*told.scalars, *told.flags), bool(h["maximize"]))


RULES = {name: functools.partial(_update, name) for name in NUMBERS}


@dataclass(frozen=True, slots=True)
class How:
    """With which instructions, and on how many threads."""

    instructions: str
    threads: int

    @staticmethod
    def best() -> "How | None":
        """This process's share of the cores; None: there is no library."""
        name = chosen_set()
        if name is None:
            return None
        return How(name, max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def run(self, rule: str, on: Elements, numbers: ctypes.Structure, maximize: bool) -> None:
        found = library()
        assert found is not None, "there is no library"
        arrays = [on.weight, on.gradient, *on.fields, *(() if on.kept is None else (on.kept,))]
        assert takes(on), f"no kernel for {[a.dtype for a in arrays]}"
        assert all(a.is_contiguous() and a.is_cpu and a.numel() == on.weight.numel() for a in arrays), "not flat"
        assert all(f.dtype == FORMATS[on.format] for f in on.fields) and len(on.factors) <= 2, "not what a rule keeps"
        assert all(t.numel() == blocks_of(on.weight.numel()) and t.is_contiguous() for t in on.tops), "not their blocks"
        elements = _Elements(
            on.weight.data_ptr(),
            None if on.kept is None else on.kept.data_ptr(),
            on.gradient.data_ptr(),
            (ctypes.c_void_p * 3)(*(f.data_ptr() for f in on.fields)),
            (ctypes.c_void_p * 3)(*(t.data_ptr() for t in on.tops)),
            on.weight.numel(),
            on.first,
            on.key,
            [*FORMATS].index(on.format),
            on.kept is not None and on.kept.dtype == torch.int8,
            on.gradient.dtype == torch.bfloat16,
            len(on.factors),
            (_F * 2)(*map(float, on.factors)),
            maximize,
        )
        call: Any = getattr(found, f"overspill_run_{rule}")
        call(ctypes.byref(elements), ctypes.byref(numbers), SETS.index(self.instructions), self.threads)
