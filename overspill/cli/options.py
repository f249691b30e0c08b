"""The options of the commands: their types and what --help says of them. Left out, an option is None."""

from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.settings import (
    DEMO,
    EXACT_UPDATES,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    STATES,
    UPDATES,
    BuiltIn,
    FineTune,
)

WHAT, DATA, TRAINING, MEMORY, RUN = "What is trained", "Data, with --model", "Training", "Memory", "The run"

_B = BuiltIn()
_F = FineTune(model=Path(), data=Path())


def described(panel: str, help_text: str, default: object, *names: str, parser: Any = None) -> Any:
    """An option, the group that --help shows it in, and what it is when it is left out."""
    return typer.Option(*names, help=help_text, show_default=str(default), rich_help_panel=panel, parser=parser)


def folder(text: str) -> Path:
    """Not an empty name, as of a variable that is not set: it would be the current folder."""
    if not text:
        raise typer.BadParameter(
            "expected a folder, found an empty name; leave the option out to write nothing to disk"
        )
    return Path(text)


def _both(name: str) -> str:
    return f"{getattr(_B, name)}; with --model {getattr(_F, name)}"


Demo = Annotated[
    bool,
    described(WHAT, f"Budgets far below what it takes ({DEMO['gpu']} of GPU), and --verify; in fp32.", "no", "--demo"),
]
Model = Annotated[Path | None, described(WHAT, "Folder of a Transformers model.", "a built-in byte-level GPT")]
Layers = Annotated[int | None, described(WHAT, "Blocks of the built-in model.", _B.layers)]
Hidden = Annotated[int | None, described(WHAT, "Width of the built-in model.", _B.hidden)]
Heads = Annotated[int | None, described(WHAT, "Attention heads of the built-in model.", _B.heads)]

DataPath = Annotated[
    Path | None,
    described(DATA, "Text file (one document), .jsonl, or a folder of .txt, .md, .jsonl.", "none", "--data"),
]
TextField = Annotated[
    str | None, described(DATA, "Field of a .jsonl file that holds the text.", "text; else a chat in messages")
]
Validation = Annotated[float | None, described(DATA, "Share of the samples for validation.", _F.validation)]
ValidationData = Annotated[Path | None, described(DATA, "Text for validation, instead of a share.", "none")]
ValidateEvery = Annotated[
    int | None, described(DATA, "Steps between validations; 0: only at the end.", _F.validate_every)
]
ValidationBatches = Annotated[int | None, described(DATA, "Batches of a validation, at most.", _F.validation_batches)]

Seq = Annotated[
    int | None,
    described(TRAINING, "Tokens in a sample; bytes for the built-in model.", f"{_both('seq')}, or as it can"),
]
BatchSize = Annotated[int | None, described(TRAINING, "Samples in a micro-batch.", _both("batch"), "--batch")]
MicroBatches = Annotated[int | None, described(TRAINING, "Backward passes in a step, of every rank.", _B.micro_batches)]
Steps = Annotated[int | None, described(TRAINING, "Optimizer steps.", f"{_B.steps}; with --model as --epochs say")]
Epochs = Annotated[int | None, described(TRAINING, "Passes over the data, instead of --steps.", _F.epochs)]
Optimizer = Annotated[str | None, described(TRAINING, f"One of {', '.join(OPTIMIZERS)}.", _B.optimizer)]
Lr = Annotated[float | None, described(TRAINING, "Peak learning rate.", _both("lr"))]
Schedule = Annotated[
    str | None, described(TRAINING, f"Of the learning rate, down to a tenth: {', '.join(SCHEDULES)}.", _B.schedule)
]
Warmup = Annotated[int | None, described(TRAINING, "Steps until the peak learning rate.", _both("warmup"))]
WeightDecay = Annotated[float | None, described(TRAINING, "Of all parameters.", _both("weight_decay"))]
Clip = Annotated[float | None, described(TRAINING, "Norm to clip gradients to; 0 does not clip.", _B.clip)]
Seed = Annotated[int | None, described(TRAINING, "For weights and data.", _B.seed)]
Precision = Annotated[str | None, described(TRAINING, f"One of {', '.join(PRECISIONS)}.", _both("precision"))]
PlannedPrecision = Annotated[str | None, described(TRAINING, f"One of {', '.join(PRECISIONS)}.", _F.precision)]
States = Annotated[
    str | None,
    described(TRAINING, f"How optimizer states are kept: {', '.join(STATES)}; 10, 6, 3 bytes.", _F.states),
]
Update = Annotated[str | None, described(TRAINING, f"When updates run: {', '.join(UPDATES)}.", UPDATES[0])]
TrainedUpdate = Annotated[
    str | None,
    described(TRAINING, f"When updates run: {', '.join(EXACT_UPDATES)}; eager does not clip: --clip 0.", _F.update),
]
Deterministic = Annotated[
    bool | None,
    described(TRAINING, "On a GPU: the same bits each time.", "no", "--deterministic/--no-deterministic"),
]

Gpu = Annotated[str | None, described(MEMORY, 'Budget of the device: "24GiB", bytes, or a fraction.', _B.gpu)]
Host = Annotated[str | None, described(MEMORY, "Budget of host memory.", _B.host)]
Nvme = Annotated[
    list[Path] | None, described(MEMORY, "Folder to spill to; may be given several times.", "none", parser=folder)
]
Zero = Annotated[
    str | None,
    described(MEMORY, "What ranks divide: 1 states, 2 gradients too, 3 weights too; or 0, auto.", _B.zero),
]
Recompute = Annotated[bool | None, described(MEMORY, "Recompute activations.", "yes", "--recompute/--no-recompute")]

Run = Annotated[
    Path | None,
    # By two names: torchrun with Python 3.11 takes --run for the beginning of an option of its own.
    described(RUN, "Folder for plan, log, trace, plot and checkpoints.", "runs/DATE-TIME", "--run", "--run-folder"),
]
Resume = Annotated[
    bool, described(RUN, "Continue the newest checkpoint of --run, or of the newest run.", "no", "--resume")
]
SaveEvery = Annotated[
    int | None, described(RUN, "Steps between checkpoints; 0: at the end and at Ctrl-C.", _F.save_every)
]
Keep = Annotated[int | None, described(RUN, "Checkpoints to keep.", _F.keep)]
Export = Annotated[Path | None, described(RUN, "Folder for the model at the end, for from_pretrained.", "RUN/model")]
Verify = Annotated[
    bool | None,
    described(RUN, "Train the built-in model plainly too, and compare all bits.", "no", "--verify/--no-verify"),
]
