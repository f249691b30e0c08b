"""Checkpoints: files of tensors, streamed piece by piece, and folders that are there whole or not at all.

Everything on disk is safetensors and JSON; nothing is pickled, and nothing is mapped into memory (mapped files count
as resident memory, and are slow on network disks). May be imported here: layer 0, `units`, `tiers`, torch, numpy.

folder.py      a checkpoint: tensor files and a manifest; staging.py: how they come to be there whole
tensorfile.py  reads safetensors; writer.py: writes them; packing.py: other values, as JSON and tensors
export.py      plain safetensors in the layout of Hugging Face; naming.py: which of them make which parameter

- entry: where the bytes of one tensor lie in which file.
- stored: a tensor that is to be written, as a function that gives its pieces in row-major order.
- piece: a run of elements of one tensor; never more than one of a tensor is in memory.
- staging folder: where a folder is written under a name nobody reads, until it is complete and gets its real one.
- manifest: the JSON file of a checkpoint, which lists what must be there and its checksums.
"""
