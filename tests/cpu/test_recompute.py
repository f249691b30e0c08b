"""Backward passes that are not the mirror of forward: recompute, frozen parts, several passes, odd uses of modules.

Everywhere with no window at all, so that a unit leaves as soon as another one is needed: a use that the engine does not
know of would read freed memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from tests import small, zoo
from tests.places import PLACES, prepare_tight
from tests.reference import Recipe, differing, train, weights

RECIPE = Recipe(steps=20, micro_batches=3, clip=2.5)
AWAY = [*(pytest.param(place, marks=pytest.mark.full) for place in ("host", "nvme")), "mixed"]
LossOf = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass
class Task:
    """What to train, and how."""

    build: Callable[[], nn.Module]
    loss_of: LossOf = small.loss_of
    batches: Callable[[], Iterator[dict[str, Tensor]]] = small.batches
    recipe: Recipe = RECIPE

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.build()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Tensor]]:
        losses = train(model, optimizer, self.batches(), self.recipe, self.loss_of)
        return losses, weights(model)


def check(task: Task, place: str, nvme: Path) -> None:
    """Same losses and weights as in the plain loop."""
    losses, expected = task.train(*task.made())
    model, optimizer = prepare_tight(*task.made(), PLACES[place], nvme)
    got_losses, got = task.train(model, optimizer)
    assert got_losses == losses
    assert differing(got, expected) == []


# --- recompute


class Recomputing(small.Small):
    """Recomputes `span` blocks at a time; dropout, so that recompute must replay random numbers."""

    def __init__(self, reentrant: bool, span: int = 1) -> None:
        super().__init__(blocks=4)
        self.reentrant, self.span = reentrant, span

    def run(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + self.span]:
            x = F.dropout(block(x), 0.1)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift
        for first in range(0, len(self.blocks), self.span):
            x = checkpoint(self.run, x, first, use_reentrant=self.reentrant)
        return self.head(self.last(x))


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("span", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute_of_blocks(reentrant: bool, span: int, place: str, tmp_path: Path) -> None:
    check(Task(lambda: Recomputing(reentrant, span)), place, tmp_path)


class TwoBranches(small.Small):
    """Recomputes two blocks side by side, of which only the first counts: recompute ends in the other one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(blocks=2)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift
        x, _ = checkpoint(lambda x: [block(x) for block in self.blocks], x, use_reentrant=self.reentrant)
        return self.head(self.last(x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute_that_ends_in_another_unit(reentrant: bool, tmp_path: Path) -> None:
    check(Task(lambda: TwoBranches(reentrant)), "host", tmp_path)


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama", "t5"))])
def test_gradient_checkpointing_of_transformers(name: str, reentrant: bool, place: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = zoo.ZOO[name].build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.config.use_cache = False
        return model

    check(Task(build, zoo.loss_of, zoo.ZOO[name].batches), place, tmp_path)


# --- frozen parts


class LowRank(nn.Module):
    """A frozen linear layer with a trainable correction: the last gradient arrives before the base is used."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(recompute: bool | None = None) -> nn.Module:
    model = small.Small() if recompute is None else Recomputing(recompute)
    model.requires_grad_(False)
    model.shift.requires_grad_(recompute is not None)
    for block in model.blocks:
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return model


@pytest.mark.parametrize("place", AWAY)
def test_a_frozen_base_with_trainable_adapters(place: str, tmp_path: Path) -> None:
    check(Task(adapted), place, tmp_path)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_a_frozen_base_with_recompute(reentrant: bool, tmp_path: Path) -> None:
    check(Task(lambda: adapted(reentrant)), "mixed", tmp_path)


@pytest.mark.parametrize("place", AWAY)
def test_frozen_first_blocks(place: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = small.Small()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model

    check(Task(build), place, tmp_path)


# --- other orders of forward and backward


def two_forwards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    flipped = {name: value.flip(0, 1) for name, value in batch.items()}
    return small.loss_of(model, batch) + 0.5 * small.loss_of(model, flipped)


@pytest.mark.parametrize("place", AWAY)
def test_two_forwards_one_backward(place: str, tmp_path: Path) -> None:
    check(Task(small.Small, two_forwards), place, tmp_path)


def retained(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The graph is used twice: here, and by the loop."""
    loss = small.loss_of(model, batch)
    (0.5 * loss).backward(retain_graph=True)
    return loss


def test_two_backwards_through_one_graph(tmp_path: Path) -> None:
    check(Task(small.Small, retained), "mixed", tmp_path)


def with_evaluation(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Evaluates before each micro-batch; what it finds becomes part of the loss, so it must be right."""
    model.eval()
    with torch.no_grad():
        before = small.loss_of(model, batch)
    model.train()
    return small.loss_of(model, batch) * (1 + before)


@pytest.mark.parametrize("place", AWAY)
def test_evaluation_between_steps(place: str, tmp_path: Path) -> None:
    check(Task(lambda: Recomputing(False), with_evaluation), place, tmp_path)


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss and the squared norm of its gradient."""
    loss = small.loss_of(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.pow(2).sum() for g in gradients)


@pytest.mark.parametrize("place", AWAY)
def test_a_gradient_penalty(place: str, tmp_path: Path) -> None:
    check(Task(small.Small, penalised), place, tmp_path)


class PenalisedInput(small.Small):
    """A penalty on the gradient of an activation, taken inside forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift
        y = self.blocks[0](x)
        (slope,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        for block in self.blocks[1:]:
            y = block(y + slope.tanh())
        return self.head(self.last(y))


@pytest.mark.parametrize("place", AWAY)
def test_a_gradient_taken_inside_forward(place: str, tmp_path: Path) -> None:
    check(Task(PenalisedInput), place, tmp_path)


def test_generate_gives_the_same_tokens(tmp_path: Path) -> None:
    task = Task(zoo.ZOO["gpt2"].build, zoo.loss_of, zoo.ZOO["gpt2"].batches, Recipe(steps=5, clip=1.0))
    prompt = torch.tensor([[1, 5, 9], [1, 30, 4]])

    def said(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for _ in range(2):
            task.train(model, optimizer)
            model.eval()
            found.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), max_length=20, do_sample=False))
            model.train()
        return found

    expected = said(*task.made())
    got = said(*prepare_tight(*task.made(), PLACES["nvme"], tmp_path))
    assert [t.tolist() for t in got] == [t.tolist() for t in expected]


# --- odd uses of modules and parameters


class CallsForward(small.Small):
    """Calls `forward` of its children itself, past all hooks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding.forward(tokens) + self.shift
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.last(x))


class InnerForward(small.Small):
    """Past the hooks of what is inside of the blocks only."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.down(block.up.forward(block.norm.forward(x)).tanh()) * block.scale
        return self.head(self.last(x))


class HeadWithoutModule(nn.Module):
    """The output layer is a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.WIDTH)
        self.blocks = nn.ModuleList(small.Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


class UsesAfterwards(nn.Module):
    """Parents with parameters of their own that are used after their blocks ran."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(small.Block() for _ in range(2))
            self.gain = nn.Parameter(torch.ones(small.WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for block in self.blocks:
                y = block(y)
            return x + y * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.WIDTH)
        self.first, self.second = self.Stage(), self.Stage()
        self.mix = nn.Parameter(torch.randn(small.WIDTH, small.WIDTH) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(self.first(self.embedding(tokens)))
        return F.linear(x @ self.mix, self.embedding.weight)


class ReadsNeighbour(small.Small):
    """Every block's output is scaled by a weight of the next block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) * self.blocks[(i + 1) % len(self.blocks)].norm.weight
        return self.head(self.last(x))


class WritesInForward(small.Small):
    """An embedding that renormalises its weight in place, and blocks whose inputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.renormed = nn.Embedding(small.VOCABULARY, small.WIDTH, max_norm=0.7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.renormed(tokens)
        for block in self.blocks:
            x = block(x).mul_(0.9)
        return self.head(self.last(x))


class SameBlockTwice(small.Small):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.last(x))


class ReturnsObjects(small.Small):
    """Blocks hand their results on in a dict inside of an object."""

    class Wrapped(small.Block):
        def forward(self, state: "ReturnsObjects.Carrier") -> "ReturnsObjects.Carrier":
            return ReturnsObjects.Carrier({"x": [super().forward(state.held["x"][0])]})

    class Carrier:
        def __init__(self, held: dict[str, list[Tensor]]) -> None:
            self.held = held

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapped() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.Carrier({"x": [self.embedding(tokens)]})
        for block in self.blocks:
            state = block(state)
        return self.head(self.last(state.held["x"][0]))


ODD = [
    CallsForward,
    InnerForward,
    HeadWithoutModule,
    UsesAfterwards,
    ReadsNeighbour,
    WritesInForward,
    SameBlockTwice,
    ReturnsObjects,
]


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_odd_uses(kind: type[nn.Module], place: str, tmp_path: Path) -> None:
    check(Task(kind), place, tmp_path)


# --- graphs that do not hang on a block's output


class Auxiliary(small.Block):
    """Keeps an auxiliary loss instead of returning it: by itself, in a list, or in an object that it was given."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.gate = nn.Linear(small.WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(small.WIDTH))
        self.kept: dict[str, list[Tensor]] = {"aux": []}

    def forward(self, x: Tensor, bag: list[Tensor]) -> Tensor:
        aux = self.gate(x).pow(2).mean() + (x.tanh() * self.gain).mean()
        if self.keep == "attribute":
            self.aux = aux
        elif self.keep == "container":
            self.kept["aux"] = [aux]
        else:
            bag.append(aux)
        return super().forward(x)

    def take(self, bag: list[Tensor]) -> Tensor:
        return {"attribute": lambda: self.aux, "container": lambda: self.kept["aux"][0], "argument": bag.pop}[
            self.keep
        ]()


class WithAuxiliary(small.Small):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary(keep) for _ in range(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        bag: list[Tensor] = []
        for block in self.blocks:
            x = block(x, bag)
        aux = sum(block.take(bag) for block in reversed(self.blocks))
        return self.head(self.last(x)), aux


def added(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, aux = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + aux


def alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Only the auxiliary loss: nothing of the last block's output is in the graph."""
    return model(batch["tokens"])[1]


@pytest.mark.parametrize("keep", ["attribute", "container", "argument"])
@pytest.mark.parametrize(
    "loss_of", [pytest.param(added, id="added"), pytest.param(alone, id="alone", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("place", AWAY)
def test_an_auxiliary_loss_that_is_not_returned(place: str, loss_of: LossOf, keep: str, tmp_path: Path) -> None:
    check(Task(lambda: WithAuxiliary(keep), loss_of), place, tmp_path)


def test_a_call_that_could_not_begin_does_not_upset_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails once: the error comes out, and what is done afterwards is right."""
    task = Task(small.Small)
    losses, expected = task.train(*task.made())
    model, optimizer = prepare_tight(*task.made(), PLACES["nvme"], tmp_path)
    executor = overspill.api._engine(model).executor
    real = type(executor).__call__

    def failing(self: object, event: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(type(executor), "__call__", failing)
    with pytest.raises(OSError, match="no such luck"):
        model(next(small.batches())["tokens"])
    with pytest.raises(OSError, match="no such luck"):
        model.blocks[1](torch.randn(2, small.WIDTH))
    monkeypatch.setattr(type(executor), "__call__", real)
    got_losses, got = task.train(model, optimizer)
    assert got_losses == losses
    assert differing(got, expected) == []


def test_training_goes_on_after_an_interrupt_inside_a_call(tmp_path: Path) -> None:
    task = Task(small.Small, recipe=Recipe(steps=5))

    def interrupted(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Tensor]]:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        task.train(model, optimizer)
        hook = model.blocks[1].up.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(next(small.batches())["tokens"])
        hook.remove()
        return task.train(model, optimizer)

    losses, expected = interrupted(*task.made())
    got_losses, got = interrupted(*prepare_tight(*task.made(), PLACES["host"], tmp_path))
    assert got_losses == losses
    assert differing(got, expected) == []
