"""Stock Transformers models train bit for bit as in the plain loop, wherever their bytes live."""

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
from tests.zoo import ALL, ZOO, Architecture, loss_of

MICRO_BATCHES = 3
REPRESENTATIVES = ["gpt2", "llama", "qwen2", "bert", "albert", "t5", "bart", "vit", "swin"]
REPRESENTATIVES += ["wav2vec2", "whisper", "dbrx", "deepseek_v3", "rwkv", "jamba", "clip", "qwen2_vl"]
FAMILIES = ["decoder", "encoder", "encoder-decoder", "vision", "audio", "moe", "state-space", "multimodal"]


def steps(name: str) -> int:
    """Many for those that run with every change, fewer for the other hundred, on five placements each."""
    return 20 if name in REPRESENTATIVES else 8


def built(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = ZOO[name].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def norms(name: str, clip: float) -> list[float]:
    """What the plain loop clips, step by step."""
    model, optimizer = built(name)
    found = []

    def note(*_: object) -> None:
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())

    optimizer.register_step_pre_hook(note)
    train(model, optimizer, ZOO[name].batches(), Recipe(steps(name), MICRO_BATCHES), loss_of)
    return found


@functools.cache
def plain(name: str) -> tuple[Recipe, list[float], dict[str, torch.Tensor]]:
    """A recipe whose clipping acts on about half of the steps, and what the plain loop makes of it."""
    clip = statistics.median(norms(name, torch.inf))
    recipe = Recipe(steps(name), MICRO_BATCHES, clip=clip)
    model, optimizer = built(name)
    losses = train(model, optimizer, ZOO[name].batches(), recipe, loss_of)
    return recipe, losses, weights(model)


def check(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    recipe, losses, expected = plain(name)
    assert train(model, optimizer, ZOO[name].batches(), recipe, loss_of) == losses
    assert differing(weights(overspill.close(model)), expected) == []


def test_the_zoo_has_every_family() -> None:
    count = Counter(a.family for a in ALL)
    assert set(count) == set(FAMILIES) and min(count.values()) >= 6
    assert len(ZOO) == len(ALL) >= 68


def test_two_of_each_family_run_with_every_change() -> None:
    count = Counter(ZOO[name].family for name in REPRESENTATIVES)
    assert [family for family in FAMILIES if count[family] < 2] == []


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_mixed_placement_gives_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES["mixed"], tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "t5", "wav2vec2"])
def test_a_solved_plan_with_weights_on_every_tier_gives_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    model, optimizer = built(name)
    check(name, *overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path)))


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("architecture", ALL, ids=lambda a: a.name)
def test_every_architecture_on_every_placement(architecture: Architecture, place: str, tmp_path: Path) -> None:
    check(architecture.name, *prepare_tight(*built(architecture.name), PLACES[place], tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("architecture", ALL, ids=lambda a: a.name)
def test_every_architecture_on_a_solved_plan(architecture: Architecture, tmp_path: Path) -> None:
    model, optimizer = built(architecture.name)
    check(architecture.name, *overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path)))


ONE_OF_ALL = [a.name if a.name == "gpt2" else pytest.param(a.name, marks=pytest.mark.full) for a in ALL]


@pytest.mark.parametrize("name", ONE_OF_ALL)
def test_the_plain_loop_repeats_itself(name: str) -> None:
    """Else nothing could be compared with it."""
    recipe, losses, expected = plain(name)
    model, optimizer = built(name)
    assert train(model, optimizer, ZOO[name].batches(), recipe, loss_of) == losses
    assert differing(weights(model), expected) == []


@pytest.mark.parametrize("name", ONE_OF_ALL)
def test_clipping_acts_on_some_steps_only(name: str) -> None:
    """Else the tests above would not show that both cases are right."""
    clip = plain(name)[0].clip
    acted = [norm > clip for norm in norms(name, clip)]
    assert True in acted and False in acted


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
