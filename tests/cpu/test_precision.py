"""bf16 and fp16: the same bits wherever the bytes live, and those of a plain loop with fp32 masters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import BudgetError, StateError
from tests import small
from tests.judge import Judge
from tests.places import PLACES, prepare_tight
from tests.reference import Mixed, Recipe, differing, half_up, same_bits, train, weights
from tests.zoo import ZOO, loss_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
both = pytest.mark.parametrize("precision", ["bf16", "fp16"])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def prepared(
    nvme: Path, place: str = "mixed", build: Any = small.build, optimizer: Any = adamw, **keywords: Any
) -> Any:
    model = build()
    return overspill.prepare(model, optimizer(model.parameters()), place=PLACES[place], nvme=nvme, **keywords)


def trained(model: nn.Module, optimizer: Any, recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    losses = train(model, optimizer, small.batches(), recipe, small.loss_of)
    return losses, weights(model), optimizer.state_dict()["state"]


def same_states(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[i].keys() == b[i].keys() and all(same_bits(v.cpu(), b[i][k].cpu()) for k, v in a[i].items()) for i in a
    )


# --- the same bits everywhere


@both
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("micro_batches", "planned"), [(1, 1), pytest.param(3, 3, marks=pytest.mark.full), (3, 1)])
def test_every_placement_gives_the_same_bits(
    precision: str, kernels: str, micro_batches: int, planned: int, tmp_path: Path
) -> None:
    recipe = Recipe(6, micro_batches, clip=1.0)
    keywords = {"precision": precision, "kernels": kernels, "micro_batches": planned}
    losses, expected, states = trained(*prepared(tmp_path, "device", **keywords), recipe)
    for place in ("host", "nvme", "mixed"):
        found = trained(*prepared(tmp_path, place, **keywords), recipe)
        assert found[0] == losses
        assert differing(found[1], expected) == []
        assert same_states(found[2], states)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
        (torch.optim.RMSprop, {}),
    ],
    ids=str,
)
def test_every_optimizer_gives_the_same_bits_everywhere(kind: Any, options: dict, tmp_path: Path) -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        return kind(params, lr=1e-2, **options)

    recipe = Recipe(5, clip=1.0)
    _, expected, states = trained(*prepared(tmp_path, "device", optimizer=build), recipe)
    _, found, found_states = trained(*prepared(tmp_path, "mixed", optimizer=build), recipe)
    assert differing(found, expected) == []
    assert same_states(found_states, states)


class Wide(nn.Module):
    """One parameter of several pages, cut in awkward places, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1201, 67)
        self.blocks = nn.ModuleList(nn.Linear(67, 67) for _ in range(2))
        self.odd = nn.Parameter(torch.randn(67, 33).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x @ self.odd.t() @ self.odd @ self.table.weight.t()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return Wide()


@both
def test_parameters_larger_than_a_page(precision: str, tmp_path: Path) -> None:
    def run(place: str, **budget: Any) -> tuple[list[float], dict, Any]:
        model, optimizer = prepared(tmp_path, place, wide, precision=precision, micro_batches=2, **budget)
        losses = train(model, optimizer, small.batches(), Recipe(4, 2, clip=0.5), small.loss_of)
        return losses, weights(model), optimizer.report()["plan"]

    losses, expected, plan = run("device")
    assert max(len(u.pages) for u in plan.model.units) == 1
    for place in ("host", "nvme", "mixed"):
        found_losses, found, plan = run(place, gpu="2MiB")
        assert max(len(u.pages) for u in plan.model.units) > 3
        assert found_losses == losses
        assert differing(found, expected) == []


# --- the bits of the plain loop


@both
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama", "t5", "vit"))])
def test_with_torchs_kernels_it_is_the_plain_loop_with_masters(name: str, precision: str, tmp_path: Path) -> None:
    # A loss in fp16 overflows at the first scale, and the loop's division by micro-batches comes before or after that.
    recipe = Recipe(8, 2 if name in ("gpt2", "llama") else 1, clip=1.0)
    plain = Mixed(ZOO[name].build(), adamw, DTYPES[precision])
    losses = plain.train(ZOO[name].batches(), recipe, loss_of)
    model = ZOO[name].build()
    model, optimizer = prepare_tight(
        model,
        adamw(model.parameters()),
        PLACES["mixed"],
        tmp_path,
        precision=precision,
        kernels="torch",
        micro_batches=2,
    )
    assert train(model, optimizer, ZOO[name].batches(), recipe, loss_of) == losses
    assert differing(weights(model), plain.weights()) == []
    if precision == "fp16":
        assert optimizer.report()["loss_scale"] == plain.scales[-1]


@both
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_every_step_is_within_two_ulp_of_torchs(name: str, precision: str, tmp_path: Path) -> None:
    model = ZOO[name].build()
    model, optimizer = overspill.prepare(
        model, adamw(model.parameters()), precision=precision, place=PLACES["mixed"], nvme=tmp_path
    )
    judge = Judge(model, optimizer)
    train(model, judge, ZOO[name].batches(), Recipe(6, clip=1.0), loss_of)
    assert judge.steps == 6


# --- what is cast and what is not


def test_parameters_are_cast_and_buffers_are_not(tmp_path: Path) -> None:
    model = small.build()
    model.blocks[0].up.weight.requires_grad_(False)
    frozen = model.blocks[0].up.weight.detach().clone()
    before = weights(model)
    model, _ = overspill.prepare(model, adamw([p for p in model.parameters() if p.requires_grad]))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.shift.dtype == torch.float32
    for name, p in model.named_parameters():
        expected = half_up(before[name], torch.bfloat16) if p.requires_grad else before[name].bfloat16()
        assert same_bits(p.detach().clone(), expected)
    assert same_bits(model.state_dict()["blocks.0.up.weight"], frozen.bfloat16())
    trainable = {n: v for n, v in model.state_dict().items() if n != "blocks.0.up.weight"}
    assert differing(trainable, {n: before[n] for n in trainable}) == [], "masters are what the parameters came with"


def test_a_model_that_comes_in_bf16_goes_in_bf16() -> None:
    model = small.build().bfloat16()
    before = weights(model)
    model, _ = overspill.prepare(model, adamw(model.parameters()))
    assert differing(weights(overspill.close(model)), before) == []
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_norms_with_running_statistics_stay_fp32(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))

    found = []
    for place in ("device", "nvme"):
        model, optimizer = prepared(tmp_path, place, build)
        assert model[1].weight.dtype == torch.float32 and model[0].weight.dtype == torch.bfloat16
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(2, 3, 6, 6)).float().square().mean().backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(overspill.close(model)))
    assert differing(*found) == []
    assert found[0]["1.num_batches_tracked"] == 3


def test_bytes_per_parameter() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))

    model = Large()
    count = sum(p.numel() for p in model.parameters())
    expected = {"bf16": (2, 2, 10), "fp16": (2, 2, 12), "fp32": (4, 4, 8)}
    for precision, (weight, grad, state) in expected.items():
        plan = overspill.plan(model, adamw(model.parameters()), precision=precision)
        per = [sum(u.role_bytes(role) for u in plan.model.units) / count for role in ("weight", "grad", "state")]
        assert per == [weight, grad, state]
        assert precision in str(plan)
    accumulated = overspill.plan(model, adamw(model.parameters()), micro_batches=4)
    assert accumulated.model.role_bytes("grad") == 4 * count


# --- masters


def test_a_state_dict_is_in_master_precision_and_loads_exactly(tmp_path: Path) -> None:
    recipe = Recipe(3, clip=1.0)
    model, optimizer = prepared(tmp_path, "mixed")
    trained(model, optimizer, recipe)
    saved, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert all(v.dtype == torch.float32 for v in saved.values())
    expected = trained(model, optimizer, recipe)
    again, steps = prepared(tmp_path, "nvme")
    again.load_state_dict(saved)
    steps.load_state_dict(states)
    found = trained(again, steps, recipe)
    assert found[0] == expected[0]
    assert differing(found[1], expected[1]) == []


READS = {
    "detach": lambda p: p.detach().float().sum(),
    "data": lambda p: p.data.float().sum(),
    "numpy": lambda p: p.detach().float().numpy().sum(),
    "data_ptr": lambda p: p.data_ptr(),
    "item": lambda p: p.flatten()[0].item(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_looking_at_weights_changes_nothing(read: Any, tmp_path: Path) -> None:
    def run(look: bool) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(tmp_path, "mixed")
        for batch, _ in zip(small.batches(), range(4), strict=False):
            small.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if look:
                with torch.no_grad():
                    [read(p) for p in model.parameters()]
        return weights(model)

    assert differing(run(True), run(False)) == []


def test_an_edited_weight_is_the_master() -> None:
    edits = {
        "mul_": lambda p: p.mul_(0.5),
        "zero_": lambda p: p.zero_(),
        "data": lambda p: p.data.fill_(0.25),
        "view": lambda p: p.detach().view(-1)[:1].fill_(3.0),
        "copy_": lambda p: p.copy_(torch.full_like(p, 0.1)),
    }
    for edit in edits.values():
        model = small.build()
        model, optimizer = overspill.prepare(model, adamw(model.parameters()))
        small.loss_of(model, next(small.batches())).backward()
        optimizer.step()
        p = model.blocks[1].up.weight
        with torch.no_grad():
            edit(p)
        seen = p.detach().float().clone()
        assert torch.equal(model.state_dict()["blocks.1.up.weight"], seen)
        with torch.no_grad():
            p.copy_(torch.full(p.shape, 0.1))
        assert torch.equal(model.state_dict()["blocks.1.up.weight"], torch.full(p.shape, 0.1)), (
            "fp32 reaches the master"
        )


@both
def test_memory_that_was_handed_out_once_is_watched_as_long_as_it_is_held(precision: str) -> None:
    model = small.build()
    model, optimizer = overspill.prepare(model, adamw(model.parameters()), precision=precision)
    p, stream = model.blocks[1].up.weight, small.batches()
    held = p.data
    for step in range(3):
        (small.loss_of(model, next(stream)) * 1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()
        overspill.settle(model)
        held.fill_(0.3 * (step + 1))
    assert torch.equal(model.state_dict()["blocks.1.up.weight"], held.float())
    assert torch.equal(p.detach(), held)


def test_gradients_count_as_fp32(tmp_path: Path) -> None:
    model, _ = prepared(tmp_path, "mixed")
    small.loss_of(model, next(small.batches())).backward()
    p = model.blocks[0].up.weight
    assert p.grad.dtype == torch.float32 and overspill.grad(p).dtype == torch.float32
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm.dtype == torch.float32
    clipped = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()
    assert torch.allclose(clipped, torch.tensor(0.1), rtol=1e-4)


def test_more_backward_passes_than_planned_are_refused_where_there_is_no_room(tmp_path: Path) -> None:
    model = wide()
    optimizer = adamw(model.parameters())
    plan = overspill.plan(model, optimizer, place=PLACES["host"])
    model, optimizer = overspill.prepare(model, optimizer, place=PLACES["host"], host=plan.peak("host"))
    stream = small.batches()
    small.loss_of(model, next(stream)).backward()
    with pytest.raises(BudgetError, match="micro_batches=2"):
        small.loss_of(model, next(stream)).backward()


# --- loss scaling


class Loss(nn.Module):
    """A model whose loss is as large as the caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.build()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(tokens).float().flatten(0, 1), labels.flatten()) * scale


def test_scale_and_skipped_steps_are_those_of_torch_amp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses so large that some steps overflow at any scale near the present one, and growth every three steps."""
    monkeypatch.setattr("overspill.runtime.scaling.INTERVAL", 3)
    sizes = [1, 1, 300, 1, 1, 1, 1, 1e4, 1e4, 1, 1, 1, 1, 1, 1, 1e6, 1, 1, 1, 1]

    def batches() -> Any:
        return (
            {"tokens": b["tokens"], "labels": b["labels"], "scale": s}
            for b, s in zip(small.batches(), sizes, strict=False)
        )

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Loss()
        model.net.shift = model.net.shift.half()  # the plain loop has nobody who casts between fp32 and fp16
        return model

    def loss(model: nn.Module, batch: dict) -> torch.Tensor:
        return model(**batch)

    recipe = Recipe(len(sizes), clip=1.0)
    plain = Mixed(build(), adamw, torch.float16)
    plain.scaler.set_growth_interval(3)
    losses = plain.train(batches(), recipe, loss)
    assert len(set(plain.scales)) > 3, "the scale falls and rises"
    model = build()
    model, optimizer = overspill.prepare(
        model, adamw(model.parameters()), precision="fp16", kernels="torch", place=PLACES["mixed"], nvme=tmp_path
    )
    scales = []
    optimizer.register_step_post_hook(lambda *_: scales.append(optimizer.report()["loss_scale"]))
    assert train(model, optimizer, batches(), recipe, loss) == losses
    assert scales == plain.scales
    assert optimizer.report()["skipped"] == sum(b < a for a, b in zip([65536.0, *scales], scales, strict=False))
    assert differing(weights(model), plain.weights()) == []


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, "mixed", Loss, precision="fp16")
    stream = small.batches()
    model(**next(stream), scale=1e-3).backward()
    optimizer.step()
    optimizer.zero_grad()
    before, states, scale = (
        weights(model),
        copy.deepcopy(optimizer.state_dict()["state"]),
        optimizer.report()["loss_scale"],
    )
    model(**next(stream), scale=1e30).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert differing(weights(model), before) == []
    assert same_states(optimizer.state_dict()["state"], states)
    assert scale == 65536.0 and optimizer.report()["loss_scale"] == 32768.0 and optimizer.report()["skipped"] == 1


def test_weights_used_outside_of_the_model_are_refused_under_fp16() -> None:
    model = small.build()
    model, _ = overspill.prepare(model, adamw(model.parameters()), precision="fp16")
    with pytest.raises(StateError, match="whole model"):
        model.blocks[0](torch.randn(2, 3, small.WIDTH).half())
    with pytest.raises(StateError, match="whole model"):
        (model.head.weight * 2).sum()
    with torch.no_grad():
        model.blocks[0](torch.randn(2, 3, small.WIDTH).half())
