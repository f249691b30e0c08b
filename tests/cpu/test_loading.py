"""Where values come from: a weights folder, initialisers, `building`; and back into folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import overspill
from overspill import loading
from overspill.errors import ModelError, OverspillError
from tests import small
from tests.places import PLACES
from tests.reference import Recipe, differing, same_bits, train, weights
from tests.zoo import ALL, ZOO, loss_of

NAMES = ["gpt2", "llama", "qwen2", "t5", "bert", "mixtral", "deepseek_v3", "wav2vec2", "clip", "qwen2_vl", "mamba"]
every = pytest.mark.parametrize(
    "name", [a.name if a.name in NAMES else pytest.param(a.name, marks=pytest.mark.full) for a in ALL]
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def on_meta(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)(model.config).train()


@every
def test_a_stock_folder_fills_a_model_on_meta_and_comes_out_again(name: str, tmp_path: Path) -> None:
    plain = ZOO[name].build()
    plain.save_pretrained(tmp_path / "given")
    model, _ = prepared(on_meta(plain), tmp_path, weights=tmp_path / "given")
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert differing(weights(model), weights(plain)) == []
    assert differing(dict(model.named_buffers()), dict(plain.named_buffers())) == []
    overspill.export(model, tmp_path / "out")
    loaded = type(plain).from_pretrained(tmp_path / "out")
    assert differing(weights(loaded), weights(plain)) == []


def prepared(model: nn.Module, nvme: Path, **keywords: Any) -> Any:
    keywords = {"precision": "fp32", "place": PLACES["mixed"], "nvme": nvme, **keywords}
    return overspill.prepare(model, adamw(model), **keywords)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_as_from_a_model_in_memory(precision: str, tmp_path: Path) -> None:
    plain = ZOO["llama"].build()
    plain.save_pretrained(tmp_path / "given", max_shard_size="20KB")
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 2
    found = []
    for model, keywords in ((plain, {}), (on_meta(plain), {"weights": tmp_path / "given"})):
        model, optimizer = prepared(model, tmp_path, precision=precision, **keywords)
        losses = train(model, optimizer, ZOO["llama"].batches(), Recipe(4, clip=1.0), loss_of)
        found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.checkpoint import tensorfile

    readers = []
    plain_init = tensorfile.Reader.__init__
    monkeypatch.setattr(tensorfile.Reader, "__init__", lambda self: (plain_init(self), readers.append(self))[0])
    plain = ZOO["mixtral"].build()
    plain.save_pretrained(tmp_path / "given")
    prepared(on_meta(plain), tmp_path, weights=tmp_path / "given", precision="bf16")
    stored = sum(e.nbytes for e in tensorfile.entries_of(tmp_path / "given").values())
    assert sum(r.bytes_read for r in readers) == stored


def test_a_plain_model_and_plain_names(tmp_path: Path) -> None:
    """Not of Transformers: names are equal, or it is the wrong folder."""
    plain = small.build()
    save_file({n: v.clone().contiguous() for n, v in plain.state_dict().items()}, tmp_path / "model.safetensors")
    model = small.build(seed=5)
    model, _ = prepared(model, tmp_path, weights=tmp_path)
    assert differing(weights(model), weights(plain)) == []
    overspill.export(model, tmp_path / "out")
    assert differing(load_file(tmp_path / "out/model.safetensors"), weights(plain)) == []
    small.build().load_state_dict(load_file(tmp_path / "out/model.safetensors"))


def test_missing_parameters_are_initialised_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = ZOO["llama"].build()
    kept = {n: v.contiguous() for n, v in plain.state_dict().items() if "lm_head" not in n}
    save_file({**kept, "something.else": torch.zeros(3)}, tmp_path / "model.safetensors")
    model, _ = prepared(on_meta(plain), tmp_path, weights=tmp_path)
    assert "1 parameters are not in" in caplog.text and "lm_head.weight" in caplog.text
    assert "something.else" in caplog.text
    got = weights(model)
    assert differing({n: got[n] for n in kept}, kept) == []
    assert 0 < got["lm_head.weight"].std() < 0.1


def test_wrong_folders(tmp_path: Path) -> None:
    plain = ZOO["llama"].build()
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (tmp_path / "missing", empty):
        with pytest.raises(OverspillError, match=r"expected"):
            prepared(on_meta(plain), tmp_path, weights=folder)
    save_file({"other.weight": torch.zeros(3)}, empty / "model.safetensors")
    with pytest.raises(ModelError, match=r"found none of its parameters"):
        prepared(on_meta(plain), tmp_path, weights=empty)
    shaped = {n: v.contiguous() for n, v in plain.state_dict().items()}
    shaped["model.norm.weight"] = torch.zeros(3)
    save_file(shaped, empty / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.norm.weight' of shape \(40,\), found \(3,\)"):
        prepared(on_meta(plain), tmp_path, weights=empty)
    (empty / "model.safetensors").write_text("import torch")
    with pytest.raises(OverspillError, match=r"is it a file of safetensors\?"):
        prepared(on_meta(plain), tmp_path, weights=empty)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_weights_that_mean_nothing_without_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = ZOO["llama"].build()
    given = {n: v.contiguous() for n, v in plain.state_dict().items()}
    given["model.norm.weight"] = given["model.norm.weight"].to(dtype)
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"'model.norm.weight' in torch.float64, .*, found {dtype} in"):
        prepared(on_meta(plain), tmp_path, weights=tmp_path)


def test_a_model_on_meta_is_initialised_part_by_part(tmp_path: Path) -> None:
    model = on_meta(ZOO["gpt2"].build())
    names = {id(p): n for n, p in model.named_parameters()}
    torch.manual_seed(0)
    model, optimizer = prepared(model, tmp_path, precision="bf16")
    assert {id(p): n for n, p in model.named_parameters()} == names, "the user's own parameters"
    losses = train(model, optimizer, ZOO["gpt2"].batches(), Recipe(6, clip=1.0), loss_of)
    assert all(3 < loss < 5 for loss in losses), "that of a guess among 37 tokens, log 37 = 3.6"


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_model_that_was_built_on_disk_trains_as_an_ordinary_one(name: str, tmp_path: Path) -> None:
    found = []
    for spilled in (False, True):
        if spilled:
            with overspill.building(nvme=tmp_path, keep=1):
                model = ZOO[name].build()
        else:
            model = ZOO[name].build()
        model, optimizer = prepared(model, tmp_path)
        losses = train(model, optimizer, ZOO[name].batches(), Recipe(3, clip=1.0), loss_of)
        found.append((losses, weights(overspill.close(model))))
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []
    del model, optimizer
    assert list(tmp_path.iterdir()) == []


def test_large_parameters_that_were_built_on_disk(tmp_path: Path) -> None:
    """Larger than what stays in memory anyway."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 3))

    plain = build()
    with overspill.building(nvme=tmp_path, keep=1):
        model = build()
    assert list(tmp_path.iterdir()) != []
    model, _ = prepared(model, tmp_path, precision="bf16")
    assert differing(weights(model), weights(plain)) == [], "masters are what was built"


def test_an_exported_folder_says_what_it_is(tmp_path: Path) -> None:
    model, _ = prepared(ZOO["llama"].build().bfloat16(), tmp_path, precision="bf16")
    overspill.export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert all(same_bits(tensors[n], v) for n, v in values.items())


def test_first_values_have_the_room_of_all_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step neither activations nor gradients are there."""
    found: list[int] = []
    source_of = loading.source_of

    def seen(model: Any, weights: Any, there: Any, comm: Any) -> Any:
        found.append(there[1])
        return source_of(model, weights, there, comm)

    monkeypatch.setattr(loading, "source_of", seen)
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = overspill.prepare(model, adamw(model), gpu="64MiB")
    plan = optimizer.report()["plan"]
    assert found == [plan.bytes_of("device", "activations") + plan.bytes_of("device", "grad")]
    assert plan.bytes_of("device", "grad") > 0
