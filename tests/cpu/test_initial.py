"""A model on meta gets first values from its own initialisers, unit by unit, and the buffers of an ordinary build."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from overspill.errors import ModelError
from overspill.specs import StateFormat
from overspill.units.initial import Initialiser, materialise_buffers
from overspill.units.layout import Forms, lay_out
from tests.reference import same_bits
from tests.zoo import ZOO

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """A parent that writes to its children, a tied head, and marks on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 40, padding_idx=3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)) for _ in range(3))
        self.head = nn.Linear(40, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.empty(50, 40))
        self.scale.factor = 5.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, std=self.scale.factor)
        for layer in self.layers:
            nn.init.normal_(layer[0].weight, std=0.01)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "lstm": lambda: nn.LSTM(20, 24, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(24, 3),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 40, batch_first=True), 3),
    "transformer": lambda: nn.Transformer(24, 2, 2, 2, 40, batch_first=True),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 40, 3), nn.PReLU(4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv1d(20, 30, 3), dim=2),
    "bilinear": lambda: nn.Bilinear(8, 9, 10),
    "half": lambda: nn.Linear(50, 40, dtype=torch.bfloat16),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def fill_by_units(model: nn.Module) -> dict[str, Tensor]:
    initialiser = Initialiser(model)
    forms = Forms(weight=None, grad=None, state=StateFormat(), state_bytes=lambda p, shape: 0)
    layout = lay_out(model, forms, page_bytes=64 << 20)
    values: dict[str, Tensor] = {}
    for unit, params in zip(layout.spec.units, layout.params, strict=True):
        named = [(spec.name, p) for spec, p in zip(unit.params, params, strict=True) if p.is_meta]
        filled = initialiser.fill(named)
        assert filled.keys() == dict(named).keys()
        values |= filled
    return values


def check_alike(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal if it is a constant; else of the same distribution, within five times the error of sampling."""
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, CPU), name
    a, b = found.double(), expected.double()
    if b.unique().numel() == 1 or torch.equal(a, b):
        assert torch.equal(a, b), name
    elif b.numel() > 30:
        assert abs(a.std() / b.std() - 1) < 5 / math.sqrt(b.numel()), name
        assert abs(a.mean() - b.mean()) < 5 * b.std() * math.sqrt(2 / b.numel()), name
        assert torch.equal(a == 0, b == 0), f"{name}: a row for padding"


def check_model(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain, meta = make(), on_meta(make)
    before = [(name, id(p), p.is_meta) for name, p in meta.named_parameters(remove_duplicate=False)]
    torch.manual_seed(1)
    values = fill_by_units(meta)
    assert before == [(name, id(p), p.is_meta) for name, p in meta.named_parameters(remove_duplicate=False)]
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert values.keys() == {name for name, p in meta.named_parameters() if p.is_meta}
    for name, value in values.items():
        check_alike(value, expected[name], name)
    persistent = meta.state_dict().keys()
    materialise_buffers(meta, CPU)
    check_buffers(meta, plain)
    assert meta.state_dict().keys() == persistent


def check_buffers(model: nn.Module, plain: nn.Module) -> None:
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype and same_bits(buffer, expected[name]), name


SET_BY_CONSTRUCTORS = ["clip", "altclip", "chinese_clip", "vilt", "blip", "longformer", "levit"]
"""They have parameters that no initialiser writes: refused, with the two other ways to get values."""


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name: str) -> None:
    check_model(PLAIN[name])


@pytest.mark.parametrize("name", [name for name in ZOO if name not in SET_BY_CONSTRUCTORS])
def test_stock_models(name: str) -> None:
    check_model(ZOO[name].build)


def test_the_same_seed_gives_the_same_values() -> None:
    meta = on_meta(ZOO["llama"].build)
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(fill_by_units(meta))
    assert all(torch.equal(a, b) for a, b in zip(values[0].values(), values[1].values(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(values[0].values(), values[2].values(), strict=True))


def test_a_part_of_a_module_can_be_filled() -> None:
    meta = on_meta(Mixed)
    (bias,) = Initialiser(meta).fill([("b", meta.layers[0][0].bias)]).values()
    assert bias.shape == (40,) and bias.std() > 0 and meta.layers[0][0].weight.is_meta


def test_what_is_real_already_stays_as_it_is() -> None:
    model = on_meta(Mixed)
    model.layers[0] = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
    model.layers[0][1].running_mean.fill_(4)
    real = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    versions = [p._version for p in model.parameters()]
    fill_by_units(model)
    materialise_buffers(model, CPU)
    assert real and all(torch.equal(model.state_dict()[name], value) for name, value in real.items())
    assert versions == [p._version for p in model.parameters()]


# --- what is refused


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.raw = nn.Parameter(torch.ones(5))
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)


class Half(nn.Linear):
    """Initialises one row only."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].fill_(1)


class Zeroed(nn.Module):
    """Its constructor has the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        nn.init.zeros_(self.inner.weight)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)

    def reset_parameters(self) -> None:
        self.a.weight.mul_(self.b.weight.norm().item())


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (Raw, "raw", "unset"),
        (Raw, "counts", "unset"),
        (lambda: Half(4, 4, bias=False), "weight", "at least in part"),
        (Zeroed, "inner.weight", "2 writes where they make 1"),
        (ZOO["clip"].build, "logit_scale", "unset"),
        (Looking, "a.weight", "Looking"),
    ],
)
def test_values_that_cannot_be_repeated_are_refused(make: Callable[[], nn.Module], name: str, why: str) -> None:
    model = on_meta(make)
    p = model.get_parameter(name)
    with pytest.raises(ModelError, match=why) as caught:
        Initialiser(model).fill([(name, p)])
    assert "weights=" in str(caught.value) and "building" in str(caught.value)
    assert name in str(caught.value) or make is Looking
    assert model.get_parameter(name) is p and p.is_meta


def test_a_parametrization_of_what_has_no_initialiser_is_refused() -> None:
    model = on_meta(lambda: parametrizations.weight_norm(Raw(), "raw"))
    with pytest.raises(ModelError, match=r"raw\.original0"):
        Initialiser(model).fill([(name, p) for name, p in model.named_parameters() if "raw" in name])


def test_adapters_put_in_later_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = peft.get_peft_model(on_meta(ZOO["llama"].build), config, autocast_adapter_dtype=False)
    for name, p in model.named_parameters():
        if not p.is_meta:
            continue
        if "lora_" in name:
            with pytest.raises(ModelError, match="adapter"):
                Initialiser(model).fill([(name, p)])
        else:
            assert Initialiser(model).fill([(name, p)])[name].std() < 0.03


# --- buffers


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
        self.register_buffer("steps", torch.arange(4))
        self.again = nn.Module()
        self.again.register_buffer("steps", self.steps)


def test_buffers_that_nobody_initialises_are_named() -> None:
    model = on_meta(Masked)
    with pytest.raises(ModelError, match="'mask'"):
        materialise_buffers(model, CPU)
    assert all(b.is_meta for b in model.buffers())
    with pytest.raises(ModelError, match="'steps'"):
        materialise_buffers(model, CPU, {"mask": Masked().mask})
    assert all(b.is_meta for b in model.buffers())


def test_known_buffers_are_taken() -> None:
    plain, model = Masked(), on_meta(Masked)
    plain.norm.running_mean.fill_(3)
    known = dict(plain.named_buffers())
    plain.norm.running_mean[2] = torch.nan
    known["again.steps"] = known.pop("steps")
    del known["norm.running_var"]
    materialise_buffers(model, CPU, known)
    check_buffers(model, plain)
    assert model.steps is model.again.steps and "mask" not in model.state_dict()
    with pytest.raises(ModelError, match=r"float32 \(6,\)"):
        materialise_buffers(on_meta(Masked), CPU, {**known, "norm.running_mean": torch.ones(5)})


@pytest.mark.parametrize(
    ("room", "fails", "tried"),
    [
        (3 * 1600 * 4, False, ["cuda", "cuda"]),
        (3 * 1600 * 4 - 1, False, ["cpu", "cpu"]),
        (1 << 30, True, ["cuda", "cpu", "cpu"]),
    ],
    ids=["room", "no room", "in host memory only"],
)
def test_values_are_made_on_the_device_where_it_has_room(
    room: int, fails: bool, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, devices, fill = on_meta(lambda: nn.Linear(40, 40, bias=False)), list[str](), Initialiser._fill

    def seen(self: Initialiser, params: Any, device: torch.device) -> dict[str, Tensor]:
        devices.append(device.type)
        if fails and device.type == "cuda":
            raise ModelError("mixed devices")
        return fill(self, params, CPU)

    monkeypatch.setattr(Initialiser, "_fill", seen)
    initialiser = Initialiser(model, torch.device("cuda"), room)
    for _ in range(2):
        assert initialiser.fill([("weight", model.weight)])["weight"].std() > 0.05
    assert devices == tried
