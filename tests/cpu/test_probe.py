"""`overspill probe`: measures in small where there is no GPU, keeps what it found, and reads it again."""

import json
from pathlib import Path

import pytest
import torch

from overspill.bench import probing
from overspill.errors import OptionError, OverspillError
from overspill.measured import Measured
from overspill.tiers import known, rates
from tests.commands import here


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/overspill/machine.json"


def test_what_was_measured_is_kept_and_read_again(tmp_path: Path, cache: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    told = here("probe", "--nvme", str(disk))
    assert "kept in" in told and "probe: matrix product" in told
    (entry,) = json.loads(cache.read_text()).values()
    found = entry["rates"]
    assert found["up"] is found["down"] is found["both"] is None, "there is no link without a GPU"
    measured = ("dram", "in_place", "matmul", "update", "cores", "cores_bf16", "cores_compact")
    assert min(found[name] for name in measured) > 0
    assert known.known_rates() == known.Rates(**found), "as plans see it"
    assert min(entry["disks"][str(disk)].values()) > 0
    pace = Measured("cuda", None, 1, (str(disk),)).pace()
    assert pace is not None and {"disk_read": pace.read, "disk_write": pace.write} == entry["disks"][str(disk)]
    unknown = Measured("cuda", None, 1, (str(disk), "/elsewhere")).pace()
    assert unknown is not None and unknown.read is unknown.write is None, "one of them was not measured"
    assert entry["machine"]["cores"] >= 1 and not list(disk.iterdir())
    again = here("probe", "--nvme", str(disk))
    assert "read from" in again and told.splitlines()[-10:-1] == again.splitlines()[-10:-1]
    assert "read from" in here("probe") and len(json.loads(cache.read_text())) == 1


@pytest.mark.parametrize("text", ["", "[1]", '{"here": 1}', "{"])
def test_a_torn_cache_is_no_cache(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert known.cached() == {}


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OptionError, match="set XDG_CACHE_HOME to another one"):
        probing._keep({})


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--nvme to be a folder"):
        here("probe", "--nvme", str(tmp_path / "missing"))
    with pytest.raises(OverspillError, match="expected a folder at nvme path"):
        rates.disk(tmp_path / "missing", small=True)


def test_without_a_gpu_there_is_no_link() -> None:
    assert rates.link(torch.device("cpu")) == {}
