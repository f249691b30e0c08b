"""PEFT's adapters on a frozen base that lives in host memory or on disk: only the adapters change."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import overspill
from tests import zoo
from tests.places import PLACES, prepare_tight
from tests.reference import Recipe, differing, train, weights

RECIPE = Recipe(steps=4, micro_batches=2, clip=0.5)
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


@dataclass(frozen=True)
class Adapted:
    """A small stock model with adapters."""

    base: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool | None = None

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        base = zoo.ZOO[self.base].build()
        options = {"r": 3, "lora_alpha": 8, "target_modules": TARGETS[self.base], "lora_dropout": 0.1, **self.options}
        torch.manual_seed(2)
        model = peft.get_peft_model(base, peft.LoraConfig(**options))
        if self.recompute is not None:
            model.enable_input_require_grads()
            kwargs = {"use_reentrant": self.recompute}
            model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return train(model, optimizer, zoo.ZOO[self.base].batches(), RECIPE, zoo.loss_of)


CASES: dict[str, Adapted] = {
    "llama": Adapted(),
    "gpt2": Adapted("gpt2", {"fan_in_fan_out": True}),
    "rslora": Adapted(options={"use_rslora": True, "init_lora_weights": "gaussian"}),
    "dora": Adapted(options={"use_dora": True}),
    "modules to save": Adapted(options={"modules_to_save": ["lm_head", "embed_tokens"]}),
    "adapted embedding": Adapted(options={"target_modules": ["embed_tokens", "o_proj"]}),
    "biases": Adapted("gpt2", {"fan_in_fan_out": True, "bias": "lora_only"}),
    "recompute": Adapted(recompute=False),
    "reentrant recompute": Adapted(recompute=True),
}


PLACE = pytest.mark.parametrize("place", [pytest.param("host", marks=pytest.mark.full), "nvme"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@PLACE
@pytest.mark.parametrize("name", CASES)
def test_only_the_adapters_change(name: str, place: str, tmp_path: Path) -> None:
    plain, own = CASES[name].made()
    before, trained = weights(plain), {n for n, p in plain.named_parameters() if p.requires_grad}
    losses = CASES[name].train(plain, own)
    model, optimizer = prepare_tight(*CASES[name].made(), PLACES[place], tmp_path)
    assert CASES[name].train(model, optimizer) == losses
    after = weights(model)
    assert differing(after, weights(plain)) == []
    changed = set(differing(after, before))
    assert changed <= trained and any("lora" in n for n in changed)
    saved = peft.get_peft_model_state_dict(model)
    assert differing(saved, peft.get_peft_model_state_dict(plain)) == []


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    with model.disable_adapter():
        yield


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@PLACE
@pytest.mark.parametrize("state", [disabled, merged])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("dora", "modules to save"))]
)
def test_merged_and_disabled_adapters(name: str, state: Any, place: str, tmp_path: Path) -> None:
    """Between steps; what a merge makes of the base, and leaves in it, is what it makes of it in plain torch."""
    case = CASES[name]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        found: list[Any] = []
        for _ in range(2):
            found += case.train(model, optimizer)
            model.eval()
            with torch.no_grad(), state(model):
                found.append(zoo.loss_of(model, next(zoo.ZOO[case.base].batches())).item())
            model.train()
        return found

    plain, own = case.made()
    expected = run(plain, own)
    model, optimizer = prepare_tight(*case.made(), PLACES[place], tmp_path)
    assert run(model, optimizer) == expected
    assert differing(weights(model), weights(plain)) == []
    overspill.close(model)
    assert differing(weights(model.merge_and_unload()), weights(plain.merge_and_unload())) == []
