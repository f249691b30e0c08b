"""Comm: what ranks say to each other, as bytes of whole tensors and as a few numbers.

Data goes over groups of our own, so that a lane's thread never meets the user's collectives; control goes over a gloo
group of its own. Nothing here knows of parameters, units or plans. A rank that dies is named, see Note [signs of life].
May be imported here: layer 0, this folder, torch.

comm.py       what a rank can do together with the others; connect.py: finds them
groups.py     one process group that moves whole tensors; mesh.py: which ranks shard and which replicate
watch.py      waits for collectives, and finds out who is to blame; witness.py: what is known of the others
pulse.py      shows that this rank lives

- place: a data-parallel rank's index, 0 to ranks - 1; world rank: torch's global rank, the one in messages.
- shard group: the ranks that share one copy of everything; replicate group: those that hold the same piece of it.
- piece: what one rank of the shard group owns of a tensor, `whole[bounds[rank]:bounds[rank + 1]]`.
- beat: what a rank writes into torch's store every second; verdict: who is to blame, agreed upon once.
"""

from overspill.comm.comm import Comm
from overspill.comm.connect import connect, join

__all__ = ["Comm", "connect", "join"]
