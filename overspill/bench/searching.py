"""A worker's part of `overspill bench max-size`: the largest size that is accepted, on a grid of sizes.

Note [Grid]. Sizes grow by one ratio from one to the next, so the answer is exact to that ratio, and "the next size"
means something. The search goes up in leaps until a size is refused, then halves what is in between.

Note [Activations of a size]. A plan keeps what room there is for activations and cannot know what a batch takes of it,
so the largest plan may be one that no batch fits in. They grow by the same with every layer: on a GPU they are measured
with one layer and with two, and a plan with less room than that is refused too. Gradients go as they come while that is
measured: a plan has room of its own for them, which activations may have until the first one comes.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import overspill
from overspill.bench import models
from overspill.bench.engines import LR
from overspill.bench.jobs import Job, Training
from overspill.bench.models import Batches
from overspill.bench.peers import ENGINES
from overspill.cli import text_model
from overspill.cli.loop import compute_device
from overspill.cli.sizes import Sizes
from overspill.config import DTYPES, options
from overspill.errors import BudgetError, OptionError
from overspill.specs import Activations, human

Told = Callable[[str], None]
Try = Callable[[Sizes], str | None]
"""Returns why a size is refused; None: it is accepted."""
_LEAP = 2.0
_STEPS = 2
"""Steps of an attempt: the first makes the optimizer's states, the second has everything in memory at once."""
HOLES = 1.1
"""Times the activations of a batch: what torch's allocator takes for them, with what it cannot use of that."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where the search ended."""

    place: int
    """On the grid; the next one is refused."""
    refusal: str
    """Why the next one is refused."""
    tries: list[dict[str, Any]]


def grid(search: Mapping[str, float], place: int) -> Sizes:
    """See Note [Grid]."""
    return models.sizes_of(round(search["least"] * search["ratio"] ** place))


def search(asked: Mapping[str, float], attempt: Try, told: Told) -> Found:
    """The largest accepted place of the grid. The first one must be."""
    tries: list[dict[str, Any]] = []

    def refused(place: int) -> str | None:
        sizes = grid(asked, place)
        told(models.said(sizes.parameters))
        why = attempt(sizes)
        tries.append({"place": place, "parameters": sizes.parameters, "refused": why})
        return why

    first = refused(0)
    if first is not None:
        raise OptionError(
            f"expected at least {grid(asked, 0).parameters:,} parameters to fit, found: {first}; give larger budgets, "
            "or a smaller --from"
        )
    low, leap, why = 0, _leap(asked["ratio"]), ""
    high = leap
    while (found := refused(high)) is None:
        low, high = high, high + leap
    why = found
    while high - low > 1:
        middle = (low + high) // 2
        found = refused(middle)
        if found is None:
            low = middle
        else:
            high, why = middle, found
    return Found(low, why, tries)


def largest_planned(job: Job, told: Told) -> dict[str, Any]:
    """By the planner, within the budgets of the first plan, so that "auto" means the same for every size."""
    keywords: dict[str, Any] = {"micro_batches": job.training.micro_batches, **job.keywords}
    keywords |= fixed_budgets(plan(job.training, grid(job.search, 0), keywords))
    chosen = options(keywords)
    dtype, later = DTYPES[chosen.precision], chosen.update == "delayed" or job.training.micro_batches > 1

    def attempt(sizes: Sizes) -> str | None:
        try:
            made = plan(job.training, sizes, keywords)
        except BudgetError as error:
            return str(error)
        room, taken = made.bytes_of("device", "activations"), activations(job.training, sizes, dtype)
        needed = Activations(round(HOLES * taken.before), round(HOLES * taken.after)).beside(
            0 if later else _gradients(made)
        )
        if needed > room:
            return f"expected room for {human(needed)} of activations beside what is planned, found {human(room)}"
        return None

    found = search(job.search, attempt, told)
    best = plan(job.training, grid(job.search, found.place), keywords)
    return {**asdict(found), "keywords": keywords, "peak": best.peaks, "plan": str(best)}


def plan(training: Training, sizes: Sizes, keywords: Mapping[str, Any]) -> overspill.Plan:
    model = models.build(replace(training, sizes=sizes), torch.float32, torch.device("meta"))
    return overspill.plan(model, torch.optim.AdamW(model.parameters(), lr=LR), **keywords)


def _gradients(made: overspill.Plan) -> int:
    """The room that a plan has on the device for those that a step's only backward pass makes."""
    return sum(made.bytes_of("device", what) for what in ("grad", "gradients before their update"))


def activations(training: Training, sizes: Sizes, dtype: torch.dtype) -> Activations:
    """What a batch takes on the GPU beside weights of this dtype. See Note [Activations of a size]."""
    device = compute_device()
    if device.type != "cuda":
        return Activations(0, 0)
    one, two = (_beside_weights(replace(training, sizes=replace(sizes, layers=n)), dtype, device) for n in (1, 2))
    pairs = ((one.before, two.before), (one.after, two.after))
    return Activations(*(first + (sizes.layers - 1) * (second - first) for first, second in pairs))


def _beside_weights(training: Training, dtype: torch.dtype, device: torch.device) -> Activations:
    model: Any = models.build(training, dtype, device)
    tokens = next(Batches(training, text_model.vocabulary(model), device))
    peaks: list[int] = []

    def came(parameter: torch.Tensor) -> None:
        parameter.grad = None
        if not peaks:
            peaks.append(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(came)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    peaks.append(torch.cuda.max_memory_allocated(device))
    del model
    gc.collect()
    return Activations(*(peak - weights for peak in peaks))


def fixed_budgets(made: overspill.Plan) -> dict[str, int]:
    return {"gpu": made.budget.device, "host": made.budget.host}


def largest_tried(job: Job, told: Told) -> dict[str, Any]:
    """By trying: for engines that do not plan."""
    device, engine = compute_device(), ENGINES[job.engine]
    engine.check(device)
    if device.type != "cuda":
        raise OptionError("expected a cuda device to run out of memory on, found none; run it on a machine with a GPU")
    engine.load()

    def attempt(sizes: Sizes) -> str | None:
        why = _out_of_memory(replace(job, training=replace(job.training, sizes=sizes)), device)
        gc.collect()  # what an unfinished step left is in cycles
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(device)
        return why and f"{why} ({left:,} bytes were left afterwards)"

    return {**asdict(search(job.search, attempt, told))}


def _out_of_memory(job: Job, device: torch.device) -> str | None:
    """One attempt: what it said, or None if it had enough."""
    engine = ENGINES[job.engine]
    try:
        model = engine.build(job, device)
        batches = Batches(job.training, text_model.vocabulary(model), device)
        ready = engine.set_up(model, job)
        for _ in range(_STEPS):
            ready.step(batches)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        return " ".join(str(error).split())
    return None


def _leap(ratio: float) -> int:
    """Places of the grid that make a size _LEAP times as large."""
    leap, size = 0, 1.0
    while size < _LEAP:
        leap, size = leap + 1, size * ratio
    return leap
