"""Which ranks shard and which replicate, as a DeviceMesh says."""

from typing import Any

import torch

from overspill.errors import OptionError

_REPLICATE = frozenset({"replicate", "dp_replicate"})
_SHARD = frozenset({"shard", "dp_shard", "fsdp"})
_FOREIGN = ("pp", "pipe", "cp", "context", "ep", "expert", "sp", "sequence")


def data_parallel_ranks(mesh: Any, rank: int) -> list[list[int]]:
    """World ranks of the data-parallel places that `rank` works with: [replicate][shard]."""
    table = getattr(mesh, "mesh", None)
    if not isinstance(table, torch.Tensor):
        raise OptionError(
            f"expected a torch DeviceMesh as mesh, found {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh"
        )
    names = [str(name).lower() for name in (mesh.mesh_dim_names or [""] * table.dim())]
    here = (table == rank).nonzero().tolist()
    if len(here) != 1:
        raise OptionError(
            f"expected a mesh that holds rank {rank}, found ranks {table.flatten().tolist()}; give every rank the mesh "
            "that it is part of"
        )
    foreign = [name for name in names if name in _FOREIGN or name.startswith(("pipe", "context", "expert", "seq"))]
    data = [dim for dim, name in enumerate(names) if name != "tp" and not name.startswith("tensor")]
    if foreign or not 1 <= len(data) <= 2:
        raise OptionError(
            f"expected a mesh of one or two data-parallel dims, and perhaps one named 'tp', found dims {names}; pass "
            "the data-parallel submesh, such as mesh['dp']"
        )
    for dim in reversed(range(table.dim())):
        if dim not in data:
            table = table.select(dim, here[0][dim])
    if len(data) == 1:
        return [[int(found) for found in table.tolist()]]
    if _is_shard_first(*(names[dim] for dim in data)):
        table = table.t()
    return [[int(found) for found in row] for row in table.tolist()]


def _is_shard_first(first: str, second: str) -> bool:
    if (first in _REPLICATE and second in _REPLICATE) or (first in _SHARD and second in _SHARD):
        raise OptionError(
            f"expected one dim to replicate and one to shard, found {first!r} and {second!r}; name them 'replicate' "
            "and 'shard'"
        )
    return first in _SHARD or second in _REPLICATE
