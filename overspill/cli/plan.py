"""`overspill plan`: where everything would live, for a model folder or for sizes. Allocates nothing."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import overspill
from overspill.cli import options as o
from overspill.cli import sizes, text_model
from overspill.cli.app import app, need
from overspill.cli.loop import build_optimizer
from overspill.cli.settings import OPTIMIZERS, PRECISIONS, STAGES, STATES, UPDATES, budget, option, stage
from overspill.cli.wording import as_options
from overspill.config import parse_size
from overspill.errors import OptionError

MODEL, MACHINE = "The model", "Another machine than this one"
DEFAULTS = {
    "precision": "bf16",
    "optimizer": "adamw",
    "micro_batches": 1,
    "gpu": "auto",
    "host": "auto",
    "zero": "auto",
    "states": "exact",
    "update": "lazy",
}
SOMEWHERE = "nvme"
"""The folder of another machine's disk; only its size counts."""

Folder = Annotated[Path | None, o.described(MODEL, "Folder of a Transformers model; its config is enough.", "none")]
Params = Annotated[str | None, o.described(MODEL, "Parameters of a decoder like Llama: 13B, 350M.", "none")]
Layers = Annotated[int | None, o.described(MODEL, "Its blocks.", "by --params")]
Hidden = Annotated[int | None, o.described(MODEL, "Its width.", "by --params")]
Heads = Annotated[int | None, o.described(MODEL, "Its attention heads.", "by --hidden")]
Vocab = Annotated[int | None, o.described(MODEL, "Its vocabulary.", sizes.VOCABULARY)]
MachineGpu = Annotated[str | None, o.described(MACHINE, "Memory of its GPU: 80GiB.", "this one's")]
MachineHost = Annotated[str | None, o.described(MACHINE, "Its host memory: 512GiB.", "this one's")]
MachineNvme = Annotated[str | None, o.described(MACHINE, "Room on its disks, instead of --nvme: 2TB.", "none")]
MachineLink = Annotated[
    str | None,
    o.described(
        MACHINE,
        "Bytes over its link per second, both directions together: about 100GB for PCIe 5 x16, 50GB for PCIe 4.",
        "none",
    ),
]
MachineDisk = Annotated[str | None, o.described(MACHINE, "Bytes from or to its disks per second: 5GB.", "none")]
RATES = {"machine_link": "--machine-link", "machine_disk": "--machine-disk"}
World = Annotated[int, o.described(MACHINE, "Processes that train together, each with a GPU of its own.", 1)]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


@app.command()
def plan(
    model: Folder = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    vocab: Vocab = None,
    optimizer: o.Optimizer = None,
    micro_batches: o.MicroBatches = None,
    precision: o.PlannedPrecision = None,
    states: o.States = None,
    update: o.Update = None,
    gpu: o.Gpu = None,
    host: o.Host = None,
    nvme: o.Nvme = None,
    world: World = 1,
    zero: o.Zero = None,
    machine_gpu: MachineGpu = None,
    machine_host: MachineHost = None,
    machine_nvme: MachineNvme = None,
    machine_link: MachineLink = None,
    machine_disk: MachineDisk = None,
    json: Json = False,
) -> None:
    """Show which part of a model would live where, the peak of every tier, and what a step takes. Allocates nothing."""
    given = {"optimizer": optimizer, "micro_batches": micro_batches, "precision": precision, "zero": zero}
    given |= {"gpu": gpu, "host": host, "states": states, "update": update}
    said: dict[str, Any] = {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
    _check_choices(said)
    said["zero"] = stage(said["zero"])
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab}
    built, what = _built(model, params, shape)
    own = build_optimizer(built, said.pop("optimizer"), lr=1e-5, weight_decay=0.0)
    machine = _machine(machine_gpu, machine_host, {"link": machine_link, "disk": machine_disk})
    made = overspill.plan(
        built,
        own,
        machine=machine,
        world=world,
        nvme=_disks(nvme, machine_nvme),
        **{**said, "gpu": budget(said["gpu"]), "host": budget(said["host"])},
    )
    made = dataclasses.replace(made, untimed=as_options(made.untimed, RATES))
    typer.echo(made.to_json() if json else f"{what}\n{made}{_hint(made)}")


def _hint(made: overspill.Plan) -> str:
    """Where the plan says nothing of times: there is no GPU here, and no other machine was told of."""
    if made.times is not None or made.untimed:
        return ""
    return (
        "\npredicted step: not known without a GPU; for a machine with one say --machine-gpu, --machine-host and "
        "--machine-link"
    )


def _check_choices(said: dict[str, Any]) -> None:
    choices = {"optimizer": OPTIMIZERS, "precision": PRECISIONS, "zero": STAGES, "states": STATES, "update": UPDATES}
    for name, known in choices.items():
        if said[name] not in known:
            raise OptionError(
                f"expected {option(name)} to be one of {', '.join(known)}, found {said[name]!r}; give one of them"
            )


def _built(folder: Path | None, params: str | None, shape: dict[str, int | None]) -> tuple[nn.Module, str]:
    """The model without values, and what it is in words."""
    if (folder is None) == (params is None):
        found = "neither" if folder is None else "both"
        raise OptionError(f"expected --model DIR or --params NUMBER, found {found}; give one of them")
    if params is not None:
        chosen = sizes.choose(
            sizes.parse_count(params), shape["layers"], shape["hidden"], shape["heads"], shape["vocab"]
        )
        return sizes.build(chosen), str(chosen)
    assert folder is not None, "neither a folder nor a number"
    for name, value in shape.items():
        if value is not None:
            raise OptionError(f"expected {option(name)} with --params only, found {value}; the folder's config says it")
    need("transformers")
    built = text_model.build(text_model.read_config(folder), recompute=False)
    return built, f"{type(built).__name__} of {folder}"


def _machine(gpu: str | None, host: str | None, rates: dict[str, str | None]) -> dict[str, int] | None:
    given = {name: text for name, text in rates.items() if text is not None}
    if gpu is None and host is None and not given:
        return None
    missing = [option(name) for name, text in (("machine_gpu", gpu), ("machine_host", host)) if text is None]
    if missing:
        raise OptionError(
            "expected --machine-gpu and --machine-host together, and others of --machine-... with them, found no "
            f"{' and no '.join(missing)}; give that, too"
        )
    sizes = {"device": ("machine_gpu", gpu or ""), "host": ("machine_host", host or "")}
    sizes |= {name: (f"machine_{name}", text) for name, text in given.items()}
    for name, text in sizes.values():
        if text == "auto" or re.fullmatch(r"\d*\.\d*", text):
            raise OptionError(
                f"expected {option(name)} of another machine in bytes, as 80GiB, found {text!r}; say how many"
            )
    return {tier: parse_size(name, text, there=None) for tier, (name, text) in sizes.items()}


def _disks(paths: list[Path] | None, room: str | None) -> Any:
    if paths and room:
        raise OptionError("expected --nvme or --machine-nvme, found both; leave one out")
    return {SOMEWHERE: parse_size("machine_nvme", room, there=None)} if room else paths or None
