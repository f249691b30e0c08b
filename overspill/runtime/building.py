"""Builds a model larger than memory: each parameter goes to disk soon after the constructor has registered it.

Note [Parameters being built]: constructors write to their parameters after registering them, tie them, copy them, read
them. So a parameter that is being built is a closed one (see Note [Closed parameters]) whose keeper is the builder:
any use brings its bytes back, and when more than `keep` bytes are in memory the ones used longest ago leave, written to
disk if they may have changed. Unlike a prepared parameter it may still get other memory (`p.data = x`, `half()`).
"""

import contextlib
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map_only

from overspill.config import NvmeOption, Size, parse_nvme, parse_size
from overspill.errors import OptionError, StateError
from overspill.runtime.door import HANDLE, Closed, NoMasters, keeper_of, say_once
from overspill.specs import KiB, dense_stride
from overspill.tiers import GrowingTier, freed_at_once, host_available
from overspill.units.blocks import Block, Blocks

SMALL = 64 * KiB
"""Parameters below this many bytes stay in memory: there is little to gain."""

log = logging.getLogger("overspill")
_active: list["Builder"] = []


@contextlib.contextmanager
def building(nvme: NvmeOption = None, keep: Size = "256MiB") -> Iterator["Builder"]:
    """Inside this context a model larger than memory can be built, with the values of an ordinary build.

    `nvme`: a folder (or several, as for `prepare`) for the parameters; `keep`: how much of them stays in memory.
    Afterwards the parameters stay on disk and can be used as any others, until `prepare` takes them over. Parameters
    on meta or on an accelerator are left alone.
    """
    paths = parse_nvme(nvme)
    if not paths:
        raise OptionError(
            "expected nvme= to name a folder on a local disk for the parameters, found none; give one, as in "
            "`with overspill.building(nvme='scratch'):`"
        )
    limit = parse_size("keep", keep, there=host_available())
    if _active:
        raise StateError(
            "expected one building() at a time, found another one that is active; build this model inside of that one, "
            "or after it"
        )
    builder = Builder(GrowingTier(paths), limit)
    _active.append(builder)
    hook = register_module_parameter_registration_hook(_registered)
    try:
        with freed_at_once():
            yield builder
    finally:
        hook.remove()
        _active.clear()
        builder.close_if_empty()


def builder_of(p: Tensor) -> "Builder | None":
    """Who keeps the bytes of a parameter that was built inside `building`; None for any other."""
    keeper = keeper_of(p)
    return keeper if isinstance(keeper, Builder) else None


def span_of(p: Tensor) -> tuple[int, int, int]:
    """Where the bytes of a built parameter lie: (a number for the memory, first byte, last byte + 1). Its address
    cannot tell, because two parameters may have the same one after each other."""
    begin, size = int(p.storage_offset()), p.element_size()
    return _place_of(p).block.key, begin * size, (begin + p.numel()) * size


def read_built(p: nn.Parameter, begin: int, end: int) -> Tensor:
    """Some elements of a built parameter in memory order, without bringing it back; only to be read."""
    assert tuple(p.stride()) == dense_stride(p.shape, p.stride()), "a parameter with gaps has no memory order"
    place, (_key, start, _end), size = _place_of(p), span_of(p), p.element_size()
    with place.builder._locked():
        return place.builder.blocks.read(place.block, start + begin * size, (end - begin) * size).view(p.dtype)


def _registered(module: nn.Module, name: str, p: nn.Parameter) -> None:
    """A module has got a parameter."""
    if type(p) is nn.Parameter and p.device.type not in ("cpu", "meta"):
        say_once("building leaves parameters on %s where they are", p.device.type)
    for builder in _active:
        builder.adopt(p)


class Growing(Closed):
    """A parameter that is being built. See Note [Parameters being built]."""

    share_memory_ = Tensor.share_memory_
    resize_ = Tensor.resize_
    resize_as_ = Tensor.resize_as_

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        # Of this one torch does not tell __torch_function__.
        return _place_of(self).builder.moving(self, Tensor.set_, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in MOVES and isinstance(args[0], Growing):
            return _place_of(args[0]).builder.moving(args[0], func, args[1:], kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def detach(self) -> Tensor:
        detached = super().detach()
        # nn.Parameter(p), a new parameter over the same memory, insists that p.detach() has the class of p.
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            alias = nn.Parameter(detached)
            _place_of(self).builder.adopt(alias)
            return alias
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = super().__deepcopy__(memo)
        # Nobody registers a copy: deepcopy fills a module's dictionaries itself.
        for builder in _active:
            builder.adopt(copied)
        return copied


MOVES: set[Any] = {
    Tensor.data.__set__,  # type: ignore[attr-defined]
    Tensor.set_,
    Tensor.resize_,
    Tensor.resize_as_,
    Tensor.share_memory_,
}
"""What gives a parameter other memory."""


class Place:
    """What a parameter carries: its builder and its block. Called, it gives the builder; it says when it goes."""

    def __init__(self, builder: "Builder", block: Block) -> None:
        self.builder = builder
        self.block = block

    def __call__(self) -> "Builder":
        return self.builder

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.builder.orphaned(self.block)


def _place_of(p: Tensor) -> Place:
    place = p.__dict__.get(HANDLE)
    if not isinstance(place, Place):
        raise StateError(
            f"expected a parameter that was built inside overspill.building, found another one of shape "
            f"{tuple(p.shape)}; ask builder_of(p) first"
        )
    return place


class Builder:
    """Keeps the parameters of models that are being built (door.Keeper)."""

    masters = NoMasters()

    look = staticmethod(lambda: None)
    """Nothing is due before a copy is made."""

    def __init__(self, tier: GrowingTier, keep: int) -> None:
        self.tier = tier
        self.blocks = Blocks(tier, keep)
        self._visiting: dict[int, list[Block]] = {}  # what each thread uses at the moment
        self._orphans: deque[Block] = deque()
        self._lock = threading.Lock()

    # --- parameters come and go

    def adopt(self, p: nn.Parameter) -> None:
        """Take the parameter in, if it is one of those that can leave memory."""
        if not _adoptable(p):
            return
        with self._locked():
            block = self.blocks.take(p.untyped_storage())
            block.changed = True
            block.params.append(weakref.ref(p))
            setattr(p, HANDLE, Place(self, block))
            p.__class__ = Growing
            self._make_room(block)

    def moving(self, p: nn.Parameter, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do `func`, which gives the parameter other memory, to a plain one, and take that in again."""
        args, kwargs = tree_map_only(Closed, lambda x: x.detach(), (args, kwargs))
        self.visit([p])
        with self._locked():
            _let_go(p, self.blocks)
        try:
            return func(p, *args, **kwargs)
        finally:
            self.adopt(p)
            self.leave([], graph=False, written=True)

    def release(self, p: nn.Parameter) -> None:
        """Forget the parameter and free its memory and its disk space; a plain parameter without bytes is left."""
        with self._locked():
            block = _place_of(p).block
            alone = len(block.params) == 1 and not block.held
            _let_go(p, self.blocks)
            if alone:
                block.flat.untyped_storage().resize_(0)
            else:
                # Others look into the storage, so the parameter gets another one, which is empty.
                empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="cpu")
                empty.untyped_storage().resize_(0)
                p.data = empty
        self.close_if_empty()

    def close_if_empty(self) -> None:
        """Remove the files when the last parameter is gone and no more can come."""
        with self._locked():
            if not len(self.blocks) and self not in _active:
                self.tier.close()

    def orphaned(self, block: Block) -> None:
        """A parameter of this block is gone. Comes at any moment, even in the midst of a method of ours."""
        self._orphans.append(block)
        self._bury()

    # --- uses (door.Keeper)

    def visit(self, params: list[nn.Parameter]) -> None:
        with self._locked():
            blocks = list(dict.fromkeys(_place_of(p).block for p in params))
            # Stays until the thread's next visit if the use fails: then nobody leaves.
            self._visiting[threading.get_ident()] = blocks
            self.blocks.use(blocks, {block for visited in self._visiting.values() for block in visited})

    def leave(self, params: list[nn.Parameter], graph: bool, written: bool) -> None:
        with self._locked():
            blocks = self._visiting.pop(threading.get_ident(), [])
            for block in blocks if written else ():
                block.changed = True
            self._make_room(*blocks)

    def touched(self, p: nn.Parameter) -> None:
        """Only open parameters are touched, and ours are always closed."""

    def given(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        """Gradients stay where they are put."""

    def copy_of(self, p: nn.Parameter) -> Tensor | None:
        return None

    # ---

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            yield
        self._bury()

    def _make_room(self, *using: Block) -> None:
        self.blocks.make_room({*using, *(block for visited in self._visiting.values() for block in visited)})

    def _bury(self) -> None:
        """Drop the blocks whose parameters are all gone. If the lock is taken, its holder does so afterwards."""
        while self._orphans and self._lock.acquire(blocking=False):
            try:
                while self._orphans:
                    block = self._orphans.popleft()
                    block.params = [ref for ref in block.params if ref() is not None]
                    if not block.params:
                        self.blocks.drop(block)
                if not len(self.blocks) and self not in _active:
                    self.tier.close()
            finally:
                self._lock.release()


def _let_go(p: nn.Parameter, blocks: Blocks) -> None:
    """Make it a plain parameter; its block goes if it was the last one there."""
    block = _place_of(p).block
    block.params = [ref for ref in block.params if ref() is not p]
    p.__class__ = nn.Parameter
    delattr(p, HANDLE)
    if not block.params:
        blocks.drop(block)


def _adoptable(p: nn.Parameter) -> bool:
    """Plain parameters in host memory, large enough, whose elements lie without gaps in memory that torch may free."""
    if type(p) is not nn.Parameter or p.device.type != "cpu" or p.layout is not torch.strided or p.is_inference():
        return False
    dense = tuple(p.stride()) == dense_stride(p.shape, p.stride())
    return dense and p.numel() * p.element_size() >= SMALL and p.untyped_storage().resizable()
