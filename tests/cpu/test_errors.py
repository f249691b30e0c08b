"""Every refusal says what was expected, what was found and what to do, and leaves the user's objects as they were."""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.config import SYNONYMS, Options
from overspill.errors import (
    BudgetError,
    ModelError,
    OptionError,
    OverspillError,
    StateError,
    TierError,
    UnknownOptionError,
)
from overspill.runtime.watch import ShapeWatch
from overspill.setup import SPARE
from tests import small
from tests.both import AWAY, HERE, adamw, everywhere, losses, prepare, train
from tests.reference import differing, weights

GPU, HOST = "64MiB", "64MiB"
THREE_PARTS = re.compile(r"expected .*, found .*; .*", re.DOTALL)


def refused(
    error: type[OverspillError],
    match: str,
    build: Callable[[], nn.Module] = small.build,
    optimizer: Any = adamw,
    **keywords: Any,
) -> str:
    """`prepare` with these keywords is refused, and the model and the optimizer then train as if nothing had been."""
    model = build()
    steps = optimizer(model)
    kept = [(p, type(p), p.data_ptr(), dict(p.__dict__)) for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attributes, groups = set(steps.__dict__), steps.param_groups
    with pytest.raises(error, match=match) as caught:
        overspill.prepare(model, steps, **keywords)
    assert THREE_PARTS.search(str(caught.value)), f"expected/found/what to do are missing in: {caught.value}"
    assert kept == [(p, type(p), p.data_ptr(), dict(p.__dict__)) for p in model.parameters()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert set(steps.__dict__) == attributes and steps.param_groups is groups
    assert not hasattr(model, "no_sync")
    if build is small.build and optimizer is adamw:
        plain = small.build()
        assert train(model, steps) == train(plain, adamw(plain))
        assert differing(weights(model), weights(plain)) == []
    return str(caught.value)


# ---- budgets


def bytes_in(message: str) -> int:
    return int(re.search(r"\((\d+) bytes\)", message)[1])


def smallest(model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> int:
    """What the refusal of a hopeless budget asks for."""
    with pytest.raises(BudgetError) as caught:
        overspill.plan(model, optimizer, **keywords)
    return bytes_in(str(caught.value))


PLACES = [None, HERE, AWAY, {"weight": "nvme", "grad": "nvme", "state": "host"}]


@pytest.mark.parametrize("place", PLACES, ids=["solved", "here", "away", "nvme"])
@pytest.mark.parametrize("blocks", [1, 12])
def test_the_smallest_gpu_budget_is_the_smallest(blocks: int, place, tmp_path: Path) -> None:
    keywords = {"host": HOST, "nvme": tmp_path, "place": place, "precision": "fp32"}

    def build():
        return small.build(blocks=blocks)

    gpu = bytes_in(refused(BudgetError, "device budget of at least", build, gpu="1KiB", **keywords))
    refused(BudgetError, "device budget of at least", build, gpu=int(0.99 * gpu), **keywords)
    plain, model = build(), build()
    model, optimizer = overspill.prepare(model, adamw(model), gpu=gpu, **keywords)
    assert train(model, optimizer) == train(plain, adamw(plain))


@pytest.mark.parametrize("place", [None, AWAY], ids=["solved", "away"])
def test_the_smallest_host_budget_is_the_smallest(place, tmp_path: Path) -> None:
    model = small.build(blocks=12)
    optimizer = adamw(model)
    gpu = smallest(model, optimizer, gpu=1, host=HOST)
    keywords = {"gpu": 2 * gpu, "place": place, "nvme": tmp_path if place else None, "precision": "fp32"}

    def build():
        return small.build(blocks=12)

    needed = bytes_in(refused(BudgetError, r"host", build, host=4096, **keywords))
    refused(BudgetError, r"host", build, host=int(0.99 * needed), **keywords)
    model, optimizer = overspill.prepare(model, optimizer, host=needed, **keywords)
    plain = build()
    assert train(model, optimizer) == train(plain, adamw(plain))


@pytest.mark.parametrize("place", [None, HERE, AWAY], ids=["solved", "here", "away"])
def test_budgets_beyond_the_memory_of_a_machine_without_a_gpu(place, tmp_path: Path, monkeypatch: Any) -> None:
    keywords = {"gpu": "1TiB", "host": "1TiB", "nvme": {tmp_path: "1GiB"}, "place": place}
    model = small.build()
    planned = overspill.plan(model, adamw(model), **keywords)
    here = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    owned = planned.peak("device") - planned.bytes_of("device", "activations")
    least = owned + planned.peak("host") - here + SPARE
    assert least > SPARE
    monkeypatch.setattr("overspill.setup.host_available", lambda: least - 1)
    refused(BudgetError, rf"fits the memory of this machine, .*\({least - 1} bytes\) are available; give", **keywords)
    assert overspill.plan(model, adamw(model), **keywords) == planned, "it may be for another machine"
    monkeypatch.setattr("overspill.setup.host_available", lambda: least)
    overspill.prepare(model, adamw(model), **keywords)


def test_copies_that_the_machine_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    train(model, optimizer, 1)
    monkeypatch.setattr("overspill.runtime.parts.host_available", lambda: 1000)
    for copies in (model.state_dict, optimizer.state_dict):
        with pytest.raises(BudgetError, match=r"expected room for .* found 1000 B .*; use overspill.save"):
            copies()
    assert model.last.state_dict().keys() == {"weight", "bias"}, "a part of it fits"


def test_copies_are_the_users_and_do_not_count_against_the_host_budget(tmp_path: Path) -> None:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = {"weight": "host", "grad": "host", "state": "host"}
    needed = overspill.plan(model, optimizer, place=place, precision="fp32").peak("host")
    model, optimizer = overspill.prepare(model, optimizer, place=place, host=needed, precision="fp32")
    train(model, optimizer, 1)
    assert model.state_dict() and optimizer.state_dict()


def test_all_weights_at_once_beyond_the_gpu_budget(tmp_path: Path) -> None:
    model = small.build(blocks=12)
    optimizer = adamw(model)
    gpu = smallest(model, optimizer, gpu=1, host=HOST)
    model, optimizer = overspill.prepare(model, optimizer, gpu=gpu, host=HOST, precision="fp32")
    train(model, optimizer)
    with (
        pytest.raises(BudgetError, match=r"expected room for all weights on the device .* found .*; raise gpu= by"),
        overspill.full(model),
    ):
        pass
    train(model, optimizer)


# ---- disks


def test_nvme_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(TierError, "found 'No such file or directory'; make it", nvme=tmp_path / "missing", place=AWAY)
    refused(TierError, "found nothing there; make it", nvme={tmp_path / "missing": "1GiB"}, place=AWAY)
    (tmp_path / "file").write_text("")
    refused(TierError, "not a folder; make it", nvme=tmp_path / "file", place=AWAY)
    refused(OptionError, r"found none; give a path", place=AWAY)
    monkeypatch.setattr("overspill.tiers.nvme.os.access", lambda *_: False)
    refused(TierError, "may not; change its mode", nvme=tmp_path, place=AWAY)


def test_nvme_paths_are_looked_at_where_nothing_goes_there(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("")
    refused(TierError, "found 'No such file or directory'; make it", nvme=tmp_path / "missing", place=HERE)
    refused(TierError, "found nothing there; make it", nvme={tmp_path / "missing": "1GiB"}, place=HERE)
    for value in (file, {file: "1GiB"}):
        refused(TierError, "something that is not a folder; make it", nvme=value, place=HERE)
    with pytest.raises(TierError, match="something that is not a folder"):
        overspill.plan(*both(), nvme=file, place=HERE)


def test_nvme_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(BudgetError, "of nvme memory, found a budget of .* room for", nvme={tmp_path: "8KiB"}, place=AWAY)
    monkeypatch.setattr("overspill.tiers.nvme.disk_free", lambda _: 8192)
    refused(TierError, r"found 8192: .*; free \d+ bytes, raise the limits, or add a path", nvme=tmp_path, place=AWAY)
    assert list(tmp_path.iterdir()) == []


# ---- options


def test_an_unknown_option_is_a_type_error_and_a_value_error() -> None:
    refused(UnknownOptionError, r"found gpus=; did you mean gpu=\?", gpus="24GiB")
    with pytest.raises(TypeError, match=r"found gpus=; did you mean gpu=\?"):
        overspill.plan(*both(), gpus="24GiB", precision="fp32")
    refused(ValueError, r"found quux=; known are delay_after, gpu, .*, zero", quux=1)
    refused(UnknownOptionError, r"found activation=; known are delay_after", activation="recompute")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cpu", "say host="),
        ("nvme_path", "say nvme="),
        ("mixed_precision", "say precision="),
        ("bf16", "say precision='bf16'"),
        ("zero_stage", "say zero="),
        ("gradient_accumulation_steps", "say micro_batches="),
        ("gradient_clipping", "call optimizer.clip_grad_norm_(...) before step()"),
        ("offload_optimizer", "set gpu= and host= (and nvme=): what does not fit these budgets is offloaded"),
    ],
)
def test_keywords_of_others_are_told_what_they_are_called_here(name: str, hint: str) -> None:
    refused(UnknownOptionError, re.escape(f"expected known options, found {name}=; {hint}") + "$", **{name: True})


def test_every_hint_names_keywords_that_are_there() -> None:
    for hint in SYNONYMS.values():
        assert set(re.findall(r"(\w+)=", hint)) <= Options.__dataclass_fields__.keys()


def both() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small.build()
    return model, adamw(model)


BAD = [
    *[{"gpu": x} for x in (0, -1, 0.0, 1.5, -0.5, 24e9, "lots", "24 XiB", "-1GiB", "0GiB", "", None, True, [1])],
    *[{"gpu": x} for x in ("24", "0", "1048575")],
    *[{"host": x} for x in (0, "24 Gigs", 2.0, False, float("nan"))],
    *[{"nvme": x} for x in (3, {"/tmp": "much"}, {"/tmp": 0}, {"/tmp": None}, {"/tmp": 0.5}, [1], {3: "1GiB"})],
    *[{"precision": x} for x in ("fp8", None, torch.float32, torch.bfloat16)],
    *[{"states": x} for x in ("int8", None, "8bit", {"a": "exact"})],
    *[{"update": x} for x in ("now", "later")],
    *[{"zero": x} for x in ("1", 4, -1, False, 0.0)],
    *[{"activations": x} for x in ("drop", True, "recompute")],
    *[{"micro_batches": x} for x in (0, -1, 1.0, "2", True, None)],
    *[{"kernels": x} for x in ("cuda", None)],
    *[{"separable": x} for x in ("yes", 1)],
    *[{"weights": 3}, {"mesh": "mesh"}],
    *[{"place": x} for x in ("host", ["host"], {"weights": "host"}, {"weight": "gpu"}, {"weight": None}, 3)],
]


@pytest.mark.parametrize("keywords", BAD, ids=str)
def test_a_bad_value_of_an_option(keywords: dict[str, Any]) -> None:
    """Named, with what is allowed and what was given; `plan` says the same."""
    (name, value), *_ = keywords.items()
    for call in (overspill.prepare, overspill.plan):
        with pytest.raises(OptionError, match=rf"^expected {name}.* found ") as caught:
            call(*both(), **keywords)
        wrong = next(iter(value.values())) if isinstance(value, dict) else value
        assert repr(wrong) in str(caught.value) or repr(value) in str(caught.value)


def test_fractions_and_sizes_that_are_right(tmp_path: Path) -> None:
    model, optimizer = both()
    machine = {"device": 2**30, "host": 2**31}

    def budget(**keywords):
        return overspill.plan(model, optimizer, machine=machine, **keywords).budget

    assert budget(gpu=0.5, host=1.0).device == 2**29
    assert budget(gpu=0.5, host=1.0).host == 2**31
    assert budget(gpu="0.5GiB", host=" 300 mb ").device == 2**29
    assert budget(gpu=2**28, host=" 300 mb ").host == 300_000_000
    assert budget(gpu="64M", host="1.5g").device == 2**26 and budget(gpu="64M", host="1.5g").host == 3 * 2**29
    assert budget(gpu="900000K", host="0.001T").device == 900_000 * 2**10
    assert budget(gpu="1048576", host="4096B").device == 2**20 and budget(gpu="1GB", host="4096B").host == 4096
    assert budget(nvme={tmp_path: "1GiB"}).nvme == 2**30
    assert budget(nvme={tmp_path: "1GiB", tmp_path / "other": 3}).nvme == 2**30 + 3
    assert budget(nvme={tmp_path: "auto"}).nvme == pytest.approx(budget(nvme=[tmp_path]).nvme, rel=0.1)


def test_a_size_whose_unit_was_forgotten_is_asked_for_it() -> None:
    refused(OptionError, r"^expected gpu= with a unit, found '24', which is 24 bytes; did you mean 24GiB or", gpu="24")
    refused(OptionError, r"up to 1, whole bytes \(an int\), or text like '24GiB', found 24000000000.0; give", gpu=24e9)


@pytest.mark.parametrize("world", [1, 4])
def test_what_auto_takes_of_another_machine_is_not_what_it_takes_here(world: int) -> None:
    """Its device has memory of its own, which its ranks need not share."""
    model, optimizer = both()
    made = overspill.plan(model, optimizer, machine={"device": 2**36, "host": 2**38}, world=world)
    assert made.budget.device == int(0.92 * 2**36) and made.budget.host == int(0.8 * 2**38) // world


# ---- models and optimizers


def test_what_is_no_model_or_no_optimizer() -> None:
    model, optimizer = both()
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module, found list"):
        overspill.prepare([model], optimizer, precision="fp32")
    with pytest.raises(ModelError, match=r"expected a torch.optim.Optimizer of your own, found type"):
        overspill.prepare(model, torch.optim.AdamW, precision="fp32")


def test_an_optimizer_of_other_parameters() -> None:
    def optimizer(model):
        other = nn.Linear(2, 3)
        return torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], 0.1)

    match = r"found parameter 0 of group 1, of shape \(3, 2\), which does not; build the optimizer from model.param"
    refused(ModelError, match, optimizer=optimizer)


@everywhere
def test_states_that_are_larger_than_the_optimizer_makes_them(place, tmp_path: Path) -> None:
    """The refusal comes late, when the weights have moved in; they move out again."""
    plain, model = small.build(), small.build()
    steps, optimizer = adamw(plain), adamw(model)
    train(plain, steps), train(model, optimizer)
    for p in model.parameters():
        optimizer.state[p]["more"] = torch.ones_like(p)
    if place == AWAY:
        with pytest.raises(
            ModelError, match=r"expected the optimizer to keep for '.*' what .*, found more: .*; a state"
        ):
            overspill.prepare(model, optimizer, place=place, nvme=tmp_path, precision="fp32")
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert list(tmp_path.iterdir()) == []
    else:
        model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=tmp_path, precision="fp32")
    assert train(model, optimizer) == train(plain, steps)


@everywhere
def test_states_that_cannot_be_taken_over(place, tmp_path: Path) -> None:
    """Whatever goes wrong, the weights move out again."""
    plain, model = small.build(), small.build()
    steps, optimizer = adamw(plain), adamw(model)
    train(plain, steps), train(model, optimizer)
    kept = {p: optimizer.state.pop(p) for p in model.parameters()}
    optimizer.state[model.last.weight] = 3
    with pytest.raises(TypeError):
        overspill.prepare(model, optimizer, place=place, nvme=tmp_path, precision="fp32")
    optimizer.state.update(kept)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert train(model, optimizer) == train(plain, steps)


@everywhere
def test_prepared_twice(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    with pytest.raises(StateError, match=r"expected a model that is not prepared, found 'embedding.weight' .*; close"):
        overspill.prepare(model, adamw(model), precision="fp32")
    with pytest.raises(ModelError, match=r"Optimizer of your own, found SpilledOptimizer"):
        overspill.prepare(small.build(), optimizer, precision="fp32")
    plain = small.build()
    assert train(model, optimizer) == train(plain, adamw(plain))


def test_a_part_of_a_prepared_model(tmp_path: Path) -> None:
    model, _ = prepare(HERE, tmp_path)
    with pytest.raises(StateError, match="in a prepared one; close that first"):
        overspill.prepare(model.blocks[1], adamw(model.blocks[1]), precision="fp32")


def test_a_model_on_meta_that_nobody_initialises(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = small.build()
    optimizer = adamw(model)
    assert overspill.plan(model, optimizer, gpu=GPU, host=HOST, precision="fp32").model.parameters > 0
    with pytest.raises(ModelError, match=r"give prepare the values with weights=FOLDER"):
        overspill.prepare(model, optimizer, precision="fp32", nvme=tmp_path, place=AWAY)
    assert all(p.is_meta for p in model.parameters()), "the model is as it was"
    assert list(tmp_path.iterdir()) == []


def test_parameters_over_the_same_memory() -> None:
    def build():
        model = small.build()
        model.head.weight = nn.Parameter(model.embedding.weight.data)
        return model

    refused(ModelError, "'embedding.weight' and 'head.weight' over the same memory; tie them", build)


@pytest.mark.parametrize("part", [slice(None), slice(1, 2), slice(-1, None)], ids=str)
def test_a_buffer_over_the_memory_of_a_parameter(part: slice) -> None:
    def build():
        model = small.build()
        model.blocks[1].register_buffer("same", model.blocks[1].up.weight.data[part])
        return model

    refused(ModelError, "'blocks.1.same' over the memory of the parameter 'blocks.1.up.weight'; clone it", build)


@everywhere
def test_sparse_gradients(place, tmp_path: Path) -> None:
    def build():
        return nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2))

    model, _ = prepare(place, tmp_path, build)
    with pytest.raises(ModelError, match=r"dense gradient for '0.weight', found torch.sparse_coo; .*sparse=False"):
        model(torch.arange(5)).sum().backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("own", [False, True], ids=["made", "given"])
@everywhere
def test_a_model_with_a_sparse_gradient_is_closed(place, own: bool, precision: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2))

    plain, model = build(), build()
    (plain(torch.arange(5)).sum() / 8).backward()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = overspill.prepare(model, given, precision=precision, place=place, nvme=tmp_path)
    with pytest.raises(ModelError, match=r"dense gradient for '0.weight'"):
        (model(torch.arange(5)).sum() / 8).backward()
    if own:
        model[0].weight.grad = plain[0].weight.grad.to(model[0].weight.dtype)
    overspill.close(model)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.dtype == p.grad.dtype == torch.float32 and p.grad.layout == q.grad.layout
        assert torch.allclose(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-2, atol=1e-3)
    given.step()
    assert torch.allclose(model[0].weight, plain[0].weight - 0.1 * plain[0].weight.grad.to_dense(), atol=1e-2)


# ---- a prepared model that changes


def anew(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(torch.ones(small.WIDTH))


CHANGES = {
    r"last.weight replaced": anew,
    r"blocks.1.norm.extra added": lambda m: setattr(m.blocks[1].norm, "extra", nn.Parameter(torch.ones(1))),
    r"last.bias removed": lambda m: delattr(m.last, "bias"),
    r"found extra added": lambda m: setattr(m, "extra", nn.Linear(2, 2)),
    r"blocks.4 added": lambda m: m.blocks.append(small.Block()),
    r"head replaced": lambda m: setattr(m, "head", nn.Linear(small.WIDTH, small.VOCABULARY)),
}


@everywhere
@pytest.mark.parametrize("match", CHANGES)
def test_a_model_that_is_changed_after_prepare(match: str, place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    for loss in losses(model, 1):
        loss.backward()
    CHANGES[match](model)
    says = rf"expected the parameters and modules that the model had at prepare, .*{match}; call overspill.close"
    with pytest.raises(ModelError, match=says):
        optimizer.step()
    with pytest.raises(ModelError, match=says):
        train(model, optimizer, 1)


@everywhere
def test_a_frozen_parameter_that_gets_a_gradient(place, tmp_path: Path) -> None:
    def build():
        model = small.build()
        model.last.weight.requires_grad_(False)
        return model

    model, optimizer = prepare(place, tmp_path, build)
    train(model, optimizer, 1)
    model.last.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"no gradient for 'last.weight', which was frozen at prepare, found one; set"):
        train(model, optimizer, 1)


# ---- steps


@everywhere
def test_a_step_or_a_clip_without_gradients(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    without = r"expected gradients at step\(\), found none on any parameter; call loss.backward\(\)"
    with pytest.raises(StateError, match=without):
        optimizer.step()
    with pytest.raises(StateError, match=r"gradients to clip, found none on any parameter; call loss.backward"):
        optimizer.clip_grad_norm_(1.0)
    train(model, optimizer, 1)
    with pytest.raises(StateError, match=without):
        optimizer.step()
    with pytest.raises(OptionError, match="without a closure, found one; evaluate the loss"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ModelError, match=r"the parameter groups of prepare, found a new one; call overspill.close"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(StateError, match=r"optimizer.state_dict\(\) to be saved, found .*; .* save its state dict"):
        pickle.dumps(optimizer)
    with pytest.raises(StateError, match="save its state dict"):
        copy.deepcopy(optimizer)


@everywhere
def test_the_users_own_optimizer_after_prepare(place, tmp_path: Path) -> None:
    model = small.build()
    own = adamw(model)
    model, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
    for loss in losses(model, 1):
        loss.backward()
    for call in (own.step, lambda: own.step(lambda: 0.0)):
        with pytest.raises(StateError, match=r"step\(\) on the optimizer that .* returned, found .*; use `model"):
            call()
    optimizer.step()


# ---- what is closed, or was never prepared


@everywhere
def test_a_closed_model(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    overspill.close(model)
    uses: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "report": optimizer.report,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "settle": lambda: overspill.settle(model),
        "full": lambda: overspill.full(model).__enter__(),
        "trace": lambda: overspill.trace(model, tmp_path / "trace.json").__enter__(),
    }
    for name, use in uses.items():
        with pytest.raises(StateError, match=r"expected a prepared model, found a closed one; .*prepare again"):
            use()
            pytest.fail(f"{name} did not raise")
    for reader in (overspill.grad, overspill.state):
        with pytest.raises(StateError, match="a parameter of a prepared model, found another tensor; pass one"):
            reader(model.last.weight)


def test_a_model_that_was_never_prepared(tmp_path: Path) -> None:
    model = small.build()
    for use in (overspill.settle, overspill.full, overspill.close):
        with pytest.raises(StateError, match=r"expected a model that .* returned, found Small .* not prepared; call"):
            use(model)
    for other in (model.last.weight, torch.zeros(3), None):
        with pytest.raises(StateError, match="a parameter of a prepared model, found another tensor; pass one"):
            overspill.grad(other)


def test_parameters_that_outlive_their_model(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    p = model.last.weight
    del model, optimizer
    gc.collect()
    with pytest.raises(StateError, match=r"expected .*, found one whose model is gone; keep the model"):
        p.sum()


def test_a_disk_that_fails_while_training(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    train(model, optimizer, 2)
    tier = overspill.api._engine(model).parts.tiers["nvme"]

    def broken(*_: Any) -> None:
        raise TierError("expected to read, found a broken disk; replace it")

    tier.load = broken
    with pytest.raises(TierError, match="broken disk"):
        train(model, optimizer, 2)
        overspill.settle(model)
    del tier.load
    stopped_for_good(model, optimizer)


def stopped_for_good(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Going on would train with weights of which some are updated and some are not."""
    for use in (lambda: train(model, optimizer), model.state_dict, lambda: overspill.close(model)):
        with pytest.raises(StateError, match=r"expected an engine that runs, found .* earlier error .*; prepare anew"):
            use()


class Failing(torch.optim.SGD):
    """Fails in the update of a unit, as it would when memory is short."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise MemoryError
        super().step()


@everywhere
def test_an_update_that_fails(place, tmp_path: Path) -> None:
    model = small.build()
    optimizer = Failing(model.parameters())
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=tmp_path, separable=True, precision="fp32")
    train(model, optimizer, 2)
    Failing.fails = True
    with pytest.raises(MemoryError):
        train(model, optimizer, 2)
    Failing.fails = False
    stopped_for_good(model, optimizer)


@pytest.mark.parametrize("value", ["", [""], {"": "1MiB"}])
def test_an_empty_nvme_path(value: Any) -> None:
    model = small.build()
    with pytest.raises(OptionError, match="found an empty path; leave it out"):
        overspill.prepare(model, adamw(model), nvme=value, precision="fp32")


def test_a_fraction_as_text() -> None:
    model = small.build()
    for text in ("0.5", "1.0", " .5"):
        with pytest.raises(OptionError, match=rf"expected gpu= as a fraction that is no text, .*, found '{text}'"):
            overspill.prepare(model, adamw(model), gpu=text, precision="fp32")


@pytest.mark.parametrize("size", ["0.5", "1.5", 0.5, 1.5, "half", "", -1, True])
def test_a_disk_takes_no_fractions_and_none_are_advised(size: Any) -> None:
    model = small.build()
    with pytest.raises(OptionError, match=r"expected nvme\['/tmp'\]= .*found ") as caught:
        overspill.plan(model, adamw(model), nvme={"/tmp": size})
    assert "fraction" not in str(caught.value)


def test_budgets_beyond_another_machine() -> None:
    model = small.build()
    for keywords in ({"gpu": "2GiB"}, {"host": 2**31 + 1}):
        with pytest.raises(OptionError, match=r"within the .* of that machine, found .*; give a smaller budget"):
            overspill.plan(model, adamw(model), machine={"device": 2**30, "host": 2**31}, **keywords)


@everywhere
def test_state_dicts_of_the_users_own_optimizer(place, tmp_path: Path) -> None:
    model = small.build()
    own = adamw(model)
    model, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
    for use in (own.state_dict, lambda: own.load_state_dict(optimizer.state_dict())):
        with pytest.raises(StateError, match="use the returned one"):
            use()
    overspill.close(model)
    own.load_state_dict(own.state_dict())


def test_a_trace_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model, _ = prepare(HERE, tmp_path)
    for path in (tmp_path / "no" / "trace.json", tmp_path):
        with pytest.raises(OptionError, match="in a folder that is there"), overspill.trace(model, path):
            raise AssertionError("refused before anything ran")


@pytest.mark.parametrize("path", [5, None, b"run", ""], ids=repr)
def test_what_is_no_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = prepare(HERE, tmp_path)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("a folder for the model", lambda: overspill.export(model, path)),
        ("the folder of a checkpoint", lambda: overspill.save(path, model, optimizer)),
        ("the folder of a checkpoint", lambda: overspill.load(path, model, optimizer)),
        ("a file for the trace", lambda: overspill.trace(model, path).__enter__()),
    ]
    for what, call in calls:
        with pytest.raises(OptionError, match=f"expected {what} as text or a pathlib.Path, found .*; give one"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_norm_and_any_number_as_torch_takes_it(tmp_path: Path) -> None:
    model, optimizer = prepare(HERE, tmp_path)
    for value in ("a", None, [1.0]):
        with pytest.raises(OptionError, match=r"expected max_norm as a number, found .*; give one"):
            optimizer.clip_grad_norm_(value)
    with pytest.raises(OptionError, match="expected norm_type as a number, found 'most'; give one"):
        optimizer.clip_grad_norm_(1.0, "most")
    plain = small.build()
    for max_norm, norm_type in ((-1.0, 2.0), (torch.tensor(0.5), "inf"), (1, 1)):
        for each in (model, plain):
            each.zero_grad()
            next(losses(each, 1)).backward()
        optimizer.clip_grad_norm_(max_norm, norm_type)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours.grad.clone(), p.grad) for ours, p in pairs)


def test_what_is_cast_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4))
    overspill.prepare(model, adamw(model), precision="fp32")
    assert [r.getMessage() for r in caplog.records if "cast" in r.message] == [
        "parameters of float64 are cast to torch.float32, which is what precision= asks for"
    ]


def test_a_module_in_the_place_of_none_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("pooler", None)
    watch = ShapeWatch(model)
    watch.check()
    del model.pooler
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="extra added"):
        watch.check()


def test_other_tensors_may_stand_in_for_parameters_in_a_call_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch, own, params = ShapeWatch(model), model[0].weight, model[0]._parameters
    params["weight"] = torch.ones(2, 2)
    watch.check(call=True)
    with pytest.raises(ModelError, match=r"0\.weight replaced"):
        watch.check()
    del params["weight"]
    params["weight"] = own
    # In another order, which is no difference.
    watch.check()
    params["more"] = None
    with pytest.raises(ModelError, match=r"0\.more added"):
        watch.check(call=True)
    del params["more"]
    model[1] = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="1 replaced"):
        watch.check(call=True)


@pytest.mark.parametrize("update", ["lazy", "delayed"])
@pytest.mark.parametrize("name", ["amsgrad", "momentum"])
def test_a_step_that_would_need_more_states(name: str, update: str, tmp_path: Path) -> None:
    """Refused before it takes anything: with the old value it goes on."""

    def run(refused_at: int) -> Any:
        model = small.build()
        kind = torch.optim.AdamW if name == "amsgrad" else torch.optim.SGD
        keywords: Any = {"update": update, "delay_after": 2, "gpu": GPU, "host": HOST, "place": AWAY}
        model, optimizer = overspill.prepare(model, kind(model.parameters(), lr=1e-2), nvme=tmp_path, **keywords)
        (group,) = optimizer.param_groups
        for step, loss in enumerate(loss for _ in range(5) for loss in losses(model, 1)):
            loss.backward()
            if step == refused_at:
                old, group[name] = group[name], 1
                with pytest.raises(ModelError, match="that it wants") as caught:
                    optimizer.step()
                assert THREE_PARTS.search(str(caught.value))
                group[name] = old
            optimizer.step()
            optimizer.zero_grad()
        return weights(overspill.close(model))

    assert differing(run(refused_at=3), run(refused_at=-1)) == []


def test_a_disk_with_two_folders_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.planning.disk_free", lambda _: 1 << 30)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = small.build()

    def room(nvme: Any) -> int:
        return overspill.plan(model, adamw(model), gpu=GPU, host=HOST, nvme=nvme).budget.nvme

    one = room(tmp_path / "a")
    assert room([tmp_path / "a", tmp_path / "b"]) == room([tmp_path / "a", tmp_path / "b" / ".." / "a"]) == one
    assert room({tmp_path / "a": "1MiB", tmp_path / "b": "2MiB"}) == 3 << 20


def test_a_stage_that_fits_is_taken_where_a_higher_one_does_not() -> None:
    """Whole matrices of all ranks pass through a collective at once, in higher stages."""
    model = nn.Sequential(nn.Linear(1000, 3000))
    optimizer = torch.optim.Adafactor(model.parameters())
    keywords: Any = {"gpu": "160MiB", "host": "1GiB", "precision": "fp32", "world": 8}
    with pytest.raises(BudgetError):
        overspill.plan(model, optimizer, zero=3, **keywords)
    assert overspill.plan(model, optimizer, **keywords).model.sharding.zero < 3
