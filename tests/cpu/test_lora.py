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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_bf16_adapters_are_exported_with_their_masters(tmp_path: Path) -> None:
    """And the base, in units of its own, is never written again."""
    from safetensors.torch import load_file

    from overspill.program import Kind

    model, optimizer = CASES["llama"].made()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    model.set_adapter("default")
    before = {n: p.detach().bfloat16() for n, p in model.named_parameters() if not p.requires_grad}
    model, optimizer = overspill.prepare(
        model, optimizer, precision="bf16", place=PLACES["nvme"], nvme=tmp_path, micro_batches=RECIPE.micro_batches
    )
    engine = overspill.api._engine(model)
    frozen = {i for i, u in enumerate(engine.units) if not any(p.trainable for p in u.spec.params)}
    assert len(frozen) >= 3, "of every block, the base is a unit"
    stored, run = [], engine.executor._run
    engine.executor._run = lambda op: (stored.append(op.unit) if op.kind == Kind.STORE else None, run(op))[1]
    CASES["llama"].train(model, optimizer)
    assert stored and not frozen & set(stored)
    after = model.state_dict()
    assert differing({n: after[n] for n in before}, before) == []
    overspill.export(model, tmp_path / "out")
    overspill.export(model, tmp_path / "out")
    exported = load_file(tmp_path / "out/adapter_model.safetensors")
    masters = {n.replace(".default", ""): v for n, v in after.items() if "lora" in n and ".default" in n}
    assert differing(exported, masters) == []
    others = load_file(tmp_path / "out/other/adapter_model.safetensors")
    assert others and all("k_proj" in n for n in others)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_that_are_shared_are_exported_under_every_name(tmp_path: Path) -> None:
    model = zoo.ZOO["llama"].build()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    expected = weights(model)
    model, _ = overspill.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    overspill.export(model, tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert differing(weights(loaded), expected) == []
