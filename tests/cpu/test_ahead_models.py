"""Stock Transformers models as they train on a GPU: updates ahead of their use by a thread, and begun in backward."""

from typing import Any

import pytest
import torch

import overspill
from overspill.plan import solver
from overspill.runtime import parts, rooms
from overspill.specs import KiB
from tests.places import PLACES
from tests.reference import Recipe, differing, train, weights
from tests.zoo import ALL, ZOO, loss_of

REPRESENTATIVES = ["llama", "t5"]
STATES = {"weight": "device", "grad": "device", "state": "host"}

UPDATES = ("lazy", "eager")
BOTH = [(name, update) for name in REPRESENTATIVES for update in UPDATES]
"""The others take turns."""
TURNS = [(a.name, UPDATES[n % 2]) for n, a in enumerate(ALL) if a.name not in REPRESENTATIVES]


def trained(name: str, clip: float | None, **keywords: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = ZOO[name].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = overspill.prepare(model, optimizer, precision="bf16", gpu="64MiB", host="256MiB", **keywords)
    assert (overspill.api._engine(model).executor.pager is not None) == (keywords["place"] is not PLACES["device"])
    losses = train(model, optimizer, ZOO[name].batches(), Recipe(6, clip=clip), loss_of)
    return losses, weights(overspill.close(model))


@pytest.mark.parametrize(("name", "update"), [*BOTH, *(pytest.param(*each, marks=pytest.mark.full) for each in TURNS)])
def test_updates_ahead_of_their_use_give_the_same_bits(name: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = 1.0 if update == "lazy" else None
    expected = trained(name, clip, place=PLACES["device"])
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(solver, "PAGE", (16 * KiB, 16 * KiB))
    places = (STATES, PLACES["host"])
    for place in places if name in REPRESENTATIVES else places[len(name) % 2 :][:1]:
        found = trained(name, clip, place=place, update=update)
        assert found[0] == expected[0]
        assert differing(found[1], expected[1]) == []
