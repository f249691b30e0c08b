"""The options of `prepare` and `plan`, checked before anything happens."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from overspill.errors import OptionError, UnknownOptionError
from overspill.specs import TierName

Size = Literal["auto"] | str | int | float
NvmeOption = None | str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str | PathLike[str], Size]

UNITS = {"": 1, "B": 1}
UNITS |= {f"{p}{end}": 1024**i for i, p in enumerate("KMGT", 1) for end in ("", "iB")}
UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
LEAST_WITHOUT_UNIT = 1024**2
"""Bytes below which a text without a unit is taken for one whose unit was forgotten."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What weights are held in, by precision."""
FORMATS = ("exact", "bf16", "compact")
"""Formats of optimizer states."""
OWN_STATES = "as the optimizer makes it"
"""What a plan says of states that no kernel of ours knows."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": tuple(DTYPES),
    "states": FORMATS,
    "update": ("lazy", "eager", "delayed"),
    "zero": ("auto", 0, 1, 2, 3),
    "activations": ("keep",),
    "kernels": ("auto", "torch"),
    "separable": (None, True, False),
}
"""What this version can do."""

LATER: dict[str, tuple[Any, ...]] = {
    "activations": ("recompute", "offload", "auto"),
}
"""What belongs to the design and is refused until it works."""
UNTOLD = frozenset({"activations"})
"""Keywords that have one value as yet: nobody is told of them."""

_BUDGETS = "set gpu= and host= (and nvme=): what does not fit these budgets is offloaded"
_CLIP = "call optimizer.clip_grad_norm_(...) before step()"
SYNONYMS = {
    **dict.fromkeys(("cpu", "ram", "cpu_memory"), "say host="),
    **dict.fromkeys(("disk", "nvme_path"), "say nvme="),
    **dict.fromkeys(("dtype", "mixed_precision"), "say precision="),
    **{name: f"say precision={name!r}" for name in DTYPES},
    **dict.fromkeys(("zero_stage", "stage"), "say zero="),
    "gradient_accumulation_steps": "say micro_batches=",
    **dict.fromkeys(("gradient_clipping", "max_grad_norm"), _CLIP),
    **dict.fromkeys(("offload", "offload_optimizer", "offload_param", "cpu_offload"), _BUDGETS),
}
"""What to say instead of keywords that others have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything the user may say. README.md has a table of it that says more."""

    gpu: Size = "auto"
    """The budget of device memory, of each process."""
    host: Size = "auto"
    """The budget of host memory, of each machine."""
    nvme: NvmeOption = None
    """Folders on disks for what fits neither; None writes nothing to disk."""
    precision: str = "bf16"
    """What parameters and floating inputs are cast to."""
    states: str = "exact"
    """The format of optimizer states; a parameter group may say another one."""
    update: str = "lazy"
    """When updates run."""
    delay_after: int = 40
    """Steps as usual before delayed updates begin."""
    zero: str | int = "auto"
    """What ranks divide: the stage of ZeRO."""
    activations: str = "keep"
    """What becomes of activations between forward and backward."""
    micro_batches: int = 1
    """Backward passes per step that the plan has room for."""
    kernels: str = "auto"
    """Whether our own kernels may update, or only the user's optimizer."""
    separable: bool | None = None
    """Whether an optimizer class that nobody knows treats each parameter by itself."""
    place: Any = None
    """Homes by role, or a Plan, instead of solving."""
    weights: Any = None
    """A folder of safetensors that is streamed into the model."""
    mesh: Any = None
    """A DeviceMesh, where not all ranks train the same parameters on other data."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.micro_batches, int) or isinstance(self.micro_batches, bool) or self.micro_batches < 1:
            raise OptionError(
                f"expected micro_batches= to be a whole number from 1, found {self.micro_batches!r}; give one"
            )
        if not isinstance(self.delay_after, int) or isinstance(self.delay_after, bool) or self.delay_after < 0:
            raise OptionError(
                f"expected delay_after= to be a whole number from 0, found {self.delay_after!r}; give one"
            )
        for name in ("gpu", "host"):
            parse_size(name, getattr(self, name), there=2**60)
        parse_nvme(self.nvme)
        _check_place(self.place)
        if self.update == "eager" and self.precision == "fp16":
            raise OptionError(
                "expected update='lazy' with precision='fp16', found 'eager': whether a step is skipped is known only "
                "after backward; use precision='bf16'"
            )
        if self.mesh is not None and not hasattr(self.mesh, "get_group"):
            raise OptionError(
                f"expected mesh= as a torch DeviceMesh, found {self.mesh!r}; make one with "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        if self.weights is not None and not isinstance(self.weights, str | PathLike):
            raise OptionError(f"expected weights= as a folder of safetensors, found {self.weights!r}; give its path")


def options(given: Mapping[str, Any]) -> Options:
    """Options from keywords; a misspelt one is named, with what was probably meant."""
    known = set(Options.__dataclass_fields__)
    for name in given:
        if name not in known:
            told = sorted(known - UNTOLD)
            near = difflib.get_close_matches(name, told, 1)
            guess = f"did you mean {near[0]}=?" if near else f"known are {', '.join(told)}"
            hint = SYNONYMS.get(name, guess)
            raise UnknownOptionError(f"expected known options, found {name}=; {hint}")
    return Options(**given)


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        return
    if value in LATER.get(name, ()):
        raise OptionError(
            f"expected {name}= to be one of {allowed}, found {value!r}, which is not there yet; leave it out"
        )
    raise OptionError(f"expected {name}= to be one of {allowed}, found {value!r}; give one of them")


PLACES = tuple(tier for tier in get_args(TierName) if tier != "null")
"""Homes that can be forced. Bytes on the null tier are nowhere: it is for tests of traffic."""


def _check_place(place: Any) -> None:
    if place is None or hasattr(place, "placements"):
        return
    if not isinstance(place, Mapping):
        raise OptionError(
            f"expected place= as a Plan or as homes like {{'weight': 'host', 'grad': 'host', 'state': 'nvme'}}, found "
            f"{place!r}; give one of them"
        )
    for role, tier in place.items():
        if role not in ("weight", "grad", "state") or tier not in PLACES:
            raise OptionError(
                f"expected place= to map 'weight', 'grad' and 'state' to one of {PLACES}, found {role!r}: {tier!r}; "
                "give only those"
            )


def parse_size(name: str, value: Size, there: int | None) -> int:
    """Bytes: from a whole number, a text such as "24GiB", or a fraction of what is there, or all of it. `there`: None
    where there is nothing that a share could be taken of. K, M, G and T alone are KiB, MiB, GiB and TiB, as most tools
    of this field mean them; with a B they are powers of 1000."""
    if value == "auto" and there is not None:
        return there
    if isinstance(value, float) and there is not None:
        if 0 < value <= 1:
            return int(value * there)
        raise OptionError(
            f"expected {name}= as a fraction above 0 and up to 1, whole bytes (an int), or text like '24GiB', found "
            f"{value!r}; give one of them"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        if value > 0:
            return value
        raise OptionError(f"expected {name}= to be more than 0 bytes, found {value!r}; give more")
    if isinstance(value, str):
        return _bytes_in(name, value, there)
    raise _no_size(name, value, there)


def _bytes_in(name: str, text: str, there: int | None) -> int:
    """What a text with a unit says, or a large number without one."""
    if re.fullmatch(r"\s*\d*\.\d*\s*", text):
        share = "a fraction that is no text, as 0.5, or as " if there is not None else ""
        raise OptionError(f"expected {name}= as {share}text with a unit, as '24GiB', found {text!r}; say which")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = next((n for u, n in UNITS.items() if match and u.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise _no_size(name, text, there)
    if not match[2] and int(match[1]) < LEAST_WITHOUT_UNIT:
        raise OptionError(
            f"expected {name}= with a unit, found {text!r}, which is {int(match[1])} bytes; did you mean "
            f"{match[1]}GiB or {match[1]}GB?"
        )
    return int(float(match[1]) * unit)


def _no_size(name: str, value: object, there: int | None) -> OptionError:
    ways = "text like '24GiB' or '500MB', or whole bytes"
    if there is not None:
        ways = "'auto', text like '24GiB' or '500MB', whole bytes, or a fraction"
    return OptionError(f"expected {name}= as {ways}, found {value!r}; give one of them")


def parse_path(value: Any, what: str) -> Path:
    """A path for something that is written or read."""
    if not isinstance(value, str | PathLike) or not fspath(value):
        raise OptionError(f"expected {what} as text or a pathlib.Path, found {value!r}; give one")
    return Path(fspath(value))


def parse_number(name: str, value: Any) -> float:
    """What torch takes for a number, which is all that Python's `float` does."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"expected {name} as a number, found {value!r}; give one, as 1.0") from error


def parse_nvme(value: NvmeOption) -> list[tuple[Path, int | None]]:
    """Paths with the bytes each may hold (None: what is free)."""
    if value is None:
        return []
    if isinstance(value, str | PathLike):
        value = [value]
    if not isinstance(value, Mapping | Sequence) or not all(isinstance(path, str | PathLike) for path in value):
        raise OptionError(
            f"expected nvme= as a path, a list of paths, or a mapping of paths to sizes, found {value!r}; give one of "
            "them"
        )
    if not all(fspath(path) for path in value):
        raise OptionError("expected nvme= to name a folder, found an empty path; leave it out to write nothing to disk")
    sizes = value if isinstance(value, Mapping) else dict.fromkeys(value, "auto")
    return [(Path(fspath(path)).expanduser(), _disk_size(path, size)) for path, size in sizes.items()]


def _disk_size(path: str | PathLike[str], size: Size) -> int | None:
    return None if size == "auto" else parse_size(f"nvme[{path!r}]", size, there=None)
