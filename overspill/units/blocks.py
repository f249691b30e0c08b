"""Storages of parameters that leave memory for the disk and come back, those used longest ago first.

A storage into which somebody else has a view, or which a graph may read, stays: its references are counted.
Parameters that share a storage leave and come back together, so they keep sharing it. Nothing here is locked.
"""

import functools
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from overspill.tiers import GrowingTier, Slot


@functools.cache
def _count_of_one() -> int:
    """The count for a storage to which one tensor refers."""
    return _references(torch.empty(1, device="cpu"))


def _references(tensor: Tensor) -> int:
    """How often torch counts the tensor's storage. The storage's Python object is counted with the others, so it must
    be there every time."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


class Block:
    """One storage, the parameters that live in it, and its place on disk once it has been there."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.params: list[weakref.ref[nn.Parameter]] = []
        self.slot: Slot | None = None
        self.changed = True
        """Whether the bytes in memory may differ from those on disk."""
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=torch.uint8, device="cpu")
            self.flat = flat.set_(storage, 0, (self.nbytes,), (1,))
        self.key: int = storage._cdata

    @property
    def here(self) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def held(self) -> bool:
        """Whether its memory must stay."""
        alive = [p for ref in self.params if (p := ref()) is not None]
        # Besides the parameters only `flat` refers to the storage. And to a parameter only its Python object refers,
        # unless it is in a graph: then also its node, or the operation that saved it.
        if _references(self.flat) > _count_of_one() + len(alive):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            in_graph = any(p._use_count() > 1 for p in alive)  # type: ignore[attr-defined]
        # Once a NumPy array was made of it, torch never resizes a storage again.
        return in_graph or not self.flat.untyped_storage().resizable()


class Blocks:
    """Keeps at most `keep` bytes of them in memory, as far as it may."""

    def __init__(self, tier: GrowingTier, keep: int) -> None:
        self._tier = tier
        self._keep = keep
        self._all: dict[int, Block] = {}  # by the address of the storage
        self._here: dict[int, Block] = {}  # those in memory, the one used longest ago first
        self._resident = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def resident(self) -> int:
        """Bytes in memory."""
        return self._resident

    def take(self, storage: torch.UntypedStorage) -> Block:
        """The block of a storage that is in memory; a new one if it has none."""
        block = self._all.get(storage._cdata)
        if block is None:
            block = self._all[storage._cdata] = Block(storage)
            self._resident += block.nbytes
        self.use([block], ())
        return block

    def use(self, blocks: Sequence[Block], others: Collection[Block]) -> None:
        """Bring these blocks into memory, and let others leave for them, but not those in `others`."""
        away = [block for block in blocks if not block.here]
        self.make_room({*blocks, *others}, sum(block.nbytes for block in away))
        for block in away:
            self._bring(block)
        for block in blocks:
            self._here.pop(block.key, None)
            self._here[block.key] = block

    def make_room(self, using: Collection[Block], incoming: int = 0) -> None:
        """Let blocks leave until `incoming` bytes more are within the limit, or none is left that may."""
        if self._resident + incoming <= self._keep:
            return
        for block in list(self._here.values()):
            if block not in using and not block.held:
                self._send(block)
                if self._resident + incoming <= self._keep:
                    return

    def drop(self, block: Block) -> None:
        """Forget a block and give its disk space back; its memory is its parameters' own."""
        if self._all.get(block.key) is not block:
            return
        del self._all[block.key]
        if self._here.pop(block.key, None) is not None:
            self._resident -= block.nbytes
        if block.slot is not None:
            self._tier.free(block.slot)

    def read(self, block: Block, begin: int, nbytes: int) -> Tensor:
        """Some of its bytes, uint8, from wherever they are."""
        if block.here:
            return block.flat[begin : begin + nbytes]
        assert block.slot is not None, "a block that is neither here nor on the disk"
        out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._tier.load(block.slot, out, begin)
        return out

    def _send(self, block: Block) -> None:
        if block.changed:
            if block.slot is None:
                block.slot = self._tier.reserve(block.nbytes)
            self._tier.store(block.slot, block.flat)
            block.changed = False
        self._shrink(block)

    def _shrink(self, block: Block) -> None:
        block.flat.untyped_storage().resize_(0)
        self._here.pop(block.key, None)
        self._resident -= block.nbytes

    def _bring(self, block: Block) -> None:
        assert block.slot is not None, "a block that is neither here nor on the disk"
        block.flat.untyped_storage().resize_(block.nbytes)
        self._resident += block.nbytes
        try:
            self._tier.load(block.slot, block.flat)
        except BaseException:
            # Nobody may take what is there now for its bytes.
            self._shrink(block)
            raise
