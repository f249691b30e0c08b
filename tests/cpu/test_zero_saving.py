"""Over ranks: what is put together again, for the user and for files, is what plain torch has."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overspill
from overspill import saving
from overspill.errors import StateError, TierError
from tests.ranks import run, run_raw
from tests.reference import differing, weights
from tests.zero import OPTIMIZERS, Case, batches, build, digest, flat_states, prepared, reference, train, trained

FIRST, SECOND = 3, 3


def back(cases: list[Case]) -> list[str]:
    """State dicts, and what `close` leaves, beside those of DistributedDataParallel; then plain torch goes on."""
    dist.init_process_group("gloo")
    wrong = []
    for case in cases:
        print(case, flush=True)
        expected = reference(replace(case, zero=0, place="device"))
        with tempfile.TemporaryDirectory() as nvme:
            model, optimizer = prepared(case, nvme)
            given = optimizer.given
            train(model, optimizer, case)
            states = optimizer.state_dict()
            plain = OPTIMIZERS[case.optimizer](trained(build(case)))
            if states["param_groups"] != plain.state_dict()["param_groups"]:
                wrong.append(f"{case}: groups {states['param_groups']}")
            if differing(flat_states(optimizer), expected[2]) or differing(weights(model), expected[1]):
                wrong.append(f"{case}: state dicts")
            # Into another one, which goes on as this one does.
            other, other_optimizer = prepared(replace(case, zero=3 - int(case.zero)), nvme)
            other.load_state_dict(model.state_dict())
            other_optimizer.load_state_dict(states)
            after = [digest(_more(*pair, case)) for pair in ((model, optimizer), (other, other_optimizer))]
            if after[0] != after[1]:
                wrong.append(f"{case}: training after load_state_dict")
            overspill.close(other)
            last, last_states = weights(model), flat_states(optimizer)
            kinds = {type(p) for p in overspill.close(model).parameters()}
            if kinds != {torch.nn.Parameter} or "no_sync" in vars(model) or differing(weights(model), last):
                wrong.append(f"{case}: closed")
            if differing(flat_states(given), last_states):
                wrong.append(f"{case}: states after close")
            train(model, given, replace(case, way="plain", steps=1))
    dist.destroy_process_group()
    return wrong


def _more(model: Any, optimizer: Any, case: Case) -> dict[str, torch.Tensor]:
    train(model, optimizer, replace(case, steps=2), batches())
    return weights(model)


def test_state_dicts_and_closed_models_are_those_of_plain_torch() -> None:
    cases = [Case(3, "mixed", steps=3), Case(1, "host", optimizer="adafactor", steps=3)]
    cases += [Case(2, "host", precision="bf16", steps=3)]
    assert run(back, 2, cases, timeout=250) == [[]] * 2


# ---- checkpoints


def first_half(case: Case, folder: str) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(case, nvme)
        train(model, optimizer, replace(case, steps=FIRST))
        overspill.save(folder, model, optimizer, extra={"step": FIRST})
        overspill.export(model, f"{folder}-exported")
        found = weights(model), flat_states(optimizer)
        overspill.close(model)
    dist.destroy_process_group()
    return found


def second_half(case: Case, folder: str) -> tuple[Any, ...]:
    """Ends in a digest of what training goes on to, on the same data whatever the number of ranks."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(case, nvme)
        extra = overspill.load(folder, model, optimizer)
        found = weights(model), flat_states(optimizer)
        train(model, optimizer, replace(case, steps=SECOND), batches(0))
        last = weights(overspill.close(model))
    dist.destroy_process_group()
    return (*found, extra, digest(last))


def check(writes: tuple[int, Case], reads: list[tuple[int, Case]], tmp_path: Path) -> None:
    saved = run(first_half, *writes, str(tmp_path / "saved"))[0]
    for size, case in reads:
        results = run(second_half, size, case, str(tmp_path / "saved"))
        for found in results:
            assert differing(found[0], saved[0]) == [] and differing(found[1], saved[1]) == [], (size, case)
            assert found[2] == {"step": FIRST}
        assert len({found[3] for found in results}) == 1


@pytest.mark.full
def test_what_two_ranks_save_one_loads(tmp_path: Path) -> None:
    check((2, Case(3, "mixed")), [(1, Case(0, "host"))], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_checkpoints_do_not_know_how_many_ranks_there_were(precision: str, tmp_path: Path) -> None:
    case = Case(3, "nvme", precision=precision)
    check((3, case), [(2, replace(case, zero=1)), (1, replace(case, zero=2)), (4, case)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "model"), [("adafactor", "small"), ("muon", "matrices"), ("sgd", "frozen")])
def test_checkpoints_of_other_optimizers(optimizer: str, model: str, tmp_path: Path) -> None:
    case = Case(3, "host", optimizer=optimizer, model=model)
    check((2, case), [(3, replace(case, zero=1))], tmp_path)


def torn_then_whole(case: Case, folder: str) -> list[Any]:
    """Every rank reads a checkpoint of which a byte has changed, and then the one that is as it was saved."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(case, nvme)
        train(model, optimizer, replace(case, steps=1))
        with pytest.raises(TierError, match="crc32"):
            overspill.load(f"{folder}/torn", model, optimizer)
        with pytest.raises(StateError, match="load a whole checkpoint"):
            train(model, optimizer, replace(case, steps=1))
        overspill.load(f"{folder}/saved", model, optimizer)
        found = weights(model), flat_states(optimizer)
        train(model, optimizer, replace(case, steps=SECOND))
        overspill.close(model)
    dist.destroy_process_group()
    return [*found]


def test_no_rank_goes_on_with_half_a_checkpoint(tmp_path: Path) -> None:
    case = Case(3, "mixed", precision="bf16", steps=3)
    saved = run(first_half, 2, case, str(tmp_path / "saved"))[0]
    shutil.copytree(tmp_path / "saved", tmp_path / "torn")
    data = bytearray((tmp_path / "torn" / "states.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "torn" / "states.safetensors").write_bytes(data)
    for found in run(torn_then_whole, 2, case, str(tmp_path)):
        assert differing(found[0], saved[0]) == [] and differing(found[1], saved[1]) == []


def interrupted_save(folder: str) -> None:
    """Ctrl-C while the first rank writes."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme, pytest.MonkeyPatch.context() as patch:
        model, optimizer = prepared(Case(2, "host"), nvme)
        train(model, optimizer, Case(2, "host", steps=1))
        patch.setattr(saving, "_save", interrupted)
        overspill.save(folder, model, optimizer)
        print("saved")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_rank_takes_an_interrupted_checkpoint_for_a_complete_one(tmp_path: Path) -> None:
    first, other = run_raw(interrupted_save, 2, str(tmp_path / "saved"))
    assert first.code != 0 and "KeyboardInterrupt" in first.stderr
    assert other.code != 0 and "saved" not in other.stdout and "rank 0" in other.stderr, other
