"""What the options of the benchmarks ask for, checked before anything is started."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overspill.bench.configurations import Ours, parse
from overspill.bench.jobs import Training
from overspill.bench.models import LLAMA, sizes_of
from overspill.cli import text_model
from overspill.cli.settings import budget, option
from overspill.cli.sizes import parse_count
from overspill.errors import OptionError

NONE = "none"
Shape = Mapping[str, int | None]
"""Sizes as the options call them; None: not given."""


def what(folder: Path | None, params: str | None, shape: Shape, seq: int) -> dict[str, Any]:
    """The model, as a training has it: a folder, or sizes."""
    given = {name: value for name, value in shape.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise OptionError(f"expected {option(name)} from 1, found {value}; give 1 or more")
    if folder is not None:
        if params is not None or given:
            name = "params" if params is not None else next(iter(given))
            raise OptionError(f"expected {option(name)} without --model, found both; the folder's config says it")
        longest = text_model.positions(text_model.read_config(folder))
        if longest is not None and seq > longest:
            raise OptionError(f"expected --seq of at most the {longest} positions of the model, found {seq}; give less")
        return {"folder": str(folder.absolute())}
    if params is not None:
        if "ffn" in given:
            raise OptionError("expected --params or --ffn, found both; --params chooses the feed-forward part")
        return {"sizes": sizes_of(parse_count(params), shape)}
    names = {"layers": "layers", "hidden": "hidden", "heads": "heads", "ffn": "ffn", "vocab": "vocabulary"}
    sizes = dataclasses.replace(LLAMA, **{names[name]: value for name, value in given.items()})
    if sizes.hidden % sizes.heads or sizes.hidden // sizes.heads % 2:
        raise OptionError(
            f"expected --heads that divide --hidden {sizes.hidden} into even parts, found {sizes.heads}; change one"
        )
    return {"sizes": sizes}


def a_size_without_a_gpu(folder: Path | None, params: str | None, shape: Shape) -> None:
    """The default is one that a CPU would take minutes to build."""
    if folder is None and params is None and not any(shape.values()) and not torch.cuda.is_available():
        raise OptionError(
            "expected --params or --model where there is no GPU, found neither; for a look at what is measured give "
            "--params 300K --seq 16 --micro-batch 1"
        )


def training(model: Mapping[str, Any], work: Mapping[str, Any]) -> Training:
    """The model and what is done with it in a step."""
    for name in ("micro_batch", "micro_batches", "steps"):
        at_least(name, work[name], 1)
    at_least("seq", work["seq"], 2)
    at_least("warmup", work["warmup"], 0)
    if not 0 <= work["clip"] < float("inf"):
        raise OptionError(f"expected --clip from 0, which means not to clip, found {work['clip']}; give 0 or more")
    return Training(**model, **work)


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise OptionError(f"expected {option(name)} from {least}, found {value}; give {least} or more")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise OptionError(f"expected {option(name)} to be one of {', '.join(known)}, found {value!r}; give one of them")


def listed(text: str) -> tuple[str, ...]:
    """Names between commas; "none" is no name."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    return () if names == (NONE,) else names


def budgets(gpu: str | None, host: str | None, nvme: Sequence[Path] | None) -> dict[str, Any]:
    """Those that are given, as `prepare` takes them."""
    found: dict[str, Any] = {}
    if gpu is not None:
        found["gpu"] = budget(gpu)
    if host is not None:
        found["host"] = budget(host)
    if nvme:
        found["nvme"] = [str(path.absolute()) for path in nvme]
    return found


def configurations(texts: Sequence[str] | None, base: Mapping[str, Any]) -> tuple[Ours, ...]:
    """Those of ours; one where nothing is said."""
    if texts == [NONE]:
        return ()
    return tuple(parse(text, base) for text in texts or [""])


def a_file(name: str, path: Path | None) -> None:
    """Refuse a place where no file can be."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise OptionError(
            f"expected {option(name)} as a file in an existing folder, found {str(path)!r}; give a name for "
            "the file, in a folder that is there"
        )
