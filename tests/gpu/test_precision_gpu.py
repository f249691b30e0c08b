"""bf16 and fp16 on cuda: the same bits wherever the bytes live, those of a plain loop with masters, and the kernels'
bits those of the CPU."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.kernels import masters
from overspill.kernels.reference import ieee_root, rule_of
from overspill.program import Kind
from overspill.runtime import scaling, steps
from tests import small
from tests.cpu import test_skipped
from tests.gpu.test_parity_gpu import on_gpu
from tests.places import PLACES, prepare_tight
from tests.reference import Mixed, Recipe, differing, same_bits, train, weights
from tests.zoo import ZOO, loss_of

pytestmark = pytest.mark.gpu

TIERS = ("device", "host", "nvme")
HOMES = [dict(zip(("weight", "grad", "state"), homes, strict=True)) for homes in product(TIERS, repeat=3)]
RECIPE = Recipe(steps=6, clip=2.5, micro_batches=2)
NAMES = ["gpt2", "llama", "t5", "vit", "albert", "clip"]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def spilled(precision: str, place: dict[str, str], nvme: Path, delays: Any = None, micro_batches: int = 2) -> Any:
    model = small.build()
    model, optimizer = overspill.prepare(
        model, adamw(model.parameters()), precision=precision, place=place, nvme=nvme, micro_batches=micro_batches
    )
    overspill.api._engine(model).executor.lanes.delays.update(delays or {})
    losses = train(model, optimizer, small.batches(), RECIPE, small.loss_of)
    return losses, weights(overspill.close(model))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_placement_gives_the_same_bits(precision: str, tmp_path: Path) -> None:
    losses, expected = spilled(precision, HOMES[0], tmp_path)
    for place in HOMES[1:]:
        found_losses, found = spilled(precision, place, tmp_path)
        assert found_losses == losses, place
        assert differing(found, expected) == [], place
    _, found = spilled(precision, HOMES[13], tmp_path, micro_batches=1)
    assert differing(found, expected) == [], "sums that were not planned"


@pytest.mark.parametrize("kind", [*Kind, None], ids=str)
def test_delays(kind: Kind | None, tmp_path: Path) -> None:
    expected = spilled("bf16", HOMES[0], tmp_path)[1]
    delays = {kind: 0.003} if kind else dict.fromkeys(Kind, 0.002)
    for place in (HOMES[13], PLACES["mixed"]):
        assert differing(spilled("bf16", place, tmp_path, delays)[1], expected) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_stock_models_on_every_tier(name: str, precision: str, tmp_path: Path) -> None:
    found = []
    for place in ("device", "host", "mixed"):
        model = ZOO[name].build()
        keywords = {"precision": precision, "micro_batches": 2}
        model, optimizer = prepare_tight(model, adamw(model.parameters()), PLACES[place], tmp_path, **keywords)
        losses = train(model, optimizer, ZOO[name].batches(), RECIPE, loss_of)
        found.append((losses, weights(overspill.close(model))))
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert differing(values, found[0][1]) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_torchs_kernels_it_is_the_plain_loop_with_masters(name: str, tmp_path: Path) -> None:
    def batches() -> Any:
        return ({k: v.cuda() for k, v in batch.items()} for batch in ZOO[name].batches())

    plain = Mixed(ZOO[name].build().cuda(), adamw, torch.bfloat16)
    losses = plain.train(batches(), RECIPE, loss_of)
    model = ZOO[name].build()
    keywords = {"precision": "bf16", "kernels": "torch", "micro_batches": 2}
    model, optimizer = prepare_tight(model, adamw(model.parameters()), PLACES["mixed"], tmp_path, **keywords)
    assert train(model, optimizer, ZOO[name].batches(), RECIPE, loss_of) == losses
    expected = {n: v.cpu() for n, v in plain.weights().items()}
    assert differing(weights(model), expected) == []


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.3, 0.9)}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_updates_have_the_bits_of_the_cpu(kind: Any, options: dict[str, Any]) -> None:
    """But for the square root, which torch does not round correctly on the CPU: here both sides take it in fp64."""
    generator = torch.Generator().manual_seed(0)
    count = 100_003
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=1e-2, **options)
    rule = rule_of(optimizer)
    assert rule is not None
    master = torch.randn(count, generator=generator)
    found = {}
    for device in ("cpu", "cuda"):
        numbers = torch.Generator().manual_seed(1)
        p = master.clone().to(device)
        fields = [torch.full((count,), rule.initial, device=device) for _ in rule.fields]
        weight = torch.empty(count, dtype=torch.bfloat16, device=device)
        kept = torch.empty(count, dtype=torch.int16, device=device)
        masters.split(p, weight, kept)
        for step in range(1, 6):
            p = masters.join(weight, kept)
            scale = 10.0 ** torch.randint(-8, 3, (count,), generator=numbers)
            g = (torch.randn(count, generator=numbers) * scale).to(device)
            rule.apply(p, g, fields, optimizer.param_groups[0], step, ieee_root)
            masters.split(p, weight, kept)
        found[device] = [t.cpu() for t in (p, weight, kept, *fields)]
    assert all(same_bits(a, b) for a, b in zip(found["cpu"], found["cuda"], strict=True))


@pytest.mark.parametrize("budget", ["96MiB", "160MiB"])
def test_reserved_memory_stays_within_the_plan(budget: str) -> None:
    from tests.gpu.test_parity_gpu import wide

    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model = wide()
    model, optimizer = overspill.prepare(model, adamw(model.parameters()), gpu=budget, micro_batches=2)
    train(model, optimizer, small.batches(), Recipe(5, 2, clip=1.0), small.loss_of)
    plan = optimizer.report()["plan"]
    assert torch.cuda.max_memory_reserved() - base <= plan.peak("device") <= plan.budget.device


def test_a_model_on_meta_gets_its_weights_from_a_folder(tmp_path: Path) -> None:
    plain = ZOO["llama"].build()
    plain.save_pretrained(tmp_path / "given")
    with torch.device("meta"):
        model = type(plain)(plain.config).train()
    model, optimizer = overspill.prepare(
        model, adamw(model.parameters()), weights=tmp_path / "given", precision="fp32", place=PLACES["host"]
    )
    plain = plain.cuda()
    losses = train(plain, adamw(plain.parameters()), on_gpu(ZOO["llama"].batches()), RECIPE, loss_of)
    assert train(model, optimizer, ZOO["llama"].batches(), RECIPE, loss_of) == losses
    overspill.save(tmp_path / "saved", model, optimizer, {"step": 6})
    assert overspill.load(tmp_path / "saved", model, optimizer) == {"step": 6}
    overspill.export(model, tmp_path / "out")
    assert differing(weights(type(plain).from_pretrained(tmp_path / "out")), weights(plain)) == []


@pytest.mark.parametrize("place", ["host", "mixed"])
def test_masters_are_read_and_written_right_after_a_step(place: str, tmp_path: Path) -> None:
    """While pages are on their way home, slowly."""

    def run(settle: bool) -> dict[str, torch.Tensor]:
        model = small.build()
        model, optimizer = overspill.prepare(
            model, adamw(model.parameters()), precision="bf16", place=PLACES[place], nvme=tmp_path
        )
        if not settle:
            overspill.api._engine(model).executor.lanes.delays.update({Kind.STATE_STORE: 0.02})
        stream = small.batches()
        seen = {}
        for step in range(3):
            small.loss_of(model, next(stream)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if settle:
                overspill.settle(model)
            seen |= {f"{step} {n}": v for n, v in model.state_dict().items()}
            with torch.no_grad():
                model.blocks[0].up.weight.copy_(torch.full((1,), 0.1 * (step + 1)).expand_as(model.blocks[0].up.weight))
        states = {f"{i} {k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
        return seen | states | weights(model)

    assert differing(run(settle=False), run(settle=True)) == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_loaded_checkpoint_steps_on(place: str, precision: str, tmp_path: Path) -> None:
    found = []
    for again in (False, True):
        model = small.build()
        model, optimizer = overspill.prepare(model, adamw(model.parameters()), precision=precision, place=PLACES[place])
        stream = small.batches()
        if again:
            [next(stream) for _ in range(3)]
            overspill.load(tmp_path / "saved", model, optimizer)
        else:
            train(model, optimizer, stream, Recipe(3, clip=1.0), small.loss_of)
            overspill.save(tmp_path / "saved", model, optimizer)
        losses = train(model, optimizer, stream, Recipe(3, clip=1.0), small.loss_of)
        found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []


@pytest.mark.parametrize("way", test_skipped.WAYS)
@pytest.mark.parametrize("place", ["device", "host", "states"])
def test_hearing_later_of_skipped_steps_changes_no_bit(
    way: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("overspill.runtime.scaling.INTERVAL", 2)
    later = test_skipped.trained(place, tmp_path, gpu="1GiB", **test_skipped.WAYS[way])
    monkeypatch.setattr(steps, "HEARS_LATER", set())
    test_skipped.check(later, test_skipped.trained("device", tmp_path, gpu="1GiB", **test_skipped.WAYS[way]))
    assert later[0][2] >= 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_does_not_wait_for_its_gradients(precision: str, tmp_path: Path) -> None:
    model, optimizer = test_skipped.prepare("states", tmp_path, gpu="1GiB", precision=precision)
    batch, done = {k: v.cuda() for k, v in next(small.batches()).items()}, list[bool]()
    for size in (1e-3, 1e-3, 1e30, 1e-3, 1e-3):
        model(**batch, size=size, skip=None).backward()
        optimizer.clip_grad_norm_(1.0)
        torch.cuda._sleep(1_000_000_000)
        optimizer.step()
        done.append(torch.cuda.current_stream().query())
        optimizer.zero_grad()
        torch.cuda.synchronize()
    # The first step makes states, and with fp16 the second what is heard of skipped ones: the first copy of that waits.
    assert not any(done[2 if precision == "fp16" else 1 :]), "the host waited"
    assert optimizer.report()["skipped"] == (precision == "fp16")


@pytest.mark.parametrize("way", ["lazy", "delayed"])
@pytest.mark.parametrize("look", test_skipped.LOOKS)
def test_a_first_step_that_is_skipped(look: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def trained() -> tuple[Any, ...]:
        told = {"update": "delayed", "delay_after": 0} if way == "delayed" else {}
        model, optimizer = test_skipped.prepare("states", tmp_path, gpu="1GiB", **told)
        for batch, size in zip(small.batches(), test_skipped.SIZES[3:8], strict=False):
            model(**batch, size=size, skip=None).backward()
            optimizer.step()
            test_skipped.LOOKS[look](model, optimizer)
            optimizer.zero_grad()
        found = optimizer.report()
        states = test_skipped._flat(optimizer.state_dict()["state"])
        return (found["loss_scale"], found["skipped"]), states, weights(overspill.close(model))

    later = trained()
    monkeypatch.setattr(steps, "HEARS_LATER", set())
    test_skipped.check(later, trained())
    assert later[0][1] >= 2


def test_gradients_are_scaled_with_one_rounding() -> None:
    for kind, gradient in test_skipped.gradients().items():
        for number in (2.0**16, 2.0**-16, 3.0):
            expected = scaling._times(gradient, torch.tensor(number))
            there = torch.tensor(number, device="cuda")
            assert torch.equal(scaling._times(gradient.cuda(), there).cpu(), expected), kind
            assert torch.equal(scaling._times(gradient, there), expected), f"{kind}, on the host"
