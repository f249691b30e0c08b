"""`overspill bench step`, `max-size`, `quality`, `update` and `chart`: ours beside the peers, so that all of it can be
measured again."""

from pathlib import Path
from typing import Annotated

import typer

from overspill.bench import asking, configurations, host_updates, largest, quality, results, steps, updating
from overspill.bench import chart as charts
from overspill.bench.jobs import BUILDS, Training
from overspill.bench.learning import CASES, Lesson
from overspill.bench.models import LLAMA
from overspill.bench.peers import NAMES
from overspill.bench.results import Files
from overspill.cli import options as o
from overspill.cli.app import app, need
from overspill.cli.sizes import parse_count
from overspill.errors import OptionError

bench = typer.Typer(help="Measures ours beside the peers.", no_args_is_help=True)
app.add_typer(bench, name="bench")

MODEL, WORK, ENGINES, FILES = "The model", "A step", "Engines", "Files"
DEFAULT_PEERS = "compute,torch"
_T, _L = Training(), Lesson()

Folder = Annotated[
    Path | None, o.described(MODEL, "Folder of a Transformers model; its config is enough.", "a Llama of 3.14 B")
]
Params = Annotated[str | None, o.described(MODEL, "Parameters of a decoder like Llama: 13B, 350M.", "none")]
Layers = Annotated[int | None, o.described(MODEL, "Its blocks.", LLAMA.layers)]
Hidden = Annotated[int | None, o.described(MODEL, "Its width.", LLAMA.hidden)]
Heads = Annotated[int | None, o.described(MODEL, "Its attention heads.", LLAMA.heads)]
Ffn = Annotated[int | None, o.described(MODEL, "Width of its feed-forward part.", LLAMA.ffn)]
Vocab = Annotated[int | None, o.described(MODEL, "Its vocabulary.", LLAMA.vocabulary)]
Seq = Annotated[int, o.described(WORK, "Tokens in a sequence.", _T.seq)]
MicroBatch = Annotated[int, o.described(WORK, "Sequences in a micro-batch.", _T.micro_batch)]
MicroBatches = Annotated[int, o.described(WORK, "Backward passes in a step.", _T.micro_batches)]
Clip = Annotated[float, o.described(WORK, "Norm to clip gradients to; 0 does not clip.", _T.clip)]
Measured = Annotated[int, o.described(WORK, "Steps that are measured.", _T.steps, "--steps")]
Warmup = Annotated[int, o.described(WORK, "Steps before the clock starts.", _T.warmup)]
Recompute = Annotated[bool, o.described(WORK, "Recompute activations.", "yes", "--recompute/--no-recompute")]
Peers = Annotated[str, o.described(ENGINES, f"Some of {', '.join(NAMES)}; or none.", DEFAULT_PEERS)]
OursOption = Annotated[
    list[str] | None,
    o.described(
        ENGINES,
        "A configuration of ours, as keywords of prepare: gpu=16GB or update=eager,clip=0,place=state:host. May be "
        "given several times; or none. gpu=peak:deepspeed is what that peer was seen to take.",
        "one, with the budgets below",
        "--ours",
    ),
]
Gpu = Annotated[str | None, o.described(ENGINES, "GPU budget of ours.", "auto")]
Host = Annotated[str | None, o.described(ENGINES, "Host budget of ours.", "auto")]
Nvme = Annotated[list[Path] | None, o.described(ENGINES, "Folder for ours to spill to.", "none", parser=o.folder)]
Build = Annotated[str, o.described(ENGINES, f"Where the model for ours is built: {', '.join(BUILDS)}.", "device")]
Limit = Annotated[float, o.described(ENGINES, "Seconds that every engine has.", 600)]
EngineList = Annotated[
    str, o.described(ENGINES, f"Some of {', '.join(('ours', *largest.ON_GPU))}; those on the GPU first.", "ours")
]
SizeList = Annotated[
    list[str] | None,
    o.described(
        ENGINES,
        "max, exactly so many parameters (8B), or a multiple of what torch trains in the same run (5x). May be given "
        "several times.",
        largest.MAX,
        "--size",
    ),
]
FewSteps = Annotated[int, o.described(WORK, "Steps that are measured.", 3, "--steps")]
FewBefore = Annotated[int, o.described(WORK, "Steps before the clock starts.", 1, "--warmup")]
Unbuilt = Annotated[
    str, o.described(ENGINES, f"Where the model for ours is built: {', '.join(BUILDS)}.", "meta", "--build")
]
Least = Annotated[str, o.described(ENGINES, "Size with which the search begins.", "100M", "--from")]
Ratio = Annotated[float, o.described(ENGINES, "Of one size to the next.", 1.02)]
Out = Annotated[
    Path | None,
    o.described(FILES, "JSON file.", "benchmarks/results/..., or runs/... where there is no folder benchmarks"),
]
Chart = Annotated[Path | None, o.described(FILES, "PNG file.", "beside the JSON, where matplotlib is installed")]
TraceFile = Annotated[
    Path | None, o.described(FILES, "A step of ours by overspill.trace, after the clock.", "none", "--trace")
]
Profile = Annotated[Path | None, o.described(FILES, "A step of ours by torch.profiler.", "none")]
Commit = Annotated[str | None, o.described(FILES, "Which commit this is, where git cannot know.", "what git says")]


@bench.command()
def step(
    model: Folder = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    ffn: Ffn = None,
    vocab: Vocab = None,
    seq: Seq = _T.seq,
    micro_batch: MicroBatch = _T.micro_batch,
    micro_batches: MicroBatches = _T.micro_batches,
    clip: Clip = _T.clip,
    measured: Measured = _T.steps,
    warmup: Warmup = _T.warmup,
    recompute: Recompute = True,
    peers: Peers = DEFAULT_PEERS,
    ours: OursOption = None,
    gpu: Gpu = None,
    host: Host = None,
    nvme: Nvme = None,
    build: Build = "device",
    limit: Limit = 600.0,
    out: Out = None,
    chart: Chart = None,
    trace: TraceFile = None,
    profile: Profile = None,
    commit: Commit = None,
) -> None:
    """Time steps of ours and of the peers, each in its own process: speed, memory, set-up, ratios."""
    need("transformers", *(["matplotlib"] if chart else []))
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
    work = {"seq": seq, "micro_batch": micro_batch, "micro_batches": micro_batches, "clip": clip, "warmup": warmup}
    work |= {"steps": measured, "recompute": recompute}
    asking.one_of("build", build, BUILDS)
    for name, path in (("trace", trace), ("profile", profile)):
        asking.a_file(name, path)
    asked = steps.Run(
        training=asking.training(asking.what(model, params, shape, seq), work),
        peers=asking.listed(peers),
        ours=asking.configurations(ours, asking.budgets(gpu, host, nvme)),
        build=build,
        limit=limit,
        trace=trace,
        profile=profile,
    )
    configurations.check(asked.ours, asked.peers)
    configurations.check_delay(asked.ours, asked.training.warmup)
    files = Files("step", out, chart, results.head("overspill bench step", commit))
    asking.a_size_without_a_gpu(model, params, shape)
    known = steps.run(asked, files)
    measured_any = any(row["ok"] for row in known)
    if measured_any:
        files.draw()
    typer.echo(f"\n{steps.summary(known, asked, files.body)}\n{files}")
    if not measured_any:
        raise typer.Exit(1)


@bench.command()
def max_size(
    engine: EngineList = "ours",
    size: SizeList = None,
    gpu: Gpu = None,
    host: Host = None,
    nvme: Nvme = None,
    ours: OursOption = None,
    seq: Seq = _T.seq,
    micro_batch: MicroBatch = _T.micro_batch,
    micro_batches: MicroBatches = _T.micro_batches,
    clip: Clip = _T.clip,
    measured: FewSteps = 3,
    warmup: FewBefore = 1,
    recompute: Recompute = True,
    least: Least = "100M",
    ratio: Ratio = 1.02,
    build: Unbuilt = "meta",
    limit: Limit = 600.0,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Find the largest model that fits the budgets, train it for a few steps, and show that the next one is refused."""
    need("transformers")
    work = {"seq": seq, "micro_batch": micro_batch, "micro_batches": micro_batches, "clip": clip, "warmup": warmup}
    work |= {"steps": measured, "recompute": recompute}
    asking.one_of("build", build, BUILDS)
    if not 1 < ratio <= 2:
        raise OptionError(f"expected --ratio greater than 1 and up to 2, found {ratio}; give one such as 1.02")
    asked = largest.Run(
        training=asking.training({}, work),
        engines=asking.listed(engine),
        sizes=size or [largest.MAX],
        ours=asking.configurations(ours, asking.budgets(gpu, host, nvme)),
        cap=asking.budgets(gpu, None, None).get("gpu"),
        search={"least": float(parse_count(least)), "ratio": ratio},
        build=build,
        limit=limit,
    )
    asked.check()
    files = Files("max-size", out, None, results.head("overspill bench max-size", commit))
    cases = largest.run(asked, files)
    typer.echo(f"\n{largest.summary(cases)}\n{files}")


_CASES, _WAYS = ",".join(CASES), ",".join(quality.WAYS)
CaseList = Annotated[str, o.described(WORK, f"Some of {', '.join(CASES)}.", _CASES, "--cases")]
WayList = Annotated[
    str, o.described(ENGINES, f"Some of {', '.join(quality.WAYS)}.", ",".join(quality.WAYS), "--states")
]
AtOnce = Annotated[int, o.described(ENGINES, "Processes side by side.", 1)]


@bench.command(name="quality")
def quality_(
    cases: CaseList = _CASES,
    ways: WayList = _WAYS,
    learned: Annotated[int, o.described(WORK, "Steps of each.", _L.steps, "--steps")] = _L.steps,
    layers: Annotated[int, o.described(MODEL, "Its blocks.", _L.layers)] = _L.layers,
    hidden: Annotated[int, o.described(MODEL, "Its width.", _L.hidden)] = _L.hidden,
    heads: Annotated[int, o.described(MODEL, "Its attention heads.", _L.heads)] = _L.heads,
    seq: Annotated[int, o.described(WORK, "Bytes in a sequence.", _L.seq)] = _L.seq,
    batch: Annotated[int, o.described(WORK, "Sequences in a step.", _L.batch)] = _L.batch,
    lr: Annotated[float, o.described(WORK, "Learning rate.", _L.lr)] = _L.lr,
    seed: Annotated[int, o.described(WORK, "Of the first values and of the order of the text.", _L.seed)] = _L.seed,
    at_once: AtOnce = 1,
    limit: Annotated[float, o.described(ENGINES, "Seconds that each has.", 3600)] = 3600.0,
    out: Out = None,
    chart: Chart = None,
    commit: Commit = None,
) -> None:
    """Train a small GPT with states kept in every format, and by torch alone: whether it learns as well."""
    need("transformers", *(["matplotlib"] if chart else []))
    for name, value in (("steps", learned), ("layers", layers), ("batch", batch), ("at_once", at_once)):
        asking.at_least(name, value, 1)
    asking.at_least("seq", seq, 2)
    if heads < 1 or hidden % heads:
        raise OptionError(f"expected --heads that divide --hidden {hidden}, found {heads}; change one")
    for name, told, known in (("cases", cases, tuple(CASES)), ("states", ways, tuple(quality.WAYS))):
        for each in asking.listed(told):
            asking.one_of(name, each, known)
    asked = quality.Run(
        lesson=Lesson(steps=learned, layers=layers, hidden=hidden, heads=heads, seq=seq, batch=batch, lr=lr, seed=seed),
        cases=asking.listed(cases),
        ways=asking.listed(ways),
        at_once=at_once,
        limit=limit,
    )
    quality.check_delay(asked)
    files = Files("quality", out, chart, results.head("overspill bench quality", commit))
    found = quality.run(asked, files)
    files.draw()
    typer.echo(f"\n{quality.summary(found)}\n{files}")


UpdateEngines = Annotated[
    str, o.described(ENGINES, f"Some of {', '.join(updating.ENGINES)}.", "ours,torch", "--engine")
]
Counts = Annotated[str, o.described(MODEL, "Parameters: 500M,1B,2B,4B.", "500M", "--params")]
Cores = Annotated[str | None, o.described(WORK, "Numbers of cores: 16,2.", "all")]
Rounds = Annotated[int, o.described(WORK, "Of which the median counts.", 5)]


@bench.command()
def update(
    params: Counts = "500M",
    engine: UpdateEngines = "ours,torch",
    cores: Cores = None,
    rounds: Rounds = 5,
    limit: Annotated[float, o.described(ENGINES, "Seconds that each number of cores has.", 900)] = 900.0,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time AdamW on the host's cores: ours beside torch's fused one and DeepSpeed's, bare and with the conversions."""
    for each in asking.listed(engine):
        asking.one_of("engine", each, updating.ENGINES)
    asking.at_least("rounds", rounds, 1)
    only = [parse_count(each) for each in asking.listed(cores)] if cores else []
    for number in only:
        updating.check_cores(number)
    asked = host_updates.Run(
        sizes=[parse_count(each) for each in asking.listed(params)],
        engines=asking.listed(engine),
        cores=only or [None],
        rounds=rounds,
        limit=limit,
    )
    files = Files("update", out, None, results.head("overspill bench update", commit))
    typer.echo(f"\n{host_updates.summary(host_updates.run(asked, files))}\n{files}")


@bench.command()
def chart(result: Annotated[Path, typer.Argument(help="JSON file of a benchmark.")], out: Chart = None) -> None:
    """Draw the picture of a result file, for instance of one that was made where there is no matplotlib."""
    need("matplotlib")
    target = out or result.with_suffix(".png")
    results.check_picture(target, "--out")
    charts.draw(results.read(result), target)
    typer.echo(f"drawn: {target}")
