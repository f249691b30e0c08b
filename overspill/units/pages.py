"""Cuts the states of a unit into pages.

Note [Pages]: a page is the grain of state transfers and updates. Where our own kernel updates, elements are alike, so a
page takes as many as it has room for, of several small parameters or of a piece of a large one. The user's optimizer
works on whole parameters, so there a page is a run of whole parameters, and a large one makes a large page.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overspill.specs import CUT, PageSpec, ParamSpec, PartSpec, StateFormat, align

PART = 256
"""Parts begin at a multiple of this many elements, so that every array of a page is aligned."""

StateBytes = Callable[[int, Sequence[int]], int | None]
"""(parameter, shape) -> what the user's optimizer will keep for it, or for a piece of it; None where it does not have
it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part before it has its place in a page."""

    param: int
    begin: int
    end: int
    spec: ParamSpec
    format: StateFormat
    region_bytes: int = 0

    @property
    def room(self) -> int:
        return align(self.end - self.begin, PART)

    @property
    def grad_bytes(self) -> int:
        return align(self.spec.grad_item * (self.end - self.begin))


def cut(
    params: Sequence[ParamSpec], state_bytes: StateBytes, format: StateFormat, page_bytes: int
) -> Iterator[PageSpec]:
    """The pages of one unit, for what this rank updates of it."""
    ours = format.fields is not None
    pieces = [
        piece
        for i in in_order(params, format)
        if (p := params[i]).trainable and state_bytes(i, p.shape) is not None
        for piece in (_pieces(i, p, _format(p, format), page_bytes) if ours else _ranges(i, p, format, state_bytes))
    ]
    page: list[_Piece] = []
    for piece in pieces:
        if page and (piece.format != page[0].format or _size([*page, piece]) > page_bytes):
            yield _page(page)
            page = []
        page.append(piece)
    if page:
        yield _page(page)


def in_order(params: Sequence[ParamSpec], format: StateFormat) -> list[int]:
    """A unit's parameters in the order in which its pages have them, those of a format together. Every rank has this
    order, whatever it owns of them."""
    return sorted(range(len(params)), key=lambda i: _format(params[i], format).name)


def _format(p: ParamSpec, format: StateFormat) -> StateFormat:
    """Of a parameter's pages."""
    return format if format.fields is None else format.named(p.states)


def _ranges(index: int, p: ParamSpec, format: StateFormat, state_bytes: StateBytes) -> list[_Piece]:
    """Whole parameters as they are; what is owned in ranges is a parameter of one dimension each."""
    shapes = [p.shape if span == (0, p.numel) else (span[1] - span[0],) for span in p.owned.ranges]
    return [
        _Piece(index, begin, end, p, format, state_bytes(index, shape) or 0)
        for (begin, end), shape in zip(p.owned.ranges, shapes, strict=True)
    ]


def _pieces(index: int, p: ParamSpec, format: StateFormat, page_bytes: int) -> list[_Piece]:
    most = max(page_bytes // (format.bytes_for(CUT) + CUT * p.grad_item) * CUT, CUT)
    return [
        _Piece(index, begin, min(begin + most, last), p, format)
        for first, last in p.owned.ranges
        for begin in range(first, max(last, first + 1), most)
    ]


def _size(pieces: Sequence[_Piece]) -> int:
    elements = sum(piece.room for piece in pieces)
    regions = sum(piece.region_bytes for piece in pieces)
    return align(pieces[0].format.bytes_for(elements)) + regions + sum(piece.grad_bytes for piece in pieces)


def _page(pieces: Sequence[_Piece]) -> PageSpec:
    elements = sum(piece.room for piece in pieces)
    element, region, parts = 0, align(pieces[0].format.bytes_for(elements)), []
    for piece in pieces:
        parts.append(PartSpec(piece.param, piece.begin, piece.end, element, region, piece.region_bytes))
        element += piece.room
        region += piece.region_bytes
    grads = sum(piece.grad_bytes for piece in pieces)
    return PageSpec(tuple(parts), elements, region, grads, pieces[0].format)
