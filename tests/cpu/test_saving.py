"""Checkpoints: everything comes back, into any placement, precision and way of updating."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import ModelError, OverspillError, StateError, TierError
from tests import small
from tests.places import PLACES
from tests.reference import Recipe, differing, train, weights

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
}
RECIPE = Recipe(3, clip=1.0)


def made(nvme: Path, place: str = "mixed", optimizer: str = "adamw", **keywords: Any) -> Any:
    model = small.build()
    return overspill.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), place=PLACES[place], nvme=nvme, **keywords
    )


def stretch(model: nn.Module, optimizer: Any, skip: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    stream = small.batches()
    for _ in range(skip):
        next(stream)
    return train(model, optimizer, stream, RECIPE, small.loss_of), weights(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_continues_to_the_same_bits(optimizer: str, precision: str, tmp_path: Path) -> None:
    how = {"optimizer": optimizer, "precision": precision}
    model, steps = made(tmp_path, "mixed", **how)
    stretch(model, steps)
    overspill.save(tmp_path / "saved", model, steps, {"rng": torch.get_rng_state(), "note": ("a", 1.5, None)})
    expected = stretch(model, steps, skip=3)
    for place in ("nvme", "device"):
        model, steps = made(tmp_path, place, **how)
        extra = overspill.load(tmp_path / "saved", model, steps)
        assert extra["note"] == ("a", 1.5, None) and extra["rng"].dtype == torch.uint8
        found = stretch(model, steps, skip=3)
        assert found[0] == expected[0]
        assert differing(found[1], expected[1]) == []


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_any_precision_loads_any_other(saved: str, loaded: str, kernels: str, tmp_path: Path) -> None:
    model, steps = made(tmp_path, precision=saved)
    stretch(model, steps)
    overspill.save(tmp_path / "saved", model, steps)
    values, states = weights(model), steps.state_dict()["state"]
    model, steps = made(tmp_path, "nvme", precision=loaded, kernels=kernels)
    overspill.load(tmp_path / "saved", model, steps)
    assert differing(weights(model), values) == []
    for index, state in steps.state_dict()["state"].items():
        assert all(torch.equal(v, states[index][k]) for k, v in state.items())


def test_schedules_groups_and_scales_come_back(tmp_path: Path) -> None:
    model, steps = made(tmp_path, precision="fp16")
    stretch(model, steps)
    steps.param_groups[0]["lr"] = 0.125
    scale = overspill.api._engine(model).parts.scale
    scale.load({"value": 1024.0, "good_steps": 7, "skipped": 2})
    overspill.save(tmp_path / "saved", model, steps)
    model, steps = made(tmp_path, precision="fp16")
    groups = steps.param_groups
    overspill.load(tmp_path / "saved", model, steps)
    assert steps.param_groups is groups and groups[0]["lr"] == 0.125
    assert steps.report()["loss_scale"] == 1024.0 and steps.report()["skipped"] == 2


def test_saving_again_replaces_and_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    model, steps = made(tmp_path)
    overspill.save(tmp_path / "saved", model, steps, 1)
    stretch(model, steps)
    overspill.save(tmp_path / "saved", model, steps, 2)
    with pytest.raises(OverspillError):
        overspill.save(tmp_path / "saved", model, steps, {"no": object()})
    assert overspill.load(tmp_path / "saved", model, steps) == 2
    assert [p.name for p in tmp_path.iterdir() if "saved" in p.name] == ["saved"]


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, steps = made(tmp_path)
    overspill.save(tmp_path / "saved", model, steps)
    before = None
    for build, optimizer, message in (
        (lambda: small.build(blocks=2), "adamw", "tensors that differ"),
        (small.build, "sgd", "was made with SGD, found one made with AdamW; use"),
    ):
        other = build()
        other, steps = overspill.prepare(other, OPTIMIZERS[optimizer](other.parameters()))
        before = weights(other)
        with pytest.raises(ModelError, match=message):
            overspill.load(tmp_path / "saved", other, steps)
        assert differing(weights(other), before) == []
    with pytest.raises(OverspillError, match="expected"):
        overspill.load(tmp_path / "nothing", other, steps)


def test_the_optimizer_must_be_the_prepared_one(tmp_path: Path) -> None:
    model = small.build()
    own = OPTIMIZERS["adamw"](model.parameters())
    model, _ = overspill.prepare(model, own)
    with pytest.raises(StateError, match=r"that overspill\.prepare returned"):
        overspill.save(tmp_path / "saved", model, own)


def test_states_of_what_is_frozen_now_stay(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        for place in ("device", "mixed"):
            model = small.build()
            own = OPTIMIZERS["adamw"](model.parameters())
            train(model, own, small.batches(), RECIPE, small.loss_of)
            frozen = model.blocks[1].up.weight.requires_grad_(False)
            expected = {k: v.clone() for k, v in own.state[frozen].items()}
            model, steps = overspill.prepare(model, own, precision=precision, place=PLACES[place], nvme=tmp_path)
            stretch(model, steps)
            found = steps.state_dict()["state"]
            index = [p is frozen for p in model.parameters()].index(True)
            assert all(torch.equal(found[index][k], v) for k, v in expected.items())
            overspill.close(model)
            assert all(torch.equal(own.state[frozen][k], v) for k, v in expected.items())


def test_settings_of_another_optimizer_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model, steps = made(tmp_path, optimizer="amsgrad")
    stretch(model, steps)
    overspill.save(tmp_path / "saved", model, steps)
    model = small.build()
    model, steps = overspill.prepare(model, torch.optim.Adam(model.parameters()))
    before = weights(model)
    with pytest.raises(ModelError, match="max_exp_avg_sq"):
        overspill.load(tmp_path / "saved", model, steps)
    assert differing(weights(model), before) == []


def test_buffers_that_come_and_go_are_not_required(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("cache", torch.empty(0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = x.detach().clone()
            return self.layer(x)

    def built() -> Any:
        model = Cached()
        return overspill.prepare(model, OPTIMIZERS["adamw"](model.parameters()), precision="fp32")

    model, steps = built()
    model(torch.ones(2, 3)).sum().backward()
    steps.step()
    overspill.save(tmp_path / "saved", model, steps)
    again, others = built()
    overspill.load(tmp_path / "saved", again, others)
    assert differing(weights(again), weights(model)) == []


def damaged(saved: Path, file: str) -> Path:
    """A checkpoint of which the last tensor of a file is not as it was saved, as only its checksum tells."""
    path = saved.with_name(f"damaged {file}")
    shutil.copytree(saved, path)
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)
    return path


@pytest.mark.parametrize("file", ["weights.safetensors", "states.safetensors"])
@pytest.mark.parametrize("place", ["device", "mixed", "nvme"])
def test_nobody_goes_on_with_half_a_checkpoint(place: str, file: str, tmp_path: Path) -> None:
    model, steps = made(tmp_path, place)
    stretch(model, steps)
    overspill.save(tmp_path / "saved", model, steps, "extra")
    expected = stretch(model, steps, skip=3)
    torn = damaged(tmp_path / "saved", file)
    model, steps = made(tmp_path, place)
    stretch(model, steps)
    weights_then, states_then = model.state_dict(), steps.state_dict()
    with pytest.raises(TierError, match="crc32"):
        overspill.load(torn, model, steps)
    uses: dict[str, Callable[[], Any]] = {
        "training": lambda: stretch(model, steps),
        "evaluation": lambda: small.loss_of(model.eval(), next(small.batches())),
        "step": steps.step,
        "a weight": lambda: model.last.weight.sum(),
        "state_dict": model.state_dict,
        "states": steps.state_dict,
        "full": lambda: overspill.full(model).__enter__(),
        "save": lambda: overspill.save(tmp_path / "after", model, steps),
        "export": lambda: overspill.export(model, tmp_path / "exported"),
        "close": lambda: overspill.close(model),
    }
    for name, use in uses.items():
        with pytest.raises(StateError, match=r"found that a load of '.*damaged .* failed .*; load a whole"):
            use()
            pytest.fail(f"{name} did not raise")
    with pytest.raises(TierError):
        overspill.load(tmp_path / "nothing", model, steps)
    with pytest.raises(StateError, match="load a whole checkpoint"):
        model.state_dict()
    # Each makes whole what it loads.
    steps.load_state_dict(states_then)
    with pytest.raises(StateError, match="load a whole checkpoint"):
        stretch(model, steps)
    model.load_state_dict(weights_then)
    assert differing(weights(model), weights_then) == []
    assert overspill.load(tmp_path / "saved", model.train(), steps) == "extra"
    found = stretch(model, steps, skip=3)
    assert found[0] == expected[0] and differing(found[1], expected[1]) == []
    overspill.close(model)


def test_a_load_that_is_refused_at_once_changes_nothing(tmp_path: Path) -> None:
    model, steps = made(tmp_path)
    overspill.save(tmp_path / "saved", model, steps)
    before = stretch(model, steps)[1]
    with open(tmp_path / "saved" / "states.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(TierError, match="5000"):
        overspill.load(tmp_path / "saved", model, steps)
    assert differing(weights(model), before) == []
    stretch(model, steps)
