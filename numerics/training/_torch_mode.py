"""Run a torch module with its products, norms and softmaxes in given formats, without touching the module.

A torch function mode sees every call of torch's functions; hooks on the modules say whose call it is. What a
call becomes is in `_torch_calls`.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._fake_quantize import fake_quantize
from ._report import Report, Row, matches
from ._roles import Products, Roles
from ._torch_calls import CALLS, COMPOSITE, UNSEEN

_NORM = re.compile(r".*Norm(\d[dD])?")


class _Mode(TorchFunctionMode):
    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        self.emulation = emulation

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, place = kwargs or {}, self.emulation.place
        if place is None:
            return func(*args, **kwargs)
        if func in COMPOSITE:  # torch turns the mode off while a function runs that it has caught
            with self:
                return _opened(func)(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if (handler := CALLS.get(func)) is not None:
            return handler(Call(self.emulation, place, name, func, args, kwargs), *args, **kwargs)
        if name in UNSEEN:
            self.emulation.note(place.module, name, "product", reason="emulation does not see into it")
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            reason = "a bare operator, which emulation does not see into"
            self.emulation.note(place.module, str(func), "product", reason=reason)
        return func(*args, **kwargs)


@cache
def _opened(func: Any) -> Any:
    """A function of torch written in Python that runs its own lines instead of asking for overrides again."""
    blind = {name: (lambda *_: False) for name in func.__globals__ if name.startswith("has_torch_function")}
    opened = types.FunctionType(
        func.__code__, func.__globals__ | blind, func.__name__, func.__defaults__, func.__closure__
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


class _Place:
    """A module that is running: its name, the how-manieth visit in this step, and its operations so far."""

    def __init__(self, module: str, visit: int) -> None:
        self.module, self.visit, self.operations = module, visit, 0

    def stream(self) -> str:
        self.operations += 1
        return f"{self.module}/{self.visit}/{self.operations}"


class Call:
    """One call of a function in a module: what its roles are, and the note of what became of it."""

    def __init__(self, emulation: Emulation, place: _Place, name: str, func: Any, args: Any, kwargs: Any) -> None:
        self.emulation, self.place, self.name = emulation, place, name
        self.func, self._args, self._kwargs = func, args, kwargs

    def roles(self, kind: str) -> Roles | None:
        """The roles of this kind of operation here."""
        return self.emulation.roles(kind, self.place.module)

    def plain(self) -> Any:
        """The call as torch has it."""
        return self.func(*self._args, **self._kwargs)

    def stays(self, kind: str, reason: str) -> Any:
        """The call as torch has it, with a note why."""
        self.emulation.note(self.place.module, self.name, kind, reason=reason)
        return self.plain()

    def becomes(self, kind: str, roles: Roles, name: str = "") -> Streams:
        """Note that the call is emulated, and hand out its casts."""
        self.emulation.note(self.place.module, name or self.name, kind, roles)
        return Streams(roles, self.place.stream(), self.emulation.running)


class Streams:
    """The casts of one call, with random bits of their own."""

    def __init__(self, roles: Roles, name: str, step: int) -> None:
        self._roles, self.name, self.step = roles, name, step

    def products(self, left: str, right: str, part: str = "") -> Products:
        """The casts of a product."""
        return self._roles.products(left, right).stream(self.name + part, self.step)

    def cast(self, x: Any, role: str, back: str | None = None, part: str = "") -> Any:
        """A tensor in the format of a role, its gradient in that of another; straight through."""
        casts = [getattr(self._roles, key) if key else None for key in (role, back)]
        casts = [c and c.stream(f"{self.name}{part}/{key}", self.step) for c, key in zip(casts, (role, back))]
        return fake_quantize(x, casts[0], backward=casts[1])


class Emulation:
    """What `halfulp.numerics.emulate` returns: a context, its report and the number of the next step."""

    def __init__(
        self,
        model: torch.nn.Module,
        base: Mapping[str, Roles | None],
        overrides: Mapping[str, Mapping[str, Roles | None]],
        step: int,
    ) -> None:
        self.model, self.step, self.running = model, step, step
        self._base = base
        names = [name for name, _ in model.named_modules()]
        self._overrides = [(matches(p, names, "module of the model"), given) for p, given in overrides.items()]
        self._rows: dict[tuple[str, str, str, str], Row] = {}
        self._places: list[_Place] = []
        self._visits: dict[tuple[str, bool], int] = {}
        self._hooks: list[Any] = []
        self._mode = _Mode(self)
        self._norms: list[Streams] = []
        self._stance: Any = None

    @property
    def place(self) -> _Place | None:
        """The innermost module that is running."""
        return self._places[-1] if self._places else None

    @property
    def in_norm(self) -> bool:
        """Whether a norm that is emulated as a whole is running."""
        return bool(self._norms)

    def roles(self, kind: str, module: str) -> Roles | None:
        """The first override that matches the module decides, else what was given for the kind."""
        for names, given in self._overrides:
            if module in names:
                return given.get(kind)
        return self._base.get(kind)

    def note(self, module: str, operation: str, kind: str, roles: Roles | None = None, reason: str = "") -> None:
        """Count a call in the report."""
        key = (module, operation, kind, reason if roles is None else str(roles))
        calls = self._rows[key].calls if key in self._rows else 0
        self._rows[key] = Row(module, operation, kind, calls + 1, roles, reason)

    def report(self) -> Report:
        """What has run so far: what was emulated, and what stayed and why."""
        return Report(tuple(self._rows.values()))

    def __enter__(self) -> Emulation:
        if self._hooks:
            raise RuntimeError("this emulation is already running; make another with emulate(...)")
        for name, module in self.model.named_modules():
            whole = _is_own_norm(module) and self.roles("norm", name) is not None
            enter, leave = self._hooks_of(name, module, whole)
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=False))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        # what has been compiled hides its calls, and compiling ours takes long and gains nothing
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stance.__exit__(kind, error, trace)
        if self._places:  # a hook of someone else failed before ours could close what ours had opened
            self._mode.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()
        self._norms.clear()
        if kind is None and not self.report().emulated:
            warnings.warn("nothing was emulated: no operation with given roles ran inside of emulate", stacklevel=2)

    def _hooks_of(self, name: str, module: Any, whole: bool) -> tuple[Any, Any]:
        root = module is self.model

        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # an activation checkpoint runs a module once more during the backward pass, with the same bits
            again = torch._C._current_graph_task_id() != -1
            if root and not again:
                self.running, self.step = self.step, self.step + 1
                self._visits.clear()
            visit = self._visits[name, again] = self._visits.get((name, again), 0) + 1
            if not self._places:  # the mode is on while a module of the model runs, and costs nothing elsewhere
                self._mode.__enter__()
            self._places.append(_Place(name, visit))
            if whole:
                return self._enter_norm(module, args, kwargs)
            return None

        def leave(module: Any, args: Any, output: Any) -> Any:
            if not (self._places and self._places[-1].module == name):
                return None  # the pre-hook of another failed before ours ran
            self._places.pop()
            if not self._places:
                self._mode.__exit__(None, None, None)
            streams = self._norms.pop() if whole else None
            return streams.cast(output, "output", "gradient") if streams and _is_float(output) else None

        return enter, leave

    def _enter_norm(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._places[-1]
        roles = self.roles("norm", place.module)
        assert roles is not None
        streams = Streams(roles, place.stream(), self.running)
        self._norms.append(streams)
        self.note(place.module, type(module).__name__, "norm", roles)
        first = next(iter(kwargs), None)
        if args and _is_float(args[0]):
            args = (streams.cast(args[0], "activation", "input_gradient"), *args[1:])
        elif first is not None and _is_float(kwargs[first]):
            kwargs = kwargs | {first: streams.cast(kwargs[first], "activation", "input_gradient")}
        return args, kwargs


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point


def _is_own_norm(module: Any) -> bool:
    """A norm that is no module of torch's: its lines are unknown, so it is cast as a whole."""
    kind = type(module)
    return bool(_NORM.fullmatch(kind.__name__)) and not kind.__module__.startswith("torch.")
