"""Streams of a GPU, by their addresses: numbers are compared, kept and asked for faster than torch's objects."""

import torch


def current(device: torch.device) -> int:
    """The one that work is put on now; 0 is also the default one, and all there is without a GPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def follow(device: torch.device, stream: int, other: int) -> None:
    """What a stream is given next comes behind what another one was given."""
    if stream != other:
        # Not ExternalStream, which takes the default stream's address for none, and makes a new one.
        one, two = (torch.cuda.get_stream_from_external(each, device) for each in (stream, other))
        one.wait_stream(two)
