"""A worker's part of `overspill bench quality`: a small GPT that reads Python's own sources, byte by byte.

Every way to keep states begins with the same values and sees the same bytes in the same order, so whatever differs
afterwards comes from how they are kept, and from chance: curves of two seeds differ more than those of two formats
should.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import overspill
from overspill.cli.loop import be_deterministic, compute_device
from overspill.cli.workload import read_corpus

CASES = {
    "train": "from the first values on",
    "fine-tune": "a model that has read something else before",
    "outliers": "every tenth step a few elements of each gradient are a thousand times too large; nothing is clipped",
    "tiny": "gradients of 1e-8 of their size; nothing is clipped",
}
PLAIN = "plain"
"""torch alone: fp32 weights, autocast to bf16."""
TINY = 1e-8
EPS = 1e-16
"""Adam's eps where gradients are tiny: its own would be larger than they are."""
SPIKE, SPIKES, EVERY = 1000.0, 1e-4, 10
TUNED = 0.3
"""The share of the learning rate, where something was learned before."""
BYTES = 256
HELD_OUT = 0.05
"""The share of the text, at its end, that is never trained on."""
LOOKS = 20
"""How many times the validation loss is looked at in the course of a case."""

News = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What is learned, and how."""

    case: str = "train"
    steps: int = 3000
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    seq: int = 256
    batch: int = 16
    lr: float = 1e-4
    """Small, as a delay wants it: docs/log.md."""
    warmup: int = 100
    """Steps in which the learning rate rises; then it falls as a cosine, to a tenth."""
    clip: float = 1.0
    decay: float = 0.1
    validated: int = 32
    """Batches of a look at the validation loss."""
    seed: int = 0
    start: str | None = None
    """File of the values that a fine-tune begins with; None: it makes them itself."""


class Text:
    """Windows of the text. A fine-tune reads the second half, after somebody read the first."""

    def __init__(self, lesson: Lesson, device: torch.device) -> None:
        self._lesson, self._device = lesson, device
        self._corpus = read_corpus()

    def windows(self, part: tuple[float, float], seed: int) -> Iterator[Tensor]:
        """int64 [batch, seq], for ever."""
        begin, end = (int(share * len(self._corpus)) for share in part)
        generator, lesson = torch.Generator().manual_seed(seed), self._lesson
        while True:
            starts = torch.randint(begin, end - lesson.seq, (lesson.batch,), generator=generator)
            yield self._corpus[starts[:, None] + torch.arange(lesson.seq)].long().to(self._device)


def learn(lesson: Lesson, keywords: Mapping[str, Any] | None, told: News) -> dict[str, Any]:
    """A case by ours, with these keywords of `prepare`, or by plain torch: losses, and validation losses."""
    device = compute_device()
    be_deterministic(device)
    text, model = Text(lesson, device), build(lesson, device)
    before = lesson.case == "fine-tune"
    if before and lesson.start is None:
        _read_before(lesson, model, text, told)
    elif before:
        model.load_state_dict(torch.load(str(lesson.start), map_location=device, weights_only=True))
    learner = Learner(lesson, model, keywords, device, TUNED if before else 1.0)
    losses: list[Tensor] = []
    looks: list[tuple[int, float]] = [(0, learner.validate(text))]
    part = (0.5, 1 - HELD_OUT) if before else (0.0, 1 - HELD_OUT)
    for step, tokens in zip(range(lesson.steps), text.windows(part, lesson.seed + 1), strict=False):
        losses.append(learner.step(tokens, step))
        if (step + 1) * LOOKS // lesson.steps > step * LOOKS // lesson.steps:
            looks.append((step + 1, learner.validate(text)))
            told(step + 1, lesson.steps)
    return {"losses": torch.stack(losses).tolist(), "validation": looks, "final": looks[-1][1]}


def begin(lesson: Lesson, told: News) -> dict[str, Any]:
    """Write the values that fine-tunes begin with."""
    device = compute_device()
    assert lesson.start is not None, "where they go"
    be_deterministic(device)
    model = build(lesson, device)
    _read_before(lesson, model, Text(lesson, device), told)
    torch.save(model.state_dict(), lesson.start)
    return {}


def _read_before(lesson: Lesson, model: nn.Module, text: Text, told: News) -> None:
    """Teach a model the first half of the text, by plain torch."""
    first = Learner(lesson, model, None, compute_device())
    for step, tokens in zip(range(lesson.steps), text.windows((0.0, 0.5), lesson.seed), strict=False):
        first.step(tokens, step)
        told(step + 1, lesson.steps)


def build(lesson: Lesson, device: torch.device) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(lesson.seed)
    config = GPT2Config(
        n_layer=lesson.layers,
        n_embd=lesson.hidden,
        n_head=lesson.heads,
        n_positions=lesson.seq,
        vocab_size=BYTES,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.use_cache = False
    model: nn.Module = GPT2LMHeadModel(config).to(device)
    return model


class Learner:
    """One way to train one model. `keywords`: None is plain torch; `rate`: a factor of the learning rate."""

    def __init__(
        self,
        lesson: Lesson,
        model: nn.Module,
        keywords: Mapping[str, Any] | None,
        device: torch.device,
        rate: float = 1.0,
    ) -> None:
        self._lesson, self._device, self._plain = lesson, device, keywords is None
        eps = EPS if lesson.case == "tiny" else 1e-8
        own = torch.optim.AdamW(model.parameters(), lr=lesson.lr, weight_decay=lesson.decay, eps=eps)
        self._model: nn.Module = model
        self._optimizer: Any = own
        if keywords is not None:
            self._model, self._optimizer = overspill.prepare(model, own, **keywords)
        self._rates = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: rate * _rate(lesson, step))
        self._spikes = torch.Generator().manual_seed(lesson.seed)
        self._clips = lesson.clip > 0 and lesson.case in ("train", "fine-tune")

    def step(self, tokens: Tensor, number: int) -> Tensor:
        loss = self._loss(tokens)
        (loss * TINY if self._lesson.case == "tiny" else loss).backward()
        if self._lesson.case == "outliers" and number % EVERY == EVERY - 1:
            self._add_spikes()
        if self._clips and self._plain:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._lesson.clip)
        elif self._clips:
            self._optimizer.clip_grad_norm_(self._lesson.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._rates.step()
        return loss.detach()

    def validate(self, text: Text) -> float:
        """The same windows every time."""
        windows = text.windows((1 - HELD_OUT, 1.0), self._lesson.seed + 2)
        self._model.eval()
        with torch.no_grad():
            found = [self._loss(tokens) for tokens, _ in zip(windows, range(self._lesson.validated), strict=False)]
        self._model.train()
        return float(torch.stack(found).mean())

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._plain):
            found: Tensor = self._model(input_ids=tokens, labels=tokens).loss
        return found.float()

    def _add_spikes(self) -> None:
        for p in self._model.parameters():
            count = max(1, int(p.numel() * SPIKES))
            places = torch.randint(0, p.numel(), (count,), generator=self._spikes).to(self._device)
            with torch.no_grad():
                assert p.grad is not None, "all are trained"
                factors = torch.ones(p.numel(), device=self._device).index_fill_(0, places, SPIKE)
                p.grad.mul_(factors.view(p.shape))


def _rate(lesson: Lesson, step: int) -> float:
    """Of the learning rate."""
    if step < lesson.warmup:
        return (step + 1) / lesson.warmup
    done = (step - lesson.warmup) / max(1, lesson.steps - lesson.warmup)
    return float(0.55 + 0.45 * torch.cos(torch.tensor(done * torch.pi)))
