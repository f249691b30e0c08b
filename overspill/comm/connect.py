"""Finds the other ranks and makes the groups."""

import atexit
import ctypes
import itertools
import logging
import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overspill.comm.comm import Comm, Groups
from overspill.comm.groups import GlooGroup, Group, NcclGroup
from overspill.comm.mesh import data_parallel_ranks
from overspill.comm.pulse import Pulse, ending, node
from overspill.comm.watch import Watch
from overspill.comm.witness import Seat
from overspill.errors import OptionError

_ASKED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
# Our own watch decides before gloo does, and knows whom to name.
_LATER = 60.0

log = logging.getLogger("overspill")
_torch: Any = dist  # much of what is needed has no types
_made: Counter[tuple[int, ...]] = Counter()


def connect(mesh: Any, device: torch.device) -> Comm | None:
    """The data-parallel ranks of this process, or None if there is only this one. All of them call it together.

    `mesh` is a torch DeviceMesh or None, which means all ranks. `device` is where the tensors will be.
    """
    if not join(device):
        if mesh is not None:
            raise OptionError(
                "expected torch.distributed to be initialised when a mesh is given, found that it is not; start the "
                "script with torchrun, or call torch.distributed.init_process_group"
            )
        return None
    world = dist.get_rank()
    table = [list(range(dist.get_world_size()))] if mesh is None else data_parallel_ranks(mesh, world)
    ranks = tuple(itertools.chain.from_iterable(table))
    store = _torch.distributed_c10d._get_default_store()
    return _Connection(store, Seat(ranks.index(world), ranks, _keeper(store)), len(table[0])).comm(device)


def join(device: torch.device) -> bool:
    """Initialise torch.distributed if torchrun's environment asks for it and nobody has; whether it is now."""
    if dist.is_available() and dist.is_initialized():
        return True
    if not all(name in os.environ for name in _ASKED):
        return False
    _initialise(device)
    return True


# Note [groups of our own]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# `dist.new_group` must be called by every rank of the world in the same order, also for groups it is not in; with
# tensor parallelism each data-parallel row would have to know of the others, and the user's threads be still.
# So the backends are made directly over a part of the store that only their members use. The part is named by its
# ranks and by how often they have connected: a closed group leaves its addresses behind in the store.


class _Connection:
    """What is needed to make a Comm."""

    def __init__(self, store: Any, seat: Seat, size: int) -> None:
        self._seat = seat
        self._size = size
        self._pid = os.getpid()
        self._nccls: list[NcclGroup] = []
        self._groups: list[Any] = []
        ranks = seat.world_ranks
        _made[ranks] += 1
        # A connection of its own: a client does one thing at a time, and torch's own may wait for long.
        self._store = _torch.PrefixStore(f"overspill/{'-'.join(map(str, ranks))}/{_made[ranks]}", store.clone())
        self._pulse = Pulse(_torch.PrefixStore("life", self._store), seat.place, len(ranks))
        self._watch = Watch(self._pulse, seat, _timeout())

    def comm(self, device: torch.device) -> Comm:
        pulse, watch = self._pulse, self._watch
        pulse.start()
        atexit.register(self._at_exit)
        watch.arrive()
        row, rank = divmod(self._seat.place, self._size)
        replicas = len(self._seat.world_ranks) // self._size
        make = self._nccl if device.type == "cuda" and _has_nccl() else self._gloo
        shard = make(f"shard {row}", rank, self._size)
        replicate = make(f"replicate {rank}", row, replicas) if replicas > 1 else None
        totals = self._gloo(f"totals {row}", rank, self._size)
        control = self._raw_gloo("control", self._seat.place, len(self._seat.world_ranks))
        if self._nccls:
            pulse.patrol = self._patrol
        groups = Groups(shard, replicate, totals, control)
        comm = Comm(self._seat, self._size, groups, watch, self._hang_up)
        comm.locals = comm.exchange(node()).count(node())
        log.info("%d data-parallel ranks (%d x %d) over %s", comm.ranks, replicas, self._size, type(shard).__name__)
        return comm

    def _gloo(self, name: str, rank: int, size: int) -> Group:
        return GlooGroup(self._raw_gloo(name, rank, size), self._watch)

    def _raw_gloo(self, name: str, rank: int, size: int) -> Any:
        wait = timedelta(seconds=self._watch.timeout + _LATER)
        try:
            group = _torch.ProcessGroupGloo(_torch.PrefixStore(name, self._store), rank, size, wait)
        except RuntimeError as error:
            raise self._watch.broken(error, "the making of groups") from error
        self._groups.append(group)
        return group

    def _nccl(self, name: str, rank: int, size: int) -> Group:
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._watch.timeout + _LATER)
        group = _torch.ProcessGroupNCCL(_torch.PrefixStore(name, self._store), rank, size, options)
        self._groups.append(group)
        self._nccls.append(NcclGroup(group, self._watch))
        return self._nccls[-1]

    def _patrol(self) -> None:
        """Nobody waits for nccl on the host: the thread of the pulse looks after it, once a second."""
        if self._watch.patrol(lambda: any(group.pending() for group in self._nccls)):
            while self._nccls:
                self._nccls.pop().abort()

    def _hang_up(self) -> None:
        atexit.unregister(self._at_exit)
        # Who keeps the store stays until the end of the process anyway.
        self._end("it closed its model", linger=False)

    def _at_exit(self) -> None:
        self._end(ending(), linger=self._seat.keeper == self._seat.world_ranks[self._seat.place])

    def _end(self, reason: str, linger: bool) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has neither the threads nor a say
        self._watch.leave(reason)
        self._pulse.stop(linger)
        while self._nccls:
            self._nccls.pop().close()
        if self._watch.failed is not None:
            # Kept for ever: their threads may still wait for the dead, and whoever frees a group waits for them.
            for group in self._groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups.clear()


def _initialise(device: torch.device) -> None:
    """As torchrun's environment asks for: nccl for cuda, gloo for the host or where ranks share a GPU."""
    backend = "gloo"
    if device.type == "cuda":
        count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= count:
            backend = "cpu:gloo,cuda:nccl"
        if device.index is None and torch.cuda.current_device() == 0 and local % count:
            torch.cuda.set_device(local % count)
    dist.init_process_group(backend)
    log.info("torch.distributed initialised: %s, rank %d of %d", backend, dist.get_rank(), dist.get_world_size())
    atexit.register(_forget)


def _forget() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _has_nccl() -> bool:
    return "cuda:nccl" in str(_torch.distributed_c10d.get_backend_config())


def _keeper(store: Any) -> int | None:
    """The world rank whose process serves the store; None for torchrun's agent, and for a file."""
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    served = isinstance(store, _torch.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return 0 if served else None


def _timeout() -> float:
    """Seconds that a rank may be late: as the default process group has it, unless the user says otherwise."""
    asked = os.environ.get("OVERSPILL_TIMEOUT")
    if asked is None:
        group: Any = _torch.distributed_c10d._get_default_group()
        device = group._device_types[0]
        return float(group._get_backend(device).options._timeout.total_seconds())
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise OptionError(f"expected OVERSPILL_TIMEOUT in seconds, found {asked!r}; set it to a number above 0")
    return seconds
