"""States in fewer bytes: the same bits wherever they live, close to exact ones, and whole after a checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import OptionError
from overspill.kernels import codecs, cpu, masters, reference
from tests import small
from tests.places import PLACES, mixed_budgets, prepare_tight
from tests.reference import Recipe, differing, train

RECIPE = Recipe(steps=8, micro_batches=2, clip=2.5)
FORMATS = ["bf16", "compact"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}
SIZES = {"bf16": 6.0, "compact": 3 + 2 / 128}


def made(optimizer: str = "adamw", **keywords: Any) -> Any:
    model = small.build(**keywords)
    return model, OPTIMIZERS[optimizer](model.parameters())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and what the optimizer keeps."""
    found = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index} {key}": value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    return found


def trained(model: nn.Module, optimizer: Any, recipe: Recipe = RECIPE) -> tuple[list[float], dict[str, Tensor]]:
    losses = train(model, optimizer, small.batches(), recipe, small.loss_of)
    return losses, everything(model, optimizer)


PAIRS = [("adamw", "compact"), *((o, s) for o in OPTIMIZERS for s in FORMATS if (o, s) != ("adamw", "compact"))]


@pytest.mark.parametrize(
    ("optimizer", "states"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS[1:])]
)
def test_the_same_bits_wherever_they_live(optimizer: str, states: str, tmp_path: Path) -> None:
    how = {"precision": "bf16", "states": states, "micro_batches": 2}
    here = overspill.prepare(*made(optimizer), nvme=tmp_path, place=PLACES["device"], **how)
    losses, expected = trained(*here)
    for name in ("host", "nvme"):
        got, found = trained(*prepare_tight(*made(optimizer), PLACES[name], tmp_path, **how))
        assert got == losses and differing(found, expected) == [], name
    solved = made(optimizer)
    got, found = trained(*overspill.prepare(*solved, **mixed_budgets(*solved, tmp_path, **how)))
    assert got == losses and differing(found, expected) == []


@pytest.mark.parametrize("states", FORMATS)
def test_the_same_bits_without_the_native_library(states: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses, expected = trained(*overspill.prepare(*made(), nvme=tmp_path, place=PLACES["host"], states=states))
    calls = []
    monkeypatch.setattr(cpu.How, "best", staticmethod(lambda: calls.append(1)))
    got, found = trained(*overspill.prepare(*made(), nvme=tmp_path, place=PLACES["host"], states=states))
    assert calls and got == losses and differing(found, expected) == []


@pytest.mark.parametrize("states", FORMATS)
def test_fp16_too(states: str, tmp_path: Path) -> None:
    how = {"precision": "fp16", "states": states, "micro_batches": 2}
    losses, expected = trained(*overspill.prepare(*made(), nvme=tmp_path, place=PLACES["device"], **how))
    got, found = trained(*prepare_tight(*made(), PLACES["mixed"], tmp_path, **how))
    assert got == losses and differing(found, expected) == []


@pytest.mark.parametrize("states", FORMATS)
def test_one_step_is_the_rule_between_loading_and_keeping(states: str) -> None:
    """By hand, for one matrix: what is kept is loaded, updated by the reference, and kept again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, bias=False))
    weight = model[0].weight.detach().clone().flatten()
    model, optimizer = overspill.prepare(
        model, OPTIMIZERS["adamw"](model.parameters()), states=states, place=PLACES["device"], gpu="1GB", host="1GB"
    )
    x, hypers = torch.randn(7, 40), optimizer.param_groups[0]
    kept = torch.empty(1200, dtype=torch.int8 if states == "compact" else torch.int16)
    low = torch.empty(1200, dtype=torch.bfloat16)
    masters.split(weight, low, kept)
    m, v = torch.zeros(1200), torch.zeros(1200)
    names = ("exp_avg", "exp_avg_sq")
    for step in range(1, 6):
        model(x).float().square().sum().backward()
        gradient = overspill.grad(model[0].weight).flatten()
        optimizer.step()
        optimizer.zero_grad()
        master = masters.join(low, kept)
        reference._adam(master, gradient, [m, v], hypers, step, reference.ieee_root)
        noise = codecs.chance(0, 1200, codecs.key_of(0, step), torch.device("cpu"))
        arrays = empty_arrays(states)
        codecs.keep(states, names, arrays, noise, [m, v])
        m, v = codecs.load(states, names, arrays)
        masters.split(master, low, kept, noise[1] >> 24)
        state = overspill.state(model[0].weight)
        assert torch.equal(state["exp_avg"].flatten(), m) and torch.equal(state["exp_avg_sq"].flatten(), v), step
        assert torch.equal(model.state_dict()["0.weight"].flatten(), masters.join(low, kept)), step


def empty_arrays(states: str) -> list[Tensor]:
    if states == "bf16":
        return [torch.zeros(1200, dtype=torch.bfloat16) for _ in range(2)]
    return [torch.zeros(n, dtype=torch.uint8) for n in (1200, codecs.blocks_of(1200)) * 2]


@pytest.mark.parametrize("states", FORMATS)
def test_bytes_of_states(states: str) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    plan = overspill.plan(model, OPTIMIZERS["adamw"](model.parameters()), states=states, gpu="1GB", host="1GB")
    assert plan.model.role_bytes("state") == SIZES[states] * 1024 * 1024 <= {"bf16": 6, "compact": 3.25}[states] * 2**20
    assert f"exp_avg {'bf16' if states == 'bf16' else '8 bits'}" in str(plan)


def test_norms_and_embeddings_are_exact_unless_their_group_says_otherwise() -> None:
    def formats(groups: Callable[[Any], Any], states: str) -> dict[str, str]:
        model = small.build()
        made = overspill.plan(model, torch.optim.AdamW(groups(model)), states=states, gpu="1GB", host="1GB")
        return {p.name: p.states for unit in made.model.units for p in unit.params}

    found = formats(lambda model: model.parameters(), "compact")
    matrices = {name for name in found if name.endswith(("up.weight", "down.weight"))}
    assert len(matrices) == 8 and {name for name, states in found.items() if states == "compact"} == matrices

    def two(model: Any) -> Any:
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        others = [p for name, p in model.named_parameters() if "norm" not in name]
        return [{"params": norms, "states": "bf16"}, {"params": others}]

    mixed = formats(two, "exact")
    assert {name for name, states in mixed.items() if states == "bf16"} == {n for n in mixed if "norm" in n}
    assert set(mixed.values()) == {"exact", "bf16"}


def test_a_plan_says_how_many_parameters_have_each_format() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def heading(states: str, said: str | None = None, **keywords: Any) -> str:
        model = Large()
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wide] for wide in (True, False))
        groups = [{"params": matrices, **({"states": said} if said else {})}, {"params": rest}]
        return str(overspill.plan(model, torch.optim.AdamW(groups), states=states, **keywords)).split("\n")[0]

    told = "state exp_avg 8 bits, exp_avg_sq 8 bits (compact for 3.15 M parameters, exact for 3.07 K)"
    assert told in heading("compact") == heading("exact", "compact")
    assert "master 24 bits" in heading("compact")
    assert "state exp_avg fp32, exp_avg_sq fp32)" in heading("exact")
    assert "as the optimizer makes it)" in heading("exact", precision="fp32")


def test_groups_of_several_formats_train_the_same_everywhere(tmp_path: Path) -> None:
    def built() -> Any:
        model = small.build()
        ups = [p for name, p in model.named_parameters() if "up" in name]
        downs = [p for name, p in model.named_parameters() if "down" in name]
        rest = [p for name, p in model.named_parameters() if "up" not in name and "down" not in name]
        groups = [{"params": ups, "states": "compact"}, {"params": downs, "states": "bf16"}, {"params": rest}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    losses, expected = trained(*overspill.prepare(*built(), nvme=tmp_path, place=PLACES["device"], micro_batches=2))
    got, found = trained(*prepare_tight(*built(), PLACES["nvme"], tmp_path, precision="bf16", micro_batches=2))
    assert got == losses and differing(found, expected) == []


@pytest.mark.parametrize("states", FORMATS)
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(states: str, tmp_path: Path) -> None:
    how = {"precision": "bf16", "states": states, "micro_batches": 2}
    model, optimizer = overspill.prepare(*made(), nvme=tmp_path, place=PLACES["device"], **how)
    stream = small.batches()
    train(model, optimizer, stream, RECIPE, small.loss_of)
    overspill.save(tmp_path / "checkpoint", model, optimizer)
    kept = everything(model, optimizer)
    losses = train(model, optimizer, stream, RECIPE, small.loss_of)
    expected = everything(model, optimizer)

    again, other = prepare_tight(*made(seed=1), PLACES["mixed"], tmp_path, **how)
    overspill.load(tmp_path / "checkpoint", again, other)
    assert differing(everything(again, other), kept) == []
    stream = small.batches()
    for _ in range(RECIPE.steps * RECIPE.micro_batches):
        next(stream)
    assert train(again, other, stream, RECIPE, small.loss_of) == losses
    assert differing(everything(again, other), expected) == []


@pytest.mark.parametrize("states", FORMATS)
def test_what_never_had_a_step_has_no_state_after_loading(states: str, tmp_path: Path) -> None:
    """Whose first numbers torch's Adagrad gives as a whole number."""

    def built(seed: int) -> Any:
        model = small.build(seed)
        model.unused = nn.Parameter(torch.ones(7, 5))
        steps = torch.optim.Adagrad(model.parameters(), lr=1e-2)
        return overspill.prepare(model, steps, nvme=tmp_path, place=PLACES["host"], states=states, micro_batches=2)

    model, optimizer = built(0)
    train(model, optimizer, small.batches(), RECIPE, small.loss_of)
    overspill.save(tmp_path / "checkpoint", model, optimizer)
    again, other = built(1)
    overspill.load(tmp_path / "checkpoint", again, other)
    assert differing(everything(again, other), everything(model, optimizer)) == []
    assert not overspill.state(again.unused)


@pytest.mark.parametrize("states", FORMATS)
def test_states_close_to_exact_ones(states: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=60, micro_batches=1)
    exact, _ = trained(*overspill.prepare(*made(), nvme=tmp_path, place=PLACES["device"]), recipe)
    close, _ = trained(*overspill.prepare(*made(), nvme=tmp_path, place=PLACES["device"], states=states), recipe)
    assert exact != close
    assert abs(sum(exact[-10:]) / sum(close[-10:]) - 1) < 0.02


def test_what_cannot_keep_them_so_is_refused() -> None:
    model = small.build()
    cases = [
        (torch.optim.AdamW(model.parameters()), {"precision": "fp32"}),
        (torch.optim.AdamW(model.parameters()), {"kernels": "torch"}),
        (torch.optim.RAdam(model.parameters()), {}),
    ]
    for optimizer, keywords in cases:
        with pytest.raises(OptionError, match="expected states='exact' where the optimizer's own step runs"):
            overspill.prepare(model, optimizer, states="compact", **keywords)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "states": "8bit"}])
    with pytest.raises(OptionError, match="expected 'states' of a parameter group to be one of"):
        overspill.prepare(model, optimizer)
