"""Building on a machine with a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.runtime.building import builder_of, building
from overspill.runtime.door import say_once
from overspill.units.initial import Initialiser
from tests.reference import differing

pytestmark = pytest.mark.gpu


def test_parameters_on_cuda_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with building(nvme=tmp_path, keep=1):
        models = [nn.Linear(300, 400, device="cuda"), nn.Linear(300, 400, device="cuda"), nn.Linear(300, 400).cuda()]
    for model in models:
        assert model.weight.is_cuda and builder_of(model.weight) is None
    assert len(caplog.messages) == 1 and "cuda" in caplog.text


class Mixing(nn.Module):
    """Its initialiser needs its parameter where its own numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(300))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.weight.zero_() + (torch.ones(300) if not self.weight.is_meta else self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("mixing", [False, True])
def test_first_values_are_made_on_the_gpu(mixing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    fill = Initialiser._fill

    def seen(self: Initialiser, params: Any, device: torch.device) -> dict[str, torch.Tensor]:
        devices.append(device.type)
        return fill(self, params, device)

    monkeypatch.setattr(Initialiser, "_fill", seen)

    def values() -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(300, 300), *([Mixing()] if mixing else []), nn.Linear(300, 300))
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = overspill.prepare(model, optimizer, gpu="1GB", host="1GB", precision="fp32")
        model(torch.ones(2, 300, device="cuda")).sum().backward()
        return {name: value.clone() for name, value in overspill.close(model).state_dict().items()}

    first, second = values(), values()
    assert not differing(first, second)
    assert all(value.is_floating_point() and value.isfinite().all() for value in first.values())
    assert 0.03 < first["0.weight"].std() < 0.035, "the uniform numbers of a Linear's own initialiser"
    assert devices[0] == "cuda" and ("cpu" in devices) == mixing
