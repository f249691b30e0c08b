"""Any use of a parameter from outside sees its current value, and what it changes counts."""

import copy
import gc
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

import overspill
from overspill.errors import ModelError
from tests import small
from tests.both import adamw, check, everywhere, prepare, train
from tests.reference import differing, weights

READS = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "mean of square": lambda p: (p**2).mean(),
    "cpu": lambda p: p.cpu().clone(),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "data": lambda p: p.data.clone(),
    "list": lambda p: [x.clone() for x in p] if p.dim() else p.item(),
    "tolist": lambda p: p.tolist(),
    "first": lambda p: p[0].clone() if p.dim() else p.item(),
    "transposed": lambda p: p.T.clone() if p.dim() == 2 else p + 0,
    "repr": lambda p: re.findall(r"-?\d\.\d+", repr(p)),
    "str of data": lambda p: str(p.data),
    "format": lambda p: f"{p.detach().view(-1)[0]:.9f}",
    "len and shape": lambda p: (len(p) if p.dim() else 0, p.shape, p.stride(), p.dtype, p.numel(), p.requires_grad),
    "compared": lambda p: (p > 0).sum(),
    "stacked": lambda p: torch.stack([p, p]).clone(),
    "cast": lambda p: p.to(torch.float64),
    "flattened": lambda p: p.flatten().clone(),
    "item": lambda p: p.max().item(),
    "foreach": lambda p: torch._foreach_mul([p.detach()], 2.0)[0],
}


@everywhere
@pytest.mark.parametrize("read", READS)
def test_a_read_right_after_step(read: str, place, tmp_path: Path) -> None:
    """The update of that step is still pending; the read sees its result."""

    def loop(model, optimizer):
        found = []
        for _ in range(2):
            train(model, optimizer, 1)
            found += [READS[read](p) for p in model.parameters()]
        return found

    check(loop, place, tmp_path)


@everywhere
def test_comparing_two_parameters(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    norms = [block.norm.weight for block in model.blocks]
    assert not torch.equal(norms[0], norms[1])
    with torch.no_grad():
        norms[1].copy_(norms[0])
    assert torch.equal(norms[0], norms[1])
    assert torch.allclose(norms[1], norms[0].detach())


@everywhere
def test_a_loss_on_the_weights(place, tmp_path: Path) -> None:
    """Weight decay written by hand: parameters used in the graph outside of their modules."""

    def loop(model, optimizer):
        for _ in range(3):
            sum(p.square().sum() for p in model.parameters()).mul(1e-3).backward()
            train(model, optimizer, 1)

    check(loop, place, tmp_path)


@everywhere
def test_a_module_used_by_itself(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        found = []
        for _ in range(3):
            train(model, optimizer, 1)
            x = torch.ones(2, small.WIDTH)
            block = model.blocks[1]
            found += [block(x), block.up.forward(x), nn.functional.linear(x, block.up.weight)]
        return found

    check(loop, place, tmp_path)


# ---- views that are kept


VIEWS = {"data": lambda p: p.data, "detach": lambda p: p.detach(), "part": lambda p: p.detach().view(-1)[:1]}


@everywhere
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_kept_over_steps_shows_the_current_weights(view: str, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        kept = [VIEWS[view](p) for p in model.parameters()]
        seen = []
        for _ in range(3):
            train(model, optimizer, 1)
            seen += [x.clone() for x in kept]
        return seen

    check(loop, place, tmp_path)


@everywhere
def test_a_view_kept_over_steps_can_be_written(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        kept = [p.data for p in model.parameters()]
        for _ in range(3):
            train(model, optimizer, 1)
            for view in kept:
                view.mul_(0.9)
        del kept
        return train(model, optimizer)

    check(loop, place, tmp_path)


@everywhere
def test_a_view_stays_readable_when_everything_settles(place, tmp_path: Path) -> None:
    """Settling needs room on the device, but the unit that somebody looks at stays."""

    def loop(model, optimizer):
        train(model, optimizer)
        kept = model.blocks[0].up.weight.data
        if place["weight"] != "device" and isinstance(optimizer, overspill.api.SpilledOptimizer):
            overspill.settle(model)
            optimizer.state_dict()
            assert kept.untyped_storage().nbytes() > 0
        return kept.mul_(2.0).clone()

    check(loop, place, tmp_path, build=lambda: small.build(blocks=8))


def test_units_of_which_no_view_is_left_may_leave_again(tmp_path: Path) -> None:
    place = {"weight": "host", "grad": "host", "state": "host"}
    model, optimizer = prepare(place, tmp_path, lambda: small.build(blocks=8))
    units = overspill.api._engine(model).units

    def here() -> int:
        train(model, optimizer, 1)
        return sum(unit.here for unit in units)

    few = here()
    kept = [p.data for p in model.parameters()]
    assert here() == len(units) > few
    kept.clear()
    gc.collect()
    here()
    assert here() == few


# ---- copies of the whole


@everywhere
def test_a_deep_copy_is_a_plain_model(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    plain = copy.deepcopy(model)
    assert differing(weights(plain), weights(model)) == []
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert plain.head.weight is plain.embedding.weight
    before = weights(model)
    expected = small.build()
    expected.load_state_dict(before)
    assert train(plain, adamw(plain)) == train(expected, adamw(expected))
    assert differing(weights(plain), weights(expected)) == []
    assert differing(weights(model), before) == [], "the copy trains by itself"
    overspill.close(model)
    train(plain, adamw(plain), 1)


@everywhere
def test_a_state_dict_is_a_copy_on_the_host(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    taken = model.state_dict()
    before = {name: value.clone() for name, value in taken.items()}
    plain = small.build()
    train(plain, adamw(plain))
    assert list(taken) == list(plain.state_dict())
    assert differing(taken, weights(plain)) == []
    assert taken["head.weight"].data_ptr() == taken["embedding.weight"].data_ptr(), "ties are kept"
    assert {value.device.type for value in taken.values()} == {"cpu"}
    train(model, optimizer)
    assert differing(taken, before) == []


@everywhere
def test_state_dicts_of_parts_with_prefix_and_of_a_saved_file(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    plain = small.build()
    train(plain, adamw(plain))
    assert differing(model.blocks[1].state_dict(prefix="x."), plain.blocks[1].state_dict(prefix="x.")) == []
    assert differing(dict(model.named_parameters()), dict(plain.named_parameters())) == []
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert differing(torch.load(file, weights_only=True), plain.state_dict()) == []


@everywhere
def test_loading_a_state_dict(place, tmp_path: Path) -> None:
    other = weights(small.build(seed=5))

    def loop(model, optimizer):
        train(model, optimizer)
        assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
        after = train(model, optimizer)
        model.blocks[2].load_state_dict(model.blocks[1].state_dict())
        return after + train(model, optimizer)

    check(loop, place, tmp_path)


@everywhere
def test_all_weights_at_once(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        seen = []
        for _ in range(3):
            train(model, optimizer, 1)
            with overspill.full(model) if isinstance(optimizer, overspill.api.SpilledOptimizer) else torch.no_grad():
                seen += [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.mul_(0.9)
                model.head.weight.data[0] = 0
        return seen

    check(loop, place, tmp_path)


@everywhere
def test_parameters_as_one_vector(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer, 1)
        vector = parameters_to_vector(model.parameters()).detach() * 0.5
        vector_to_parameters(vector.clone(), model.parameters())
        return [vector.clone(), *train(model, optimizer)]

    check(loop, place, tmp_path)


@everywhere
def test_moving_the_model(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer, 1)
        assert model.to("cpu") is model and model.cpu() is model and model.float() is model
        return train(model, optimizer)

    check(loop, place, tmp_path)


@everywhere
@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
def test_casting_the_model_is_refused(cast: str, place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    with pytest.raises(ModelError, match=r"expected new data of torch.float32 .* found .*; .* before prepare"):
        getattr(model, cast)()
    plain = small.build()
    steps = adamw(plain)
    train(plain, steps, 1)
    assert train(model, optimizer) == train(plain, steps)


# ---- what models do themselves


@everywhere
def test_freezing_and_unfreezing_while_training(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer, 2)
        for frozen in (True, False):
            model.blocks[1].requires_grad_(not frozen)
            model.last.bias.requires_grad_(not frozen)
            train(model, optimizer, 2)
        return [p.requires_grad for p in model.parameters()]

    check(loop, place, tmp_path)


@everywhere
def test_parameters_frozen_at_prepare(place, tmp_path: Path) -> None:
    def build():
        model = small.build()
        model.blocks[1].requires_grad_(False)
        model.embedding.weight.requires_grad_(False)
        return model

    check(train, place, tmp_path, build=build)


class Renormed(small.Small):
    """The embedding writes to its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.WIDTH, max_norm=1.0)
        self.head = nn.Linear(small.WIDTH, small.VOCABULARY)


class Normed(small.Small):
    """Parametrized weights, and batch norm with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.up)
            parametrizations.spectral_norm(block.down)
        self.batch_norm = nn.BatchNorm1d(small.WIDTH)

    def forward(self, tokens: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


@everywhere
@pytest.mark.parametrize("kind", [Renormed, Normed])
def test_models_that_write_in_forward(kind: type[nn.Module], place, tmp_path: Path) -> None:
    def build():
        torch.manual_seed(0)
        return kind()

    def loop(model, optimizer):
        found = train(model, optimizer)
        model.eval()
        with torch.no_grad():
            found.append(model(torch.arange(10).view(2, 5)))
        model.train()
        return found + train(model, optimizer)

    check(loop, place, tmp_path, build=build)


@everywhere
def test_parameter_attributes_and_hooks_of_the_user_stay(place, tmp_path: Path) -> None:
    scaled = []

    def build():
        model = small.build()
        model.head.weight.note = "tied"
        model.last.weight.register_hook(lambda g: scaled.append(g.shape) or g * 0.5)
        model.blocks[0].register_forward_hook(lambda m, args, out: out * 0.9)
        model.blocks[1].register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.9,))
        return model

    def loop(model, optimizer):
        return [*train(model, optimizer), model.embedding.weight.note]

    check(loop, place, tmp_path, build=build)
    assert len(scaled) == 6


@everywhere
def test_a_parameter_is_shown_and_pickled_as_a_plain_one(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    plain = small.build()
    train(plain, adamw(plain), 1)
    p, expected = model.blocks[1].up.bias, plain.blocks[1].up.bias
    assert repr(p) == repr(expected)
    torch.save(p, tmp_path / "p.pt")
    back = torch.load(tmp_path / "p.pt", weights_only=False)
    assert type(back) is torch.nn.Parameter and torch.equal(back, expected)


@everywhere
def test_a_saved_model_is_a_plain_one(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    torch.save(model, tmp_path / "model.pt")
    back = torch.load(tmp_path / "model.pt", weights_only=False)
    plain = small.build()
    train(plain, adamw(plain), 1)
    assert differing(weights(back), weights(plain)) == []
    assert {type(p) for p in back.parameters()} == {torch.nn.Parameter}
    train(back, adamw(back), 1)


@everywhere
@pytest.mark.parametrize("move", ["share_memory_", "set_", "resize_"])
def test_moving_a_parameters_memory_is_refused(move: str, place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    p = model.blocks[0].up.weight
    arguments = {"share_memory_": (), "set_": (torch.zeros_like(p),), "resize_": (3,)}[move]
    with pytest.raises(ModelError, match=move), torch.no_grad():
        getattr(p, move)(*arguments)
    train(model, optimizer, 1)
