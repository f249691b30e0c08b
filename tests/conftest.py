"""Models this small are slower on several threads, and much slower when the machine is busy."""

import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def command() -> list[str]:
    """The command line, in a process of its own."""
    return [sys.executable, "-m", "overspill"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one stock model are for one worker (`--dist loadgroup`), because they share what the plain loop makes of
    it."""
    for item in items:
        named, zoo = getattr(item, "callspec", None), getattr(getattr(item, "module", None), "ZOO", {})
        model = named and (named.params.get("architecture") or zoo.get(str(named.params.get("name"))))
        if model:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {model.name}"))
