"""Cuts the states of a unit into pages.

Note [Pages]: a page is the grain of state transfers and updates. Where our own kernel updates, elements are alike, so a
page takes as many as it has room for, of several small parameters or of a piece of a large one. The user's optimizer
works on whole parameters, so there a page is a run of whole parameters, and a large one makes a large page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overspill.specs import PageSpec, ParamSpec, PartSpec, StateFormat, align

PART = 256
"""Parts begin at a multiple of this many elements, so that every array of a page is aligned."""
CUT = 4096
"""A parameter is cut at multiples of this many elements, so that its gradient can be read from disk in pieces."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part before it has its place in a page."""

    param: int
    begin: int
    end: int
    spec: ParamSpec

    @property
    def room(self) -> int:
        return align(self.end - self.begin, PART)

    @property
    def grad_bytes(self) -> int:
        whole = self.spec.numel
        return align(self.spec.grad_bytes * (self.end - self.begin) // whole) if whole else 0


def cut(params: Sequence[ParamSpec], kept: Sequence[bool], format: StateFormat, page_bytes: int) -> Iterator[PageSpec]:
    """The pages of one unit. `kept`: which of its parameters the optimizer has."""
    ours = format.fields is not None
    pieces = [
        piece
        for i, (p, has) in enumerate(zip(params, kept, strict=True))
        if p.trainable and has
        for piece in (_pieces(i, p, format, page_bytes) if ours else [_Piece(i, 0, p.numel, p)])
    ]
    page: list[_Piece] = []
    for piece in pieces:
        if page and _size([*page, piece], format, ours) > page_bytes:
            yield _page(page, format, ours)
            page = []
        page.append(piece)
    if page:
        yield _page(page, format, ours)


def _pieces(index: int, p: ParamSpec, format: StateFormat, page_bytes: int) -> list[_Piece]:
    grad = p.grad_bytes // max(p.numel, 1)
    most = max(page_bytes // (format.element_bytes + grad) // CUT * CUT, CUT) if p.numel else CUT
    return [_Piece(index, begin, min(begin + most, p.numel), p) for begin in range(0, max(p.numel, 1), most)]


def _size(pieces: Sequence[_Piece], format: StateFormat, ours: bool) -> int:
    elements = sum(piece.room for piece in pieces)
    regions = 0 if ours else sum(piece.spec.state_bytes for piece in pieces)
    return align(elements * format.element_bytes) + regions + sum(piece.grad_bytes for piece in pieces)


def _page(pieces: Sequence[_Piece], format: StateFormat, ours: bool) -> PageSpec:
    elements = sum(piece.room for piece in pieces)
    element, region, parts = 0, align(elements * format.element_bytes), []
    for piece in pieces:
        parts.append(PartSpec(piece.param, piece.begin, piece.end, element, region))
        element += piece.room
        region += 0 if ours else piece.spec.state_bytes
    grads = sum(piece.grad_bytes for piece in pieces)
    return PageSpec(tuple(parts), elements, region, grads)
