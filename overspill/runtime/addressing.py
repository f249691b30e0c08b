"""Where the arrays of an update are, for executors that need no more than that: making views takes time."""

from collections.abc import Callable, Sequence

from torch import Tensor

from overspill.kernels.elements import Addresses
from overspill.kernels.executors import Quick
from overspill.runtime.masters import Masters
from overspill.runtime.pages import Pages, offsets_of
from overspill.runtime.ring import Page
from overspill.runtime.updates import Share
from overspill.units.unit import Unit


class Addressing:
    def __init__(
        self,
        units: Sequence[Unit],
        pages: Pages,
        masters: Masters,
        number: Callable[[int, int], tuple[int, int]],
    ) -> None:
        """`number`: (unit, parameter) -> the number of its step, and the key for chance."""
        self._units = units
        self._pages = pages
        self._masters = masters
        self._number = number
        self._offsets: dict[tuple[int, int, int], list[int]] = {}
        """(unit, page, first element in the page) -> where a part's arrays begin in the page."""

    def launch(self, page: Page, memory: Tensor, shares: Sequence[Share], quick: Quick) -> list[Share]:
        """Update the shares that take no more than addresses, neighbours together. Returns the others."""
        left: list[Share] = []
        together: list[Share] = []
        at: Addresses | None = None
        last = 0
        for share in shares:
            step, key = self._number(page[0], share.due.param)
            own = self.of(page, memory, share, key)
            alike = bool(together) and together[0].hypers is share.hypers and last == step
            joined = at.joined(own) if alike and at is not None and own is not None else None
            if joined is None:
                left += _launched(at, together, last, quick)
                at, together, last = own, [share], step
            else:
                at, together = joined, [*together, share]
        return left + _launched(at, together, last, quick)

    def of(self, page: Page, memory: Tensor, share: Share, key: int) -> Addresses | None:
        """The addresses of a share in an update of a page that is in `memory`; None: it takes more than those. `key`:
        for chance."""
        part, place, factors = share.part, (page[0], share.due.param), share.factors()
        if factors is None or self._masters.edits.is_watched(place, part):
            return None
        unit, format, has_master = self._units[page[0]], self._pages.spec(*page).format, place in self._masters
        spec, base = unit.spec.params[part.param], memory.data_ptr()
        kept, *arrays = (base + offset for offset in self._of_part(page, share))
        return Addresses(
            unit.flat.data_ptr() + spec.offset + part.begin * spec.dtype.itemsize,
            kept if has_master else None,
            share.address(),
            tuple(factor.data_ptr() for factor in factors),
            tuple(arrays),
            part.numel,
            (spec.dtype, format.master if has_master else None, share.due.generation.dtype),
            format.name,
            part.begin,
            key,
            None if share.skip is None else share.skip.data_ptr(),
        )

    def _of_part(self, page: Page, share: Share) -> list[int]:
        key = (*page, share.part.element)
        if key not in self._offsets:
            self._offsets[key] = offsets_of(self._pages.spec(*page), share.part)
        return self._offsets[key]


def _launched(at: Addresses | None, together: list[Share], step: int, quick: Quick) -> list[Share]:
    """Update these neighbours by their addresses. Returns them where that cannot be done, else none."""
    done = at is not None and quick(at, together[0].hypers, step)
    return [] if done else together
