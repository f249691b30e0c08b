"""Updates ahead of their use on cuda: pages that pass through a ring, by a thread, in lazy and eager steps."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.plan import sharing, solver
from overspill.plan.hands import Chosen
from overspill.program import Kind
from overspill.runtime.kernel_update import KernelUpdate
from overspill.specs import Hands, KiB, MiB
from overspill.tiers import HostTier, driver, recorded
from tests.places import peaks_in_force
from tests.reference import differing, weights

pytestmark = pytest.mark.gpu


WIDTH, LAYERS, STEPS = 384, 10, 12
HOMES = {
    "device": {"weight": "device", "grad": "device", "state": "device"},
    "states": {"weight": "device", "grad": "device", "state": "host"},
    "offload": {"weight": "device", "grad": "host", "state": "host"},
    "gradients": {"weight": "device", "grad": "host", "state": "device"},
    "weights": {"weight": "host", "grad": "device", "state": "host"},
    "host": {"weight": "host", "grad": "host", "state": "host"},
    "nvme": {"weight": "host", "grad": "nvme", "state": "nvme"},
}
PASSING = (Kind.STATE_FETCH, Kind.PAGE_GRADS, Kind.UPDATE, Kind.STATE_STORE, Kind.DUE, Kind.GRAD_STORE)


class Deep(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            # As models do that look at a mask: the host waits for the device in the middle of a forward pass.
            assert bool((x == x).any())
        return x.square().mean()


class Normed(Deep):
    """Norms with running statistics stay fp32: their states are made in the first step."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.BatchNorm1d(width)) for block in self.blocks)


def trained(place: str, nvme: Path, delays: dict[Kind, float] | None = None, **keywords: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    clip, gpu = keywords.pop("clip", 0.0), keywords.pop("gpu", "128MiB")
    model: Any = keywords.pop("build", Deep)(keywords.pop("width", WIDTH)).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = overspill.prepare(
        model, optimizer, place=HOMES[place], gpu=gpu, nvme=nvme, **{"host": "256MiB", **keywords}
    )
    engine = overspill.api._engine(model)
    ahead = place not in ("device", "nvme") and keywords.get("precision") != "fp32"
    assert (engine.executor.pager is not None) == ahead, "the thread is what is tested here"
    engine.executor.lanes.delays |= delays or {}
    found = []
    for step in range(STEPS):
        loss = model(torch.randn(64, model.width, device="cuda"))
        loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(loss.detach())
    return torch.stack(found).tolist(), weights(overspill.close(model))


def check(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert not differing(one[1], other[1])


@pytest.fixture(params=[2, 16], ids=["short ring", "long ring"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pages for every unit, and so many slots."""
    monkeypatch.setattr(solver, "PAGE", (64 * KiB, 256 * KiB))
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", request.param)


@pytest.mark.parametrize("place", HOMES)
def test_pages_ahead_of_their_use_change_no_bit(place: str, ring: None, tmp_path: Path) -> None:
    check(trained(place, tmp_path, clip=1e-3), trained("device", tmp_path, clip=1e-3))
    check(trained(place, tmp_path, update="eager"), trained("device", tmp_path))


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("place", ["states", "host"])
def test_delays_change_no_bit(kind: Kind, place: str, tmp_path: Path) -> None:
    for update, clip in (("lazy", 1e-3), ("eager", 0.0)):
        expected = trained("device", tmp_path, clip=clip)
        check(trained(place, tmp_path, {kind: 0.002}, update=update, clip=clip), expected)


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_states_that_are_made_in_the_first_step(update: str, ring: None, tmp_path: Path) -> None:
    expected = trained("device", tmp_path, build=Normed)
    for kind in (Kind.PAGE_GRADS, Kind.UPDATE, Kind.STATE_STORE):
        check(trained("states", tmp_path, {kind: 0.002}, update=update, build=Normed), expected)


@pytest.mark.parametrize("kind", [None, *PASSING])
@pytest.mark.parametrize("place", ["device", "states", "weights"])
def test_eager_updates_let_gradients_go(
    place: str, kind: Kind | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is room for those of two units: whatever is made next is where another one was."""
    expected = trained("device", tmp_path)
    monkeypatch.setattr(solver, "CONSUMED", 1 << 40)
    check(trained(place, tmp_path, {kind: 0.002} if kind else None, update="eager"), expected)


def late(clip: float, after: int) -> tuple[Any, Any]:
    """`trained`, with updates one step late, by torch alone: in fp32, the rule of update="delayed"."""
    torch.manual_seed(0)
    model = Deep().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    kept: list[Tensor | None] | None = None

    def apply(gradients: list[Tensor | None]) -> None:
        own = [p.grad for p in model.parameters()]
        for gradients_now in (gradients, own):
            for p, gradient in zip(model.parameters(), gradients_now, strict=True):
                p.grad = gradient
            if gradients_now is gradients:
                optimizer.step()

    for step in range(STEPS):
        loss = model(torch.randn(64, WIDTH, device="cuda"))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = [p.grad for p in model.parameters()]
        if kept is not None:
            apply(kept)
        kept = gradients if step >= after else None
        if kept is None:
            optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert kept is not None
    apply(kept)
    return torch.stack(found).tolist(), weights(model)


@pytest.mark.parametrize("place", [place for place in HOMES if place != "device"])
def test_delayed_updates_are_the_rule_wherever_bytes_live(place: str, ring: None, tmp_path: Path) -> None:
    delayed: Any = {"update": "delayed", "delay_after": 3, "clip": 1e-3}
    expected = trained("device", tmp_path, **delayed)
    check(trained(place, tmp_path, **delayed), expected)
    assert expected[0] != trained("device", tmp_path, clip=1e-3)[0], "nothing came late"
    if place == "states":
        for kind in PASSING:
            check(trained(place, tmp_path, {kind: 0.002}, **delayed), expected)


def test_delayed_updates_are_what_torch_computes(tmp_path: Path) -> None:
    found = trained("states", tmp_path, update="delayed", delay_after=3, clip=1e-3, precision="fp32")
    check(found, late(1e-3, 3))


@pytest.mark.parametrize("update", ["lazy", "eager", "delayed"])
@pytest.mark.parametrize("place", [place for place in HOMES if place != "nvme"])
def test_a_steady_step_never_waits_for_the_device(place: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells of every wait that it is asked for, and so do our own events: only the thread of pages may wait."""
    waited: list[str] = []
    finish = driver._Mark.synchronize

    def synchronize(mark: driver._Mark) -> None:
        waited.append(threading.current_thread().name)
        finish(mark)

    monkeypatch.setattr(driver._Mark, "synchronize", synchronize)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    when = {"update": update, **({"delay_after": 2} if update == "delayed" else {})}
    model, optimizer = overspill.prepare(
        model, optimizer, place=HOMES[place], gpu="128MiB", host="256MiB", precision="bf16", **when
    )
    try:
        for step in range(8):
            torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
            waited = [] if step < 4 else waited
            model(torch.ones(64, WIDTH, device="cuda")).float().square().mean().backward()
            if update != "eager":
                optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(waited) <= {"overspill-pager"}
    overspill.close(model)


def test_events_and_copies_of_the_driver_are_as_those_of_torch() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    tier = HostTier(8 * MiB)
    tier.pin()
    slot = tier.reserve(8 * MiB)
    with torch.cuda.stream(one):
        torch.cuda._sleep(300_000_000)
        here = torch.arange(8 * MiB, device="cuda").to(torch.uint8)
        tier.store(slot, here)
        event = recorded(one)
    assert type(event) is driver._Mark and not event.query()
    with torch.cuda.stream(other):
        back = torch.zeros_like(here)
        event.wait(other)
        tier.load(slot, back)
    last = recorded(other)
    assert not last.query(), "nobody waited"
    last.synchronize()
    assert event.query() and last.query() and torch.equal(back, here)
    assert torch.equal(tier.tensor(slot), here.cpu())
    torch.cuda.synchronize()
    tier.close()


def test_plans_improve_within_the_budget(tmp_path: Path) -> None:
    """The first steps keep much room for activations; then states move in, and the bits stay the same."""
    expected = trained("device", tmp_path, clip=1e-3, width=4096, gpu="4GiB", host="1GiB")[0]
    torch.manual_seed(0)
    model: Any = Deep(4096).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = 2560 * MiB
    model, optimizer = overspill.prepare(model, optimizer, gpu=budget, host="2GiB")
    before = optimizer.report()["plan"]
    found = []
    for step in range(STEPS):
        loss = model(torch.randn(64, model.width, device="cuda"))
        loss.backward()
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(loss.detach())
    after = optimizer.report()["plan"]
    assert torch.stack(found).tolist() == expected
    assert after.bytes_of("host", "state") < before.bytes_of("host", "state"), "nothing moved"
    others = overspill.api._engine(model).parts.planned.others
    seen = optimizer.report()["measured"]["device"] - others
    assert seen <= budget and after.peak("device") <= budget
    overspill.close(model)


def test_a_trace_has_the_gpus_own_times(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Deep(1024).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = overspill.prepare(model, optimizer, place=HOMES["states"], gpu="512MiB", host="256MiB")

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.randn(64, model.width, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    with overspill.trace(model, tmp_path / "trace.json"):
        steps(2)
    overspill.close(model)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [(names[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert {"up", "down", "update", "model"} <= {track for track, _, _ in spans}
    assert all(begin <= end for _, begin, end in spans)
    copies = [(begin, end) for track, begin, end in spans if track == "up"]
    assert max(end - begin for begin, end in copies) > 20, "10 MiB take longer than 20 microseconds to come up"
    others = [(begin, end) for track, begin, end in spans if track in ("down", "model")]
    assert any(a < d and c < b for a, b in copies for c, d in others), "nothing overlaps"


def test_plans_hold_over_a_thousand_steps_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans improve, longer inputs bring the first one back, holes do not pile up.

    What is in use fits the plan in force. What is reserved fits the largest of those so far: it only grows, and where
    the first plan is back, with less than another one had, torch keeps what it reserved for that one.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000, use_cache=False)).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = overspill.prepare(model, optimizer, gpu="1792MiB", host="2GiB")
    lengths, peaks = torch.Generator().manual_seed(0), peaks_in_force(optimizer, monkeypatch)
    others = overspill.api._engine(model).parts.planned.others
    for step in range(1000):
        longest = 64 + 192 * step // 1000
        length = int(torch.randint(8, longest, (), generator=lengths))
        tokens = torch.randint(0, 1000, (4, length), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.report()
        assert report["plan"].peak("device") == peaks[-1]
        assert torch.cuda.memory_allocated() - others <= peaks[-1], f"in use after step {step}"
        assert report["measured"]["device"] - others <= max(peaks) <= report["plan"].budget.device, f"after step {step}"
    assert len(peaks) > 1, "no other plan ever came into force"
    overspill.close(model)


@pytest.mark.parametrize("place", ["states", "offload", "host"])
@pytest.mark.parametrize("hands", ["split", "host"])
@pytest.mark.parametrize("states", ["exact", "bf16", "compact"])
def test_the_hosts_cores_give_the_same_bits(
    states: str, hands: Hands, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They take pages from the ring's thread, where those live, and gradients where they are."""
    monkeypatch.setattr(solver, "PAGE", (64 * KiB, 256 * KiB))
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", 2)
    expected = trained("device", tmp_path, clip=1e-3, states=states)
    monkeypatch.setattr(sharing, "choose", lambda speeds, sizes: Chosen(hands, "as told"))
    updated: list[int] = []
    run = KernelUpdate.run_on_host

    def run_on_host(update: KernelUpdate, page: tuple[int, int], *rest: Any) -> None:
        updated.append(page[0])
        run(update, page, *rest)

    monkeypatch.setattr(KernelUpdate, "run_on_host", run_on_host)
    for kind in (None, Kind.PAGE_GRADS, Kind.STATE_FETCH, Kind.UPDATE, Kind.STATE_STORE, Kind.GRAD_STORE):
        updated.clear()
        check(trained(place, tmp_path, {kind: 0.002} if kind else None, clip=1e-3, states=states), expected)
        assert updated, "the cores had no page"
    check(trained(place, tmp_path, update="eager", states=states), trained("device", tmp_path, states=states))


def test_a_thread_that_never_used_the_gpu(tmp_path: Path) -> None:
    """Neither a loop in a thread of its own, nor autograd's, whose first act may be ours."""
    found: list[Any] = []

    def train() -> None:
        torch.manual_seed(0)
        model: Any = Deep().cuda()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = overspill.prepare(model, optimizer, place=HOMES["host"], gpu="128MiB", host="256MiB")
        for _ in range(4):
            out = model.blocks[0](torch.randn(64, WIDTH, device="cuda"))
            out.backward(torch.ones_like(out))
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(overspill.close(model)))

    train()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(found) == 2 and not differing(*found)
