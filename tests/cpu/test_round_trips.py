"""What goes into a model comes out of it again: through checkpoints, folders of weights, exports, and `close`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import overspill
from overspill.errors import ModelError
from tests.reference import same_bits

ROOM: dict[str, Any] = {"gpu": "64MiB", "host": "64MiB"}
AWAY = {"weight": "host", "grad": "host", "state": "host"}


def prepared(model: nn.Module, precision: str = "fp32", **keywords: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return overspill.prepare(model, optimizer, precision=precision, **{**ROOM, **keywords})


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Masked(nn.Module):
    def __init__(self, mask: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", mask, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def test_a_shared_buffer_is_saved_once_and_loaded(tmp_path: Path) -> None:
    mask = torch.ones(4)
    model, optimizer = prepared(nn.Sequential(Masked(mask), Masked(mask)))
    mask.fill_(3)
    overspill.save(tmp_path / "saved", model, optimizer)
    mask.zero_()
    overspill.load(tmp_path / "saved", model, optimizer)
    assert torch.equal(model[1].mask, torch.full((4,), 3.0))


def test_an_expanded_buffer_is_loaded(tmp_path: Path) -> None:
    model, optimizer = prepared(Masked(torch.ones(1, 1).expand(4, 4), persistent=False))
    overspill.save(tmp_path / "saved", model, optimizer)
    overspill.load(tmp_path / "saved", model, optimizer)
    assert torch.equal(model(torch.zeros(4, 4)), model.linear(torch.zeros(4, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("meta", [True, False])
def test_buffers_come_from_the_folder_too(meta: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    given: Any = build()
    given[1].running_mean.fill_(3)
    save_file(given.to(dtype).state_dict(), tmp_path / "model.safetensors")
    model, _ = prepared(on_meta(build) if meta else build(), weights=tmp_path)
    assert torch.equal(model[1].running_mean, torch.full((8,), 3.0))
    descriptors = len(os.listdir("/proc/self/fd"))
    prepared(build(), weights=tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "the file is closed again"


def test_what_set_gives_a_parameter_is_what_is_trained(tmp_path: Path) -> None:
    """torch does not tell of `set_`, which parametrizations use."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.utils.parametrizations.orthogonal(nn.Linear(160, 160))

    with overspill.building(nvme=tmp_path, keep="64KiB"):
        built = build()
    before = built.weight.detach().clone()
    model, _ = prepared(built)
    assert same_bits(model.weight.detach(), before) and same_bits(before, build().weight.detach())


def test_a_parameter_on_meta_stays_what_it_is() -> None:
    class Own(nn.Parameter):
        pass

    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8)))
    model[0].bias = Own(model[0].bias.data)
    weight, came = model[0].weight, []
    weight.register_hook(lambda gradient: gradient * 0)
    weight.register_post_accumulate_grad_hook(lambda p: came.append(p))
    weight.mark = 7
    model, _ = prepared(model)
    model(torch.randn(2, 8)).sum().backward()
    assert model[0].weight is weight and weight.mark == 7 and len(came) == 1
    assert not overspill.grad(weight).any()
    assert isinstance(overspill.close(model)[0].bias, Own)


@pytest.mark.parametrize("place", [None, AWAY], ids=["here", "away"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_meta(kind: Any, place: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = kind(8, 8)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, ours = prepared(on_meta(lambda: kind(8, 8)), weights=tmp_path, place=place)
    for each, steps in ((plain, optimizer), (model, ours)):
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            each(torch.randn(2, 3, 8, generator=generator))[0].square().sum().backward()
            steps.step()
            steps.zero_grad()
    closed = overspill.close(model)
    assert all(same_bits(p, q) for p, q in zip(closed.parameters(), plain.parameters(), strict=True))
    assert torch.equal(closed(torch.ones(2, 3, 8))[0], plain(torch.ones(2, 3, 8))[0])


def bf16() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).bfloat16()


def test_weights_that_came_in_16_bits_leave_as_they_are(tmp_path: Path) -> None:
    """Not as torch rounds their masters."""
    model = bf16()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = overspill.prepare(model, optimizer, precision="bf16", **ROOM)
    for _ in range(4):
        x = torch.randn(8, 512, dtype=torch.bfloat16)
        step(model, optimizer, x)
    overspill.export(model, tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(x)
        closed = overspill.close(model)
        assert torch.equal(closed(x), expected)
        closed.load_state_dict(exported)
        assert torch.equal(closed(x), expected)


def test_a_closed_model_that_came_in_16_bits_trains_on() -> None:
    model = bf16()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = overspill.prepare(model, given, precision="bf16", **ROOM)
    x = torch.randn(8, 512, dtype=torch.bfloat16)
    step(model, optimizer, x)
    overspill.close(model)
    assert {state["exp_avg"].dtype for state in given.state.values()} == {torch.bfloat16}
    step(model, given, x)


def test_state_dicts_inside_of_full_are_those_of_masters() -> None:
    model, _ = prepared(nn.Sequential(nn.Linear(8, 8)), "bf16")
    new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    with overspill.full(model):
        model.load_state_dict(new)
        inside = model.state_dict()
    for found in (inside, model.state_dict()):
        assert all(same_bits(found[name], value) for name, value in new.items())


def test_parameters_may_have_the_names_of_step_counts(tmp_path: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * sum(self.body)

    model, optimizer = prepared(Listed())
    step(model, optimizer, torch.ones(3))
    expected = model.state_dict()
    overspill.save(tmp_path / "saved", model, optimizer)
    step(model, optimizer, torch.ones(3))
    overspill.load(tmp_path / "saved", model, optimizer)
    assert all(same_bits(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", [None, AWAY], ids=["here", "away"])
def test_states_that_have_no_room_are_refused_before_anything_is_loaded(place: Any, tmp_path: Path) -> None:
    def made(amsgrad: bool) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(64, 64))
        return overspill.prepare(
            model, torch.optim.AdamW(model.parameters(), amsgrad=amsgrad), precision="fp32", place=place, **ROOM
        )

    model, optimizer = made(True)
    step(model, optimizer, torch.ones(2, 64))
    overspill.save(tmp_path / "saved", model, optimizer)
    other, steps = made(False)
    before = other.state_dict()
    if place is None:
        # On the device they may grow.
        overspill.load(tmp_path / "saved", other, steps)
    else:
        with pytest.raises(ModelError, match=r"0\.weight"):
            overspill.load(tmp_path / "saved", other, steps)
        assert all(same_bits(value, before[name]) for name, value in other.state_dict().items())
    step(other, steps, torch.ones(2, 64))


def test_a_load_leaves_the_format_of_states_alone(tmp_path: Path) -> None:
    def made(states: str) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(64, 64))
        groups = [{"params": list(model.parameters()), "states": states}]
        return overspill.prepare(model, torch.optim.AdamW(groups, lr=1e-2), precision="bf16", **ROOM)

    model, optimizer = made("compact")
    step(model, optimizer, torch.ones(2, 64))
    overspill.save(tmp_path / "saved", model, optimizer)
    for way in ("checkpoint", "state dict"):
        other, steps = made("exact")
        if way == "checkpoint":
            overspill.load(tmp_path / "saved", other, steps)
        else:
            steps.load_state_dict(optimizer.state_dict())
        assert steps.param_groups[0]["states"] == "exact", way


def test_an_exported_config_has_the_dtype_of_its_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, dtype="bfloat16")
    model, _ = prepared(LlamaForCausalLM(config))
    overspill.export(model, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32


def test_adapters_with_buffers_are_exported(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x))

    torch.manual_seed(0)
    base = Normed()
    kept = {name: value.clone() for name, value in base.state_dict().items()}
    lora: Any = LoraConfig(r=2, target_modules=["linear"], modules_to_save=["bn"])
    model, optimizer = prepared(get_peft_model(base, lora))  # type: ignore[arg-type]
    x = torch.randn(16, 8)
    step(model, optimizer, x)
    overspill.export(model, tmp_path)
    again = Normed()
    again.load_state_dict(kept)
    loaded = PeftModel.from_pretrained(again, tmp_path)  # type: ignore[arg-type]
    assert torch.equal(loaded.eval()(x), overspill.close(model).eval()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_steps_are_counted_whatever_the_default_dtype_is(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = prepared(nn.Linear(4, 4), "bf16")
    step(model, optimizer, torch.ones(2, 4))
    optimizer.state_dict()
    optimizer.load_state_dict(with_steps(optimizer.state_dict(), 259.0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        counts = [state["step"] for state in optimizer.state_dict()["state"].values()]
    finally:
        torch.set_default_dtype(before)
    assert [(count.item(), count.dtype) for count in counts] == [(259.0, torch.float32)] * 2


def with_steps(state: dict[str, Any], count: float) -> dict[str, Any]:
    for each in state["state"].values():
        each["step"] = torch.tensor(count)
    return state


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_default_device_is_the_users_business(precision: str, tmp_path: Path) -> None:
    """As torch.set_default_device("cuda") at the top of a script; here one that loses whatever is made on it."""

    def run(device: str) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        x, folder = torch.randn(4, 16), tmp_path / device
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.set_default_device(device)
        try:
            place = {"weight": "host", "grad": "host", "state": "nvme"}
            model, ours = overspill.prepare(model, optimizer, precision=precision, place=place, nvme=tmp_path, **ROOM)
            for _ in range(2):
                step(model, ours, x)
            overspill.save(folder / "saved", model, ours)
            step(model, ours, x)
            overspill.load(folder / "saved", model, ours)
            overspill.export(model, folder / "exported")
            found = model.state_dict(), ours.state_dict()["state"]
            overspill.close(model)
        finally:
            torch.set_default_device(None)
        return found

    (weights, states), (other_weights, other_states) = run("cpu"), run("meta")
    assert all(same_bits(value, other_weights[name]) for name, value in weights.items())
    for index, state in states.items():
        assert all(same_bits(value, other_states[index][key]) for key, value in state.items())


def test_real_and_complex_parameters_of_one_shape() -> None:
    """Their states differ in size."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.randn(30, 40))
            self.complex = nn.Parameter(torch.randn(30, 40, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.real).square().sum() + (x.to(torch.complex64) @ self.complex).abs().square().sum()

    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Both()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if ours:
            model, optimizer = overspill.prepare(model, optimizer, precision="fp32", place=AWAY, **ROOM)
        for _ in range(3):
            model(torch.ones(2, 30)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in (overspill.close(model) if ours else model).parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
