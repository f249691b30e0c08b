"""Plan replay: the programs of six stock models do not change unless a commit says so.

Renew the stored ones with `python -m tests.null.test_replay`, and say in the commit why they changed.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.plan.simulate import step_events
from overspill.program import Settle, react, start
from tests.zoo import ZOO

STORED = Path(__file__).with_name("programs.json")
NAMES = ["gpt2", "llama", "bert", "t5", "vit", "mixtral"]
GIB = 2**30


def program_of(name: str) -> dict[str, Any]:
    """The ops of two steps with two micro-batches, counted by kind and hashed in their order."""
    model = ZOO[name].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place = {"weight": "host", "grad": "host", "state": "nvme"}
    machine = {"device": GIB, "host": GIB}
    made = overspill.plan(model, optimizer, place=place, nvme={".": "1GiB"}, machine=machine, precision="fp32").program
    state, ops = start(made), []
    for _ in range(2):
        for event in step_events(made, micro_batches=2):
            state, more = react(made, state, event)
            ops += more
    _, more = react(made, state, Settle())
    ops += more
    text = "\n".join(f"{op.lane} {op.kind} {op.unit} {op.item} {op.nbytes} {op.waits}" for op in ops)
    return {
        "ops": dict(sorted(Counter(str(op.kind) for op in ops).items())),
        "sha": hashlib.sha256(text.encode()).hexdigest(),
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_program_is_the_stored_one(name: str) -> None:
    assert program_of(name) == json.loads(STORED.read_text())[name]


if __name__ == "__main__":
    STORED.write_text(json.dumps({name: program_of(name) for name in NAMES}, indent=1) + "\n")
