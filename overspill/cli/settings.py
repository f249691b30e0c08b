"""What a training run is told, checked before anything happens."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from overspill.config import CHOICES
from overspill.errors import OptionError

OPTIMIZERS = ("adamw", "adam", "sgd", "adagrad")
SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("bf16", "fp16", "fp32")
STAGES = ("auto", "0", "1", "2", "3")
STATES, UPDATES = CHOICES["states"], CHOICES["update"]
EXACT_UPDATES = ("lazy", "eager")
"""Updates of a run that can be resumed to the same bits: a checkpoint would apply updates that are delayed."""
EAGER = "which begins in the backward pass, when the norm of all gradients is not known"
FIRST = {"states": "exact", "update": "lazy"}
"""What runs of the first versions had, which did not say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every run of `overspill train` is told; the names are those of the options."""

    seq: int = 128
    """Tokens in one sample; bytes of text for the built-in model."""
    batch: int = 4
    """Samples in one micro-batch."""
    micro_batches: int = 1
    """Backward passes per step, of every rank."""
    ranks: int = 1
    """Processes that train together; not an option, torchrun says it."""
    steps: int = 60
    optimizer: str = "adamw"
    lr: float = 5e-4
    schedule: str = "cosine"
    """What the learning rate does after its warm-up."""
    warmup: int = 5
    """Steps in which the learning rate rises."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm to which gradients are clipped; 0 does not clip."""
    seed: int = 0
    precision: str = "fp32"
    gpu: str = "auto"
    host: str = "auto"
    nvme: tuple[Path, ...] = ()
    zero: str = "auto"
    recompute: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("seq", "batch", "micro_batches"):
            self._check(name, getattr(self, name) >= 1, "from 1")
        self._check("seq", self.seq >= 2, "from 2, because every token is predicted from those before it")
        self._check("lr", 0 < self.lr < float("inf"), "greater than 0")
        self._check("clip", 0 <= self.clip < float("inf"), "from 0, which means not to clip")
        self._check("weight_decay", 0 <= self.weight_decay < float("inf"), "from 0")
        self._check("warmup", self.warmup >= 0, "from 0")
        self._check("seed", 0 <= self.seed < 2**63, "from 0 and below 2**63")
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS, "zero": STAGES}
        for name, known in choices.items():
            self._check(name, getattr(self, name) in known, f"to be one of {', '.join(known)}")

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise OptionError(f"expected {option(name)} {what}, found {getattr(self, name)!r}; give another one")

    @property
    def tokens(self) -> int:
        """Tokens per step, of all ranks."""
        return self.batch * self.seq * self.micro_batches * self.ranks

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return found

    def prepared_by(self) -> dict[str, Any]:
        """What `overspill.plan` and `overspill.prepare` are told of it."""
        return {
            "gpu": budget(self.gpu),
            "host": budget(self.host),
            "nvme": list(self.nvme) or None,
            "precision": self.precision,
            "micro_batches": self.micro_batches,
            "zero": stage(self.zero),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn(Settings):
    """A run without --model: the byte-level GPT."""

    layers: int = 8
    hidden: int = 320
    heads: int = 5
    verify: bool = False

    def __post_init__(self) -> None:
        Settings.__post_init__(self)  # super() does not know a class with slots, which is made twice
        for name in ("layers", "hidden", "heads", "steps"):
            self._check(name, getattr(self, name) >= 1, "from 1")
        self._check("heads", self.hidden % self.heads == 0, f"that divides --hidden {self.hidden}")
        self._check("precision", self.precision == "fp32", "to be fp32 without --model, whose bits can be verified")


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTune(Settings):
    """A run with --model: a Transformers model on the user's text."""

    model: Path
    """Folder with config.json, safetensors and a tokenizer."""
    data: Path
    text_field: str | None = None
    """The field with the text; None: "text", or else a chat in "messages"."""
    validation: float = 0.05
    """Share of the samples that is kept for validation."""
    validation_data: Path | None = None
    validate_every: int = 100
    validation_batches: int = 16
    seq: int = 1024
    """Or less, by default, where the model has fewer positions."""
    batch: int = 1
    steps: int = 0
    """0: as many as --epochs take."""
    epochs: int = 1
    """0: as many as --steps take."""
    lr: float = 1e-5
    warmup: int = 10
    weight_decay: float = 0.0
    precision: str = "bf16"
    states: str = "exact"
    """How optimizer states are kept."""
    update: str = "lazy"
    """When updates run."""
    save_every: int = 0
    """0: when training ends or is interrupted."""
    keep: int = 2
    """Checkpoints."""
    export: Path | None = None

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        assert (self.steps > 0) != (self.epochs > 0), "one of them says how long"
        for name in ("validate_every", "save_every"):
            self._check(name, getattr(self, name) >= 0, "from 0, which means only at the end")
        for name in ("keep", "validation_batches"):
            self._check(name, getattr(self, name) >= 1, "from 1")
        self._check("validation", 0 <= self.validation < 1, "from 0 and below 1, as a share of the samples")
        self._check("states", self.states in STATES, f"to be one of {', '.join(STATES)}")
        own = " (delayed is for loops of your own)" if self.update in UPDATES else ""
        self._check("update", self.update in EXACT_UPDATES, f"to be one of {', '.join(EXACT_UPDATES)}{own}")
        self._check("update", self.update == "lazy" or self.ranks == 1, "to be lazy over several ranks")
        self._check("update", self.update == "lazy" or self.precision != "fp16", "to be lazy with --precision fp16")
        self._check("clip", not self.clip or self.update != "eager", f"to be 0 with --update eager, {EAGER}")
        masters = self.precision != "fp32" or self.states == "exact"
        self._check("states", masters, "to be exact with --precision fp32, whose updates are the optimizer's own")

    def prepared_by(self) -> dict[str, Any]:
        return {**Settings.prepared_by(self), "states": self.states, "update": self.update}


FREE = frozenset({"model", "data", "validation_data", "export", "gpu", "host", "nvme", "recompute", "steps", "epochs"})
FREE |= {"save_every", "keep", "validate_every", "validation_batches", "zero", "micro_batches", "ranks"}
"""What a resumed run may be told anew. What the paths hold is compared, not how they are called; and the batches of a
step, not how many of them a rank takes."""

DEMO = {"gpu": "64MiB", "host": "96MiB", "verify": True}
"""What --demo sets, beside an nvme folder in the run's own: on 10 million parameters the device keeps next to nothing
of the weights, the host has room for them and the gradients, and most optimizer states go to disk."""

Kind = TypeVar("Kind", BuiltIn, FineTune)


def option(name: str) -> str:
    """A setting as the command line calls it."""
    return f"--{name.replace('_', '-')}"


def resolve(given: Mapping[str, Any], demo: bool = False, ranks: int = 1) -> BuiltIn | FineTune:
    """What the user said, then the demo's values, then the defaults."""
    said = {"ranks": ranks, **{name: value for name, value in given.items() if value is not None}}
    if "model" not in said:
        return _settings(BuiltIn, {**(DEMO if demo else {}), **said}, "goes with --model DIR")
    if demo:
        raise OptionError("expected --demo without --model, found both; the demo brings its own model")
    if "data" not in said:
        raise OptionError("expected --data with --model, found none; give a text file, a .jsonl file, or a folder")
    return _settings(FineTune, _one_length(_one_validation(said)), "belongs to the built-in model")


def resolve_resumed(stored: Mapping[str, Any], given: Mapping[str, Any], ranks: int = 1) -> FineTune:
    """What the run began with, and what the user says now of the things that may change. Other ranks than before
    share the same batches."""
    said = {name: value for name, value in given.items() if value is not None}
    stored = {**FIRST, **stored}
    if set(stored) != set(FineTune.__dataclass_fields__):
        raise OptionError(
            "expected a run of this version with --model to resume, found one with other settings; begin a new run"
        )
    before = _from_dict(stored)
    said = dict(_checked(FineTune, _one_length(said), "belongs to the built-in model"))
    batches = before.micro_batches * before.ranks
    if "micro_batches" not in said and batches % ranks:
        raise OptionError(
            f"expected a number of ranks that divides the {batches} batches of a step of the run that is resumed "
            f"({_batches(stored)}), found {ranks}; resume it with {batches} ranks or fewer, or begin a new run"
        )
    now = dataclasses.replace(before, **{"micro_batches": batches // ranks, **said, "ranks": ranks})
    check_same(before.to_dict(), now.to_dict())
    return now


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a run with settings that would make it another one."""
    if before["micro_batches"] * before["ranks"] != now["micro_batches"] * now["ranks"]:
        raise OptionError(
            f"expected {before['micro_batches'] * before['ranks']} batches a step, as the run that is resumed began "
            f"with ({_batches(before)}), found {_batches(now)}; leave it out to continue that run, or begin a new one"
        )
    before = {**FIRST, **before}
    differing = [name for name in now if name not in FREE and before.get(name) != now[name]]
    if differing:
        expected = ", ".join(f"{option(name)} {before.get(name)}" for name in differing)
        found = ", ".join(f"{option(name)} {now[name]}" for name in differing)
        raise OptionError(
            f"expected {expected}, as the run that is resumed began with, found {found}; leave it out to continue "
            "that run, or begin a new one without --resume"
        )


def check_contents(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """The same for what was given by path: the path may change, what it holds may not."""
    for name, digest in now.items():
        if before.get(name) != digest:
            raise OptionError(
                f"expected {option(name)} to hold what it held when the run began, found other contents; give the same "
                "again, or begin a new run without --resume"
            )


def budget(text: str) -> str | float:
    """A budget as `prepare` takes it: on a command line a fraction is text too."""
    plain = text.replace(".", "", 1)
    return float(text) if "." in text and plain.isdecimal() else text


def stage(text: str) -> str | int:
    """A ZeRO stage as `prepare` takes it."""
    return int(text) if text.isdecimal() else text


def _batches(settings: Mapping[str, Any]) -> str:
    return f"--micro-batches {settings['micro_batches']} on {settings['ranks']} ranks"


def _settings(kind: type[Kind], said: Mapping[str, Any], why: str) -> Kind:
    return kind(**_checked(kind, said, why))


def _checked(kind: type[Settings], said: Mapping[str, Any], why: str) -> Mapping[str, Any]:
    for name, value in said.items():
        if name not in kind.__dataclass_fields__:
            raise OptionError(f"expected no {option(name)} here, found {value}; it {why}")
    return said


def _one_length(said: Mapping[str, Any]) -> dict[str, Any]:
    """Either of --steps and --epochs takes the other's place."""
    if "steps" in said and "epochs" in said:
        raise OptionError(
            f"expected --steps or --epochs, found both: {said['steps']} and {said['epochs']}; leave one out"
        )
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in said:
            if said[name] < 1:
                raise OptionError(f"expected --{name} from 1, found {said[name]}; give 1 or more")
            return {**said, other: 0}
    return dict(said)


def _one_validation(said: Mapping[str, Any]) -> dict[str, Any]:
    if "validation_data" not in said:
        return dict(said)
    if "validation" in said:
        raise OptionError("expected --validation or --validation-data, found both; leave one out")
    return {**said, "validation": 0.0}


def _from_dict(stored: Mapping[str, Any]) -> FineTune:
    paths = {name: stored[name] and Path(stored[name]) for name in ("model", "data", "validation_data", "export")}
    return FineTune(**{**stored, **paths, "nvme": tuple(map(Path, stored["nvme"]))})
