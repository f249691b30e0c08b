"""A model built piece by piece on disk has the values of an ordinary build, and never exists whole in memory."""

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from overspill.errors import OptionError, StateError, TierError
from overspill.runtime import building as module
from overspill.runtime.building import Builder, Growing, builder_of, building, read_built, span_of
from tests.zoo import ZOO

KEEP = 4096


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest parameter goes to disk."""
    monkeypatch.setattr(module, "SMALL", 1)


class Tied(nn.Module):
    """What constructors do to their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2].weight = self.layers[0].weight
        self.more = copy.deepcopy(self.layers)
        self.raw = nn.Parameter(torch.randn(17, 24).t())
        self.scale = nn.Parameter(torch.ones(24))
        self.some = nn.ParameterList([nn.Parameter(torch.randn(9)), self.scale])
        self.register_parameter("none", None)
        self.layers[1].bias.data.normal_()
        self.layers[1].weight.data = torch.randn(24, 24) * self.scale.mean()
        with torch.no_grad():
            self.embedding.weight[5].fill_(0)
            self.layers[0].bias.copy_(self.raw.sum(1))
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.more[0].weight, std=self.raw.std().item())
        self.layers[1].requires_grad_(False)
        self.scale.requires_grad = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.raw.sum(1)
        for layer in [*self.layers, *self.more]:
            x = torch.relu(layer(x)) + x
        return self.head(x)


def sharing() -> nn.Module:
    """Two parameters over the same memory."""
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    with torch.no_grad():
        model[1].weight.mul_(2)
    model.append(nn.Module())
    model[2].weight = nn.Parameter(model[0].weight)
    first, second = torch.randn(12, 16).chunk(2)
    model[0].first, model[0].second = nn.Parameter(first), nn.Parameter(second)
    return model


def unparametrized() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(20, 30))
    parametrize.remove_parametrizations(layer, "weight")
    return layer


def cast() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 20)).half()
    model[2].to(torch.float64)
    return model.append(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last))


def moved() -> nn.Module:
    layer = nn.Linear(16, 32)
    with torch.no_grad():
        layer.weight.set_(torch.randn(8, 16))
        layer.bias.requires_grad_(False).resize_(8).normal_()
    return layer


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(30, 40),
    "tied": Tied,
    "sharing": sharing,
    "lstm": lambda: nn.LSTM(20, 24, num_layers=2, bidirectional=True, proj_size=7),
    "gru": lambda: nn.GRU(20, 24),
    "attention": lambda: nn.MultiheadAttention(24, 3, kdim=16, vdim=12),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 40, batch_first=True), 3),
    "transformer": lambda: nn.Transformer(24, 3, 2, 2, 40),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.PReLU(4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(20, 30)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv1d(20, 30, 3), dim=2),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(20, 30)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(20, 30)),
    "unparametrized": unparametrized,
    "bilinear": lambda: nn.Bilinear(8, 9, 10),
    "from pretrained": lambda: nn.Embedding.from_pretrained(torch.randn(20, 30)),
    "cast": cast,
    "moved": moved,
}


def build(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return make(), torch.get_rng_state()


def check_same(built: nn.Module, plain: nn.Module) -> None:
    """Same parameters and buffers: names, sharing, sizes, strides, dtypes, values."""
    for find in (nn.Module.named_parameters, nn.Module.named_buffers):
        found = list(find(built, remove_duplicate=False))
        expected = list(find(plain, remove_duplicate=False))
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, a), (_, b) in zip(found, expected, strict=True):
            assert (a.shape, a.stride(), a.dtype, a.requires_grad) == (b.shape, b.stride(), b.dtype, b.requires_grad)
            assert torch.equal(a, b), name
        ties = [[x is y for _, y in found] for _, x in found]
        assert ties == [[x is y for _, y in expected] for _, x in expected]


def spilled(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if builder_of(p) is not None]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_have_the_values_of_an_ordinary_build(name: str, tmp_path: Path) -> None:
    plain, stream = build(PLAIN[name])
    with building(nvme=tmp_path, keep=KEEP):
        built, same_stream = build(PLAIN[name])
    assert torch.equal(stream, same_stream)
    assert len(spilled(built)) == len(list(built.parameters()))
    check_same(built, plain)
    if name != "old weight norm":  # which torch cannot copy
        copied = copy.deepcopy(built)
        check_same(copied, plain)
        assert not spilled(copied), "a copy that is made later is an ordinary model"


@pytest.mark.parametrize("name", ZOO)
def test_stock_models_have_the_values_of_an_ordinary_build(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = ZOO[name].build()
    stream = torch.get_rng_state()
    with building(nvme=tmp_path, keep="20KiB"):
        built = ZOO[name].build()
        assert torch.equal(stream, torch.get_rng_state())
        assert built.num_parameters() == plain.num_parameters()
    assert len(spilled(built)) == len(list(built.parameters()))
    check_same(built, plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "wav2vec2"])
def test_a_built_model_can_be_used_without_prepare(name: str, tmp_path: Path) -> None:
    results = []
    for context in (building(nvme=tmp_path, keep=KEEP), torch.no_grad()):
        with context, torch.enable_grad():
            model = ZOO[name].build()
        batch = next(ZOO[name].batches())
        torch.manual_seed(3)
        loss = model(**batch).loss
        loss.backward()
        results.append((model, loss.detach(), [p.grad for p in model.parameters()]))
    (built, loss, grads), (plain, plain_loss, plain_grads) = results
    assert torch.equal(loss, plain_loss)
    for a, b in zip(grads, plain_grads, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    for p in built.parameters():
        p.grad = None
    built.load_state_dict(plain.state_dict())
    check_same(built, plain)
    assert all(torch.equal(a, b) for a, b in zip(built.state_dict().values(), plain.state_dict().values(), strict=True))


def test_resized_embeddings(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = ZOO["qwen2"].build()
        model.resize_token_embeddings(50)
        return model

    with building(nvme=tmp_path, keep=KEEP):
        built = make()
    check_same(built, make())


def test_an_optimizer_steps_on_a_built_model(tmp_path: Path) -> None:
    models = [build(Tied)[0]]
    with building(nvme=tmp_path, keep=KEEP):
        models.append(build(Tied)[0])
    for model in models:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model(torch.arange(31)).square().sum().backward()
        optimizer.step()
    check_same(models[1], models[0])


# --- memory


def layers(count: int = 8) -> nn.Module:
    return nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(count))


def test_no_more_than_asked_stays_in_memory(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=3 * KEEP) as builder:
        model = layers()
    assert builder.blocks.resident == 3 * KEEP
    for layer in model:
        layer.weight.sum()
        assert builder.blocks.resident == 3 * KEEP


def test_small_parameters_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", KEEP + 1)
    with building(nvme=tmp_path, keep=KEEP):
        model = nn.ModuleList([*layers(), nn.Linear(64, 64, bias=False)])
    assert [type(p) for p in model.parameters()] == 8 * [nn.Parameter] + [Growing]


def test_bytes_that_did_not_change_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = layers()
    written: list[int] = []
    store = builder.tier.store
    monkeypatch.setattr(builder.tier, "store", lambda slot, src: (written.append(src.numel()), store(slot, src)))
    for layer in model:
        _ = (layer.weight.sum(), layer.weight.norm(), layer.weight.clone(), repr(layer), layer.weight.shape)
    assert written == [KEEP], "the last one had never left"
    with torch.no_grad():
        model[1].weight.add_(1)
        model[2].weight[0] = 1
    model[3].weight.data.zero_()
    model[4].weight.sum()
    assert written == 4 * [KEEP]
    assert model[3].weight.eq(0).all() and model[2].weight[0].eq(1).all()


def test_views_keep_a_parameter_in_memory_and_are_written_back(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = layers()
    expected = model[0].weight.detach().clone()
    row = model[0].weight.data[3]
    for _ in range(2):
        for layer in model:
            layer.weight.sum()
    assert torch.equal(row, expected[3])
    row.fill_(7)
    expected[3] = 7
    del row
    for layer in model:
        layer.weight.sum()
    assert builder.blocks.resident == KEEP
    assert torch.equal(model[0].weight, expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_keeps_a_parameter_in_memory(frozen: bool, tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = layers()
    weight = model[0].weight.requires_grad_(not frozen)
    x = torch.ones(32, 32, requires_grad=True)
    y = (weight * x).sum()
    for layer in model:
        layer.weight.sum()
    y.backward()
    assert torch.equal(x.grad, weight)
    assert frozen or torch.equal(weight.grad, x)
    del y
    model[1].weight.sum()
    assert builder.blocks.resident == KEEP


def test_an_array_keeps_its_parameter_in_memory_for_good(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        model = layers()
    array = model[0].weight.detach().numpy()
    array[:] = 3
    for layer in model:
        layer.weight.sum()
    assert model[0].weight.eq(3).all() and (array == 3).all()


def test_a_use_that_fails_changes_nothing(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        model = layers()
    before = model[0].weight.detach().clone()
    for layer in model:
        with pytest.raises(RuntimeError):
            layer.weight @ torch.ones(3, 3)
    assert torch.equal(model[0].weight, before)


MEMORY = """
import resource, sys, torch
from torch import nn
from overspill.runtime.building import building

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

nn.Linear(2, 2)(torch.ones(2))
resident, data = status("VmRSS"), status("VmData")
resource.setrlimit(resource.RLIMIT_DATA, 2 * (data + (512 << 20),))
with building(nvme=sys.argv[1], keep="128MiB"):
    layer = nn.TransformerEncoderLayer(1024, 8, 4096, batch_first=True)
    model = nn.ModuleList([nn.TransformerEncoder(layer, 14), *(nn.Linear(2048, 2048) for _ in range(24))])
    for module in model[1:5]:
        nn.init.trunc_normal_(module.weight)
assert sum(p.nbytes for p in model.parameters()) > 1 << 30
print(status("VmHWM") - resident)
"""


def test_a_model_larger_than_memory_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300 << 20
    assert list(tmp_path.iterdir()) == []


# --- taking over


@pytest.mark.parametrize("keep", [KEEP, 1 << 30])
@pytest.mark.parametrize("piece_bytes", [100, 5000, 32 << 20])
def test_pieces_are_the_parameter_in_memory_order(piece_bytes: int, keep: int, tmp_path: Path) -> None:
    makes = (lambda: nn.Linear(70, 80, dtype=torch.bfloat16), cast, Tied, sharing)
    plain = nn.ModuleList(build(make)[0] for make in makes)
    with building(nvme=tmp_path, keep=keep) as builder:
        built = nn.ModuleList(build(make)[0] for make in makes)
    resident = builder.blocks.resident
    for p, q in zip(built.parameters(), plain.parameters(), strict=True):
        memory = torch.as_strided(q.detach(), (q.numel(),), (1,))
        found = torch.empty_like(memory)
        covered = 0
        step = max(1, piece_bytes // p.element_size())
        for first in range(0, p.numel(), step):
            piece = read_built(p, first, min(first + step, p.numel()))
            assert first == covered and piece.dtype == q.dtype and piece.nbytes <= piece_bytes
            found[first : first + piece.numel()] = piece
            covered += piece.numel()
        assert covered == q.numel() and torch.equal(found, memory)
    assert builder.blocks.resident == resident


def test_release_leaves_an_empty_plain_parameter(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = build(Tied)[0]
    params = list(model.parameters())
    model.scale.note = "kept"
    disk = builder.tier.disk_bytes()
    for p in params:
        shape = p.shape
        builder.release(p)
        assert type(p) is nn.Parameter and builder_of(p) is None and p.shape == shape
        assert p.untyped_storage().nbytes() == 0
        assert builder.tier.disk_bytes() <= disk
        with pytest.raises(StateError, match="builder_of"):
            builder.release(p)
    assert model.scale.note == "kept" and list(vars(model.scale)) == ["note"]
    assert builder.tier.disk_bytes() == builder.tier.used() == builder.blocks.resident == 0
    assert list(tmp_path.iterdir()) == []


def test_disk_space_comes_back_as_parameters_are_released(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = layers(20)
    before = builder.tier.disk_bytes(), builder.tier.used()
    for layer in model[:10]:
        builder.release(layer.weight)
    assert builder.tier.disk_bytes() <= before[0] - 9 * KEEP
    assert builder.tier.used() == before[1] - 10 * KEEP


def test_release_leaves_views_and_sharers_alone(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = sharing()
    values = [p.detach().clone() for p in model.parameters()]
    view = model[0].second.detach()
    builder.release(model[0].first)
    builder.release(model[0].weight)
    assert torch.equal(view, values[-1] if values[-1].shape == view.shape else view)
    assert torch.equal(model[1].weight, values[0])
    assert model[0].weight.untyped_storage().nbytes() == 0


def test_spans_tell_who_shares_memory(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        model = sharing()
    assert span_of(model[0].weight) == span_of(model[1].weight)
    key, begin, end = span_of(model[0].first)
    assert (key, end) == span_of(model[0].second)[:2] and end - begin == model[0].first.nbytes
    assert span_of(model[0].bias)[0] != span_of(model[1].bias)[0]


# --- what is left alone, what is refused, what is cleaned up


def test_other_parameters_are_left_alone(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        with torch.device("meta"):
            meta = nn.Linear(30, 40)
        lazy = nn.LazyLinear(20)
        gaps = nn.Module()
        gaps.weight = nn.Parameter(torch.ones(1, 30).expand(40, 30))
        array = nn.Module()
        array.weight = nn.Parameter(torch.from_numpy(torch.ones(100).numpy()))
        empty = nn.Linear(0, 7, bias=False)
    for model in (meta, lazy, gaps, array, empty, nn.Linear(30, 40)):
        assert not spilled(model)
    assert meta.weight.is_meta and gaps.weight.sum() == 1200 and array.weight.sum() == 100
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_asked_for() -> None:
    with pytest.raises(OptionError, match="nvme="), building():
        pass


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="expected a folder"), building(nvme=tmp_path / "none"):
        pass


def test_one_at_a_time(tmp_path: Path) -> None:
    with building(nvme=tmp_path):
        with pytest.raises(StateError, match="one building"), building(nvme=tmp_path):
            pass
        assert builder_of(nn.Linear(30, 40).weight)
    with pytest.raises(ZeroDivisionError), building(nvme=tmp_path):
        raise ZeroDivisionError
    assert builder_of(nn.Linear(30, 40).weight) is None
    with building(nvme=tmp_path):
        pass


def test_two_models_of_two_contexts(tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        with building(nvme=tmp_path, keep=KEEP):
            models.append(build(Tied, seed)[0])
    with torch.no_grad():
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            p.copy_(q)
    models[0].raw.data = models[1].raw
    check_same(models[0], models[1])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_limit_for_each_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = {tmp_path / "a": 4 * KEEP, tmp_path / "b": 4 * KEEP}
    with building(nvme=folders, keep=KEEP) as builder:
        model = build(layers)[0]
        assert builder.tier.disk_bytes() <= 8 * KEEP and len(list(tmp_path.glob("*/*"))) == 2
        with pytest.raises(TierError, match="raise the limit"):
            layers(2)
    gc.collect()
    check_same(model, build(layers)[0])


def test_replaced_parameters_leave_no_bytes(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = layers(1)
        for _ in range(50):
            model[0].weight = nn.Parameter(model[0].weight.data.clone())
            nn.Linear(32, 32, bias=False)
        assert len(builder.blocks) == 1 and builder.tier.used() <= 3 * KEEP


def test_the_file_goes_with_the_model(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        model = build(Tied)[0]
        other = build(Tied)[0]
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    del model
    gc.collect()
    assert folder.exists() and other.raw.sum().isfinite()
    del other
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_builder_that_is_kept_keeps_no_file(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP) as builder:
        model = build(Tied)[0]
    del model
    gc.collect()
    assert isinstance(builder, Builder) and list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from torch import nn
from overspill.runtime.building import building
with building(nvme=sys.argv[1], keep=1):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    print("built", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "built\n"
    with building(nvme=tmp_path):
        assert len(list(tmp_path.iterdir())) == 1, "it is still alive"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(tmp_path.iterdir())) == 1
    with building(nvme=tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    with building(nvme=tmp_path, keep=KEEP):
        model = layers()
    child = os.fork()
    if child == 0:
        try:
            model[0].weight.sum()
        except StateError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert model[0].weight.sum().isfinite()
