"""Stock Transformers models train bit for bit as in the plain loop, wherever their bytes live."""

import dataclasses
import functools
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

import overspill
from overspill.program import Kind
from tests.places import PLACES, mixed_budgets, prepare_tight
from tests.reference import Recipe, differing, train, weights
from tests.zoo import ALL, EVERYWHERE, ZOO, Architecture, loss_of

MICRO_BATCHES = 3
REPRESENTATIVES = ["gpt2", "llama", "qwen2", "bert", "albert", "t5", "bart", "vit", "swin"]
REPRESENTATIVES += ["wav2vec2", "whisper", "dbrx", "deepseek_v3", "rwkv", "jamba", "clip", "qwen2_vl"]
FAMILIES = ["decoder", "encoder", "encoder-decoder", "vision", "audio", "moe", "state-space", "multimodal"]


LONGER = ["gpt2", "bert", "t5", "vit", "wav2vec2", "dbrx", "rwkv", "clip"]


def length(name: str) -> tuple[int, int]:
    """Steps, and passes in each: many for one of each family, fewer for the other hundred, on five placements each."""
    return 20 if name in LONGER else 6, MICRO_BATCHES if name in REPRESENTATIVES else 2


def built(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = ZOO[name].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def plainly(name: str, recipe: Recipe) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """What the plain loop makes of a recipe; first the norms of the gradients that its optimizer got."""
    model, optimizer = built(name)
    norms = []

    def note(*_: object) -> None:
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())

    optimizer.register_step_pre_hook(note)
    losses = train(model, optimizer, ZOO[name].batches(), recipe, loss_of)
    return norms, losses, weights(model)


@functools.cache
def plain(name: str) -> tuple[Recipe, list[float], dict[str, torch.Tensor]]:
    """A recipe whose clipping acts on some steps only, about half of them, and what the plain loop makes of it."""
    recipe = Recipe(*length(name))
    recipe = dataclasses.replace(recipe, clip=statistics.median(plainly(name, recipe)[0]))
    norms, losses, values = plainly(name, recipe)
    assert {norm > 0.999 * recipe.clip for norm in norms} == {True, False}, norms
    return recipe, losses, values


def check(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    recipe, losses, expected = plain(name)
    assert train(model, optimizer, ZOO[name].batches(), recipe, loss_of) == losses
    assert differing(weights(overspill.close(model)), expected) == []


def test_the_zoo_has_every_family() -> None:
    count = Counter(a.family for a in ALL)
    assert set(count) == set(FAMILIES) and min(count.values()) >= 6
    assert len(ZOO) == len(ALL) >= 68
    everywhere = Counter(a.family for a in EVERYWHERE)
    assert len(EVERYWHERE) >= 60 and set(everywhere) == set(FAMILIES) and min(everywhere.values()) >= 5


def test_two_of_each_family_run_with_every_change() -> None:
    count = Counter(ZOO[name].family for name in REPRESENTATIVES)
    assert [family for family in FAMILIES if count[family] < 2] == []
    assert [ZOO[name].family for name in LONGER] == FAMILIES


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_mixed_placement_gives_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES["mixed"], tmp_path))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("t5", "wav2vec2"))])
def test_a_solved_plan_with_weights_on_every_tier_gives_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    model, optimizer = built(name)
    check(name, *overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path)))


WHERE = [(a.name, place) for a in EVERYWHERE for place in PLACES if place != "mixed"]
WHERE += [(a.name, "mixed") for a in ALL if a.name not in REPRESENTATIVES]


@pytest.mark.full
@pytest.mark.parametrize(("name", "place"), sorted(WHERE))
def test_every_architecture_on_every_placement(name: str, place: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES[place], tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("architecture", EVERYWHERE[::2], ids=lambda a: a.name)
def test_every_other_architecture_on_a_solved_plan(architecture: Architecture, tmp_path: Path) -> None:
    model, optimizer = built(architecture.name)
    check(architecture.name, *overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path)))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(a, marks=pytest.mark.full) for a in REPRESENTATIVES[1:])])
def test_the_plain_loop_repeats_itself(name: str) -> None:
    """Else nothing could be compared with it."""
    recipe, losses, expected = plain(name)
    _, again, values = plainly(name, recipe)
    assert again == losses
    assert differing(values, expected) == []


@pytest.mark.parametrize("kind", [None, *(pytest.param(kind, marks=pytest.mark.full) for kind in Kind)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_delays_change_no_bit(name: str, kind: Kind | None, tmp_path: Path) -> None:
    """With recompute, which dropout makes as hard as it can be; the plain loop has the same."""
    recipe = Recipe(20, 2, clip=1.0)
    found = []
    for spill in (False, True):
        model, optimizer = built(name)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if spill:
            model, optimizer = prepare_tight(model, optimizer, PLACES["mixed"], tmp_path)
            delays = {kind: 0.001} if kind else dict.fromkeys(Kind, 0.0002)
            overspill.api._engine(model).executor.lanes.delays.update(delays)
        losses = train(model, optimizer, ZOO[name].batches(), recipe, loss_of)
        found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []
