"""What torch's allocator is held to on a GPU, without one: the share of the device that it is told."""

from types import SimpleNamespace

import pytest
import torch

from overspill.tiers import HeldBudget, no_budgets

GPU = torch.device("cuda", 0)
TOTAL = 1 << 30


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that it was told, in the order in which it was."""
    found: list[int] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda share, _: found.append(round(share * TOTAL)))
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda _: 0.75, raising=False)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=TOTAL))
    monkeypatch.setattr(cuda.memory, "_set_allocator_settings", lambda _: None)
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda _: None)
    return found


def test_budgets_of_several_models_add_up(told: list[int]) -> None:
    one = HeldBudget(GPU, 1000, 70)
    # The first one's model and what it had beside it are not counted once more.
    two = HeldBudget(GPU, 200, 1000 + 70 + 3)
    assert told == [1070, 1273] and (one.others, two.others) == (70, 3)
    one.close()
    two.close()
    assert told[2:] == [203, TOTAL * 3 // 4], "then what the user allowed himself"


def test_a_model_that_moves_in_is_held_by_no_budget_of_another(told: list[int]) -> None:
    with no_budgets(GPU):
        one = HeldBudget(GPU, 1000, 0)
    assert told == [1000]
    with no_budgets(GPU):
        assert told[-1] == TOTAL * 3 // 4
        two = HeldBudget(GPU, 200, 1000)
    assert told[-1] == 1200
    with pytest.raises(KeyError), no_budgets(GPU):
        raise KeyError
    assert told[-2:] == [TOTAL * 3 // 4, 1200], "a model that did not move in leaves all as it was"
    one.close()
    two.close()
    told.clear()
    with no_budgets(GPU):
        pass
    assert told == []


def test_a_budget_that_ends_while_a_model_moves_puts_no_other_back(told: list[int]) -> None:
    """A forgotten model's ends whenever the garbage collector runs."""
    first, *forgotten, last = (HeldBudget(GPU, 1000, 0) for _ in range(4))
    told.clear()
    with no_budgets(GPU):
        with no_budgets(GPU):
            forgotten.pop().close()
        HeldBudget(GPU, 500, 0).close()
        assert {*told} == {TOTAL * 3 // 4}
    assert told[-1] == 3000
    last.lift()
    told.clear()
    forgotten.clear()
    assert told == [TOTAL * 3 // 4], "nor while a model is given back"
    last.close()
    assert told[-1] == 1000
    with no_budgets(GPU):
        first.close()
    assert told[-1] == TOTAL * 3 // 4
