"""The optimizer that the user gets back: a torch optimizer over the user's own groups, whose steps run later."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overspill.config import parse_number
from overspill.errors import ModelError, OptionError, StateError
from overspill.runtime.early import early
from overspill.runtime.engine import Engine
from overspill.runtime.executor import STATES
from overspill.runtime.loads import loading
from overspill.trace import own_time
from overspill.units.layout import NARROW
from overspill.units.local import local_of, part_for, wrapped

NOT_LOADED = ("params", "param_names", "states")
"""Of a group in a state dict or a checkpoint: its parameters, and the format in which their states are kept."""


class StateView(Mapping[Tensor, dict[str, Any]]):
    """`optimizer.state`: copies of what the optimizer keeps for each parameter, made when looked at."""

    def __init__(self, engine: Engine, params: Callable[[], list[nn.Parameter]]) -> None:
        self._engine = engine
        self._params = params

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        return read_state(self._engine, p)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([p for p in self._params() if read_state(self._engine, p)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> Any:
        found = ((p, read_state(self._engine, p)) for p in self._params())
        return [(p, state) for p, state in found if state]


def read_state(engine: Engine, p: Tensor) -> dict[str, Any]:
    """Copies of one parameter's optimizer state, as of the last step."""
    engine.settle()
    state, shape = engine.parts.made.update.read(*engine.residency.place_of(p)), local_of(p).shape
    return {k: wrapped(p, v) if isinstance(v, Tensor) and v.shape == shape else v for k, v in state.items()}


class SpilledOptimizer(torch.optim.Optimizer):
    """Steps by overspill. Shares `param_groups` with the optimizer given to `prepare`, so schedulers just work."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, report: Callable[[], dict[str, Any]]) -> None:
        # Not torch's constructor: the groups exist already and must stay the same objects.
        kept = ("defaults", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        hooks = [name for name in vars(optimizer) if name.startswith("_optimizer_")]
        for name in dict.fromkeys((*kept, *hooks)):
            self.__dict__[name] = vars(optimizer)[name]
        self.engine = engine
        self.given = optimizer
        self._report = report
        self._patch_step_function()
        _take_states(optimizer, engine)
        engine.early = early(engine, self.param_groups)
        engine.residency.check_use, engine.residency.strict = engine.early.check, engine.early.strict
        # A scheduler made before prepare has put a step of its own here; it comes back with `revive`.
        self._given_step = vars(optimizer).get("step")
        optimizer.step = _refuse_step  # type: ignore[assignment,method-assign]
        optimizer.state_dict = _refuse_state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = _refuse_state_dict  # type: ignore[assignment,method-assign]

    @property
    def state(self) -> StateView:  # type: ignore[override]
        return StateView(self.engine, self._params)

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take the gradients; each unit is updated before its next use, exactly as this step would have."""
        if closure is not None:
            raise OptionError(
                "expected step() without a closure, found one; evaluate the loss in the loop: updates that are due "
                "later cannot call back"
            )
        with own_time:
            self.engine.step(self.param_groups)
        # A scheduler made before prepare watches the user's own optimizer for the order of its calls.
        self.given._opt_called = True  # type: ignore[attr-defined]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ over all parameters of the model, in the model's order."""
        self.engine.check_open()
        max_norm, norm_type = parse_number("max_norm", max_norm), parse_number("norm_type", norm_type)
        params = self.engine.in_order
        if all(p.grad is None for p in params):
            raise StateError("expected gradients to clip, found none on any parameter; call loss.backward() first")
        if foreach is None and self.engine.executor.lanes.device.type == "cuda":
            # torch would do so for plain gradients: the same bits in fewer kernels.
            foreach = True
        # Not by the door of each parameter: only gradients are used.
        with own_time, torch._C.DisableTorchFunctionSubclass():
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With update="eager" a step cannot be skipped: it has begun."""
        self.engine.zeroed()
        if not set_to_none or self.engine.closed:
            super().zero_grad(set_to_none)
            return
        # As torch's, but not by the door of each parameter.
        with own_time, torch._C.DisableTorchFunctionSubclass():
            for p in self._params():
                if p.grad is not None:
                    p.grad = None
                    self.engine.residency.given(p, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ModelError(
            "expected the parameter groups of prepare, found a new one; call overspill.close(model), add the group to "
            "your optimizer, and call overspill.prepare again"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with tensors in host memory."""
        self.engine.settle()
        size = self.engine.executor.program.model.sharding.size
        states = size * sum(u.spec.state_bytes for u in self.engine.units)
        self.engine.parts.check_copies(states, "optimizer.state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the groups stay the same objects and every state goes to its home."""
        with loading(self.engine.executor, STATES) as begun:
            self._load(state_dict, begun)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: dict[str, Any], begun: Callable[[str], None]) -> None:
        self.engine.settle()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = copy.deepcopy(state_dict["param_groups"])
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ModelError(
                f"expected groups of {[len(g['params']) for g in self.param_groups]} parameters, found "
                f"{[len(g['params']) for g in saved]} in the loaded state dict; build the optimizer as it was saved"
            )
        names = [i for g in saved for i in g["params"]]
        states = dict(zip(self._params(), (state_dict["state"].get(i, {}) for i in names), strict=True))
        check_states(self.engine, states)
        begun(
            "that the optimizer's load_state_dict broke off before its end: what it has is part of what it had before, "
            "and part of what was to be loaded"
        )
        write_states(self.engine, states)
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in values.items() if k not in NOT_LOADED})

    def report(self) -> dict[str, Any]:
        """Bytes per role and tier, traffic and times of the last step: docs/report.md says what its keys mean."""
        self.engine.check_open()
        return self._report()

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "expected optimizer.state_dict() to be saved, found the prepared optimizer itself being copied or pickled; "
            "it is bound to its model: save its state dict"
        )

    def revive(self) -> None:
        """Give the user's own optimizer its states back; called when the model is closed."""
        states = {p: read_state(self.engine, p) for p in self._params()}
        for name in ("step", "state_dict", "load_state_dict"):
            self.given.__dict__.pop(name, None)
        if self._given_step is not None:
            self.given.step = self._given_step  # type: ignore[method-assign]
        for p, state in states.items():
            unit, index = self.engine.residency.place_of(p)
            if state:
                came_as = self.engine.units[unit].came_as[index]
                self.given.state[p] = {key: _as_came(key, value, *came_as) for key, value in state.items()}


def _as_came(key: str, value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """torch's rule again, for a parameter as it is when it is plain."""
    if not isinstance(value, Tensor) or key == "step":
        return value
    return value.to(device, dtype if value.is_floating_point() and dtype.is_floating_point else value.dtype)


def _refuse_step(*args: Any, **kwargs: Any) -> None:
    raise StateError(
        "expected step() on the optimizer that overspill.prepare returned, found it on the one that was given to "
        "prepare; use `model, optimizer = overspill.prepare(model, optimizer, ...)`"
    )


def _refuse_state_dict(*args: Any) -> Any:
    raise StateError(
        "expected state dicts to be made by and loaded into the optimizer that overspill.prepare returned, found the "
        "one that was given to prepare, which has no states any more; use the returned one"
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
"""A scheduler made before prepare looks for this mark of its own, and would warn."""


def _take_states(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """States that the user's optimizer has already (from a resumed run) go to their homes."""
    if optimizer.state:
        write_states(engine, {p: dict(state) for p, state in optimizer.state.items()})
        optimizer.state.clear()


def write_states(engine: Engine, states: Mapping[Any, Mapping[str, Any]]) -> None:
    """Replace the states of these parameters; the others of the same optimizer have none afterwards. One unit after the
    other, so that no more than one is there twice."""
    units: dict[int, dict[int, tuple[nn.Parameter, Mapping[str, Any]]]] = {}
    for p, state in states.items():
        unit, index = engine.residency.place_of(p)
        units.setdefault(unit, {})[index] = (p, state)
    for unit, given in units.items():
        fitted = {i: {k: _fitted(k, v, p) for k, v in state.items()} for i, (p, state) in given.items()}
        engine.parts.made.update.write(unit, fitted)


def check_states(engine: Engine, states: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse states that cannot be written, before any is."""
    for p, state in states.items():
        outline = {k: _fitted(k, v, p, "meta") for k, v in state.items()}
        engine.parts.made.update.check(*engine.residency.place_of(p), outline)


def _fitted(key: str, value: Any, p: nn.Parameter, device: str | None = None) -> Any:
    """torch's rule for loaded states: of the dtype of the parameter, or of its master; a step count stays as it is."""
    if not isinstance(value, Tensor) or key == "step" or value.is_meta:
        return value.clone() if isinstance(value, Tensor) else value
    own = torch.float32 if p.dtype in NARROW else p.dtype
    dtype = own if value.is_floating_point() and p.is_floating_point() else value.dtype
    return part_for(p, value.detach()).to(device=device, dtype=dtype, copy=True)
