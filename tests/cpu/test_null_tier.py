"""The whole engine without bytes: the null tier drops what it is given, everything else is the same."""

from pathlib import Path

import pytest
import torch

import overspill
from overspill import config
from overspill.errors import OptionError
from tests import small
from tests.reference import Recipe, train


def moved(tier: str, nvme: Path) -> tuple[dict[str, int], overspill.Plan]:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = dict.fromkeys(("weight", "grad", "state"), tier)
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", place=place, nvme=nvme)
    train(model, optimizer, small.batches(), Recipe(steps=3, clip=2.5, micro_batches=2), small.loss_of)
    report = optimizer.report()
    overspill.close(model)
    return report["moved"], report["plan"]


def test_null_runs_the_same_ops_and_takes_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"one of \('device', 'host', 'nvme'\), found 'weight': 'null'"):
        moved("null", tmp_path)
    monkeypatch.setattr(config, "PLACES", (*config.PLACES, "null"))
    on_host, planned = moved("host", tmp_path)
    on_null, without = moved("null", tmp_path)
    assert on_null == on_host and on_host["up"] > 0
    assert planned.peak("host") > 0 and without.peak("host") == without.peak("nvme") == 0


def test_traffic_is_what_the_simulator_says(tmp_path: Path) -> None:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = {"weight": "host", "grad": "nvme", "state": "nvme"}
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", place=place, nvme=tmp_path)
    train(model, optimizer, small.batches(), Recipe(steps=4), small.loss_of)
    report = optimizer.report()
    planned = report["plan"].moved
    assert report["moved"]["read"] == planned["read"]
    assert report["moved"]["write"] == planned["write"]
    assert report["moved"]["down"] == planned["down"]
    # The tied embedding is needed at both ends of forward and backward, which the prediction does not foresee.
    assert report["moved"]["up"] <= planned["up"] + 2 * report["plan"].model.units[0].weight_bytes
