"""Building on a machine with a GPU."""

from pathlib import Path

import pytest
from torch import nn

from overspill.runtime import building as module
from overspill.runtime.building import builder_of, building

pytestmark = pytest.mark.gpu


def test_parameters_on_cuda_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module._say_once.cache_clear()
    with building(nvme=tmp_path, keep=1):
        models = [nn.Linear(300, 400, device="cuda"), nn.Linear(300, 400, device="cuda"), nn.Linear(300, 400).cuda()]
    for model in models:
        assert model.weight.is_cuda and builder_of(model.weight) is None
    assert len(caplog.messages) == 1 and "cuda" in caplog.text
