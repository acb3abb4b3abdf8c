"""How long a TPU program takes, by its schedule: its scalar instructions are executed, its vector ones are timed.

The model, in cycles of the core: a bundle takes one; a matrix multiplication waits for its unit, which is busy with the
rows of a register before it; copies between HBM and vector memory go one after the other at the bandwidth, each
done a fixed time after its last byte; a wait waits. Vector values are not computed, so a branch on one is refused.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ._bundles import Program, Slot
from ._targets import Target

_MASK = (1 << 32) - 1
_UNIT = re.compile(r"mxu(\d)")
_SPACE = 1 << 40  # between the addresses of two allocations
_CORE = "#allocation0"  # where a program for several cores finds which one it runs on


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 32) if x >> 31 else x


_ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "sadd": lambda a, b: a + b if max(a, b) >= _SPACE else (a + b) & _MASK,
    "ssub": lambda a, b: (a - b) & _MASK,
    "smul": lambda a, b: (a * b) & _MASK,
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "sshll": lambda a, b: (a << b) if a >= _SPACE else (a << b) & _MASK,
    "sshrl": lambda a, b: a >> b,
    "sshra": lambda a, b: a >> b if a >= _SPACE else (_signed(a) >> b) & _MASK,
    "smin.s32": lambda a, b: min(_signed(a), _signed(b)) & _MASK,
    "smax.s32": lambda a, b: max(_signed(a), _signed(b)) & _MASK,
    "smin.u32": min,
    "smax.u32": max,
    "por": lambda a, b: a | b,
    "pand": lambda a, b: a & b,
    "pxor": lambda a, b: a ^ b,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
    "pneg": lambda a: 1 - a,
}
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_SAME = ("smov", "pmov")


@dataclass(frozen=True)
class Schedule:
    """What running a program on one core takes, by the model of this module.

    cycles: from its first bundle to its last. bundles: how many were issued. matrix_stall, copy_stall: cycles in
    which nothing was, as a matrix unit or a copy was waited for. matmuls: by instruction, without the unit's number.
    busy: cycles of each matrix unit. read, written: bytes from and to HBM. visits: how often each bundle was issued.
    """

    cycles: int
    bundles: int
    matrix_stall: int
    copy_stall: int
    matmuls: Mapping[str, int]
    busy: tuple[int, ...]
    read: int
    written: int
    visits: tuple[int, ...]

    @property
    def useful(self) -> float:
        """The share of its cycles in which a matrix unit multiplies, over the units."""
        return sum(self.busy) / (len(self.busy) * self.cycles) if self.cycles else 0.0


@dataclass
class _Machine:
    """What changes while a program runs."""

    target: Target
    values: dict[str, int | None] = field(default_factory=dict)
    written_at: dict[str, int] = field(default_factory=dict)
    memory: dict[int, int | None] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    clock: int = 0
    free: list[int] = field(default_factory=list)
    queue: float = 0.0
    flags: dict[int, deque[float]] = field(default_factory=dict)
    matrix_stall: int = 0
    copy_stall: int = 0
    busy: list[int] = field(default_factory=list)
    matmuls: Counter[str] = field(default_factory=Counter)
    read: int = 0
    written: int = 0

    def symbol(self, name: str) -> int:
        return self.symbols.setdefault(name, (len(self.symbols) + 1) * _SPACE)

    def value(self, text: str) -> int | None:
        """Of an operand: a number, a register, an address [#allocation + offset]."""
        text = text.strip()
        if text.startswith("[") and text.endswith("]"):
            return self.address(text[1:-1])
        if text.startswith("$"):
            text = text[1:]
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", text):
            return int(text, 0) & _MASK
        if text.startswith("#"):
            return self.symbol(text)
        return self.values.get(text.lstrip("%"))

    def address(self, text: str) -> int | None:
        terms = [self.value(part) for part in text.replace("smem:", "").strip("[]").split(" + ")]
        return None if any(term is None for term in terms) else sum(term for term in terms if term is not None)


def execute(program: Program, target: Target, smem: Mapping[int, int] | None = None, limit: int = 10**8) -> Schedule:
    """Run a program; see `Schedule`.

    smem: what scalars hold that are given to the program, by their address. limit: bundles after which to give up.
    Raises ValueError for a branch on a value that is not known, and a program that does not end.
    """
    machine = _Machine(target, free=[0] * target.matrix_units, busy=[0] * target.matrix_units)
    machine.memory[machine.symbol(_CORE)] = 0
    machine.memory.update(smem or {})
    steps = [_compiled(bundle, target) for bundle in program.bundles]
    visits = [0] * len(steps)
    pending: list[int] = []
    at = issued = 0
    while at < len(steps):
        if issued >= limit:
            raise ValueError(f"the program has not ended after {limit} bundles")
        scalars, matmuls = steps[at]
        visits[at] += 1
        issued += 1
        for unit, cycles, name in matmuls:
            if machine.free[unit] > machine.clock:
                machine.matrix_stall += machine.free[unit] - machine.clock
                machine.clock = machine.free[unit]
            machine.free[unit] = machine.clock + cycles
            machine.busy[unit] += cycles
            machine.matmuls[name] += 1
        jump = _scalar(machine, scalars, issued, bool(pending)) if scalars else None
        machine.clock += 1
        at += 1
        if pending:
            pending[0] -= 1
        if jump is not None:
            pending = [target.delay, program.regions[jump]]
        if pending and pending[0] == 0:
            at, pending = pending[1], []
    end = max([machine.clock, *machine.free])
    return Schedule(
        int(end),
        issued,
        int(machine.matrix_stall),
        int(machine.copy_stall),
        dict(machine.matmuls),
        tuple(machine.busy),
        machine.read,
        machine.written,
        tuple(visits),
    )


def _compiled(bundle: Iterable[Slot], target: Target) -> tuple[list[Slot], list[tuple[int, int, str]]]:
    """A bundle's slots that are executed, choices of a loop's values first, and its matrix multiplications."""
    scalars, matmuls = [], []
    for slot in bundle:
        if slot.name.startswith("vmatmul"):
            unit = _UNIT.search(slot.name)
            name = _UNIT.sub("", slot.name).split(".mrb")[0].rstrip(".")
            matmuls.append((int(unit.group(1)) if unit else 0, target.occupancy(slot.name), name))
        elif (slot.name[0] in "sp" and not slot.name.startswith(("set", "shalt"))) or slot.name.startswith(
            ("dma", "int_to_ptr", "inlined_call_operand")
        ):
            scalars.append(slot)
    scalars.sort(key=lambda slot: slot.name != "sphi")
    return scalars, matmuls


def _scalar(machine: _Machine, slots: list[Slot], now: int, shadow: bool) -> str | None:
    """Execute the scalar instructions of a bundle; the region that it branches to, if it does."""
    jump = None
    for slot in slots:
        name = slot.name
        holds: bool | None = True
        if slot.predicate is not None:
            known = machine.values.get(slot.predicate)
            holds = None if known is None else bool(known) != slot.unless
        if name.startswith("sbr"):
            if shadow:  # of a branch that is taken: the compiler moves the next one up there
                continue
            if holds is None:
                raise ValueError(f"a branch on {slot.predicate}, which the program computes from its data")
            jump = slot.target if holds else jump
            continue
        if name.startswith("dma"):
            if holds is None:
                raise ValueError(f"a copy that depends on {slot.predicate}, which the program computes from its data")
            if holds:
                _copy(machine, slot)
            continue
        if not holds and slot.otherwise is None:
            if holds is None and slot.result:
                machine.values[slot.result] = None
            continue
        if name == "sst":
            place, _, stored = slot.operands[0].rpartition("]")
            address = machine.address(place)
            if address is not None:
                machine.memory[address] = machine.value(stored)
            continue
        if slot.result is None:
            continue
        if slot.otherwise is not None and not holds:
            found = None if holds is None else machine.values.get(slot.otherwise)
        else:
            found = _result(machine, slot)
        machine.values[slot.result] = found
        machine.written_at[slot.result] = now
    return jump


def _result(machine: _Machine, slot: Slot) -> int | None:
    name = slot.name
    kind = name.split(".")[0]
    if kind == "sphi":
        # whichever of the two was computed last
        return machine.values.get(max(slot.operands, key=lambda x: machine.written_at.get(x, -1)))
    if kind == "inlined_call_operand":
        return machine.symbol(str(slot.result))
    if kind == "sld":
        address = machine.address(slot.operands[0])
        return None if address is None else machine.memory.get(address)
    if kind == "int_to_ptr":
        return machine.value(slot.operands[0].rpartition(" ")[2])
    if kind == "scalar_select":
        assert slot.named is not None
        chosen = machine.values.get(slot.named["predicate"])
        return None if chosen is None else machine.value(slot.named["on_true" if chosen else "on_false"])
    given = [machine.value(x) for x in slot.operands]
    if kind in _SAME:
        return given[0]
    if any(x is None for x in given):
        return None
    if kind == "scalar_lea":
        return sum(x for x in given if x is not None)
    if kind == "scmp":
        _, how, sign, *_ = name.split(".")
        a, b = (_signed(x) if sign == "s32" and x < _SPACE else x for x in given if x is not None)
        return int(_COMPARE[how](a, b))
    compute = _ARITHMETIC.get(kind) or _ARITHMETIC.get(name)
    return None if compute is None else compute(*given)


def _copy(machine: _Machine, slot: Slot) -> None:
    if slot.name.startswith("dma.done"):
        flag = machine.value(slot.operands[0])
        done = machine.flags.get(flag if flag is not None else -1)
        if done:
            until = done.popleft()
            if until > machine.clock:
                machine.copy_stall += int(until) - machine.clock
                machine.clock = int(until)
        return
    assert slot.named is not None
    size = machine.value(slot.named["size_in_granules"])
    if size is None:
        raise ValueError(f"a copy of a size that the program computes: {slot.name}")
    size *= machine.target.granule
    if "hbm" in slot.name:
        start = max(machine.queue, float(machine.clock))
        machine.queue = start + size / machine.target.bytes_per_cycle
        done_at = machine.queue + machine.target.copy_latency
        if slot.name.startswith("dma.hbm_to"):
            machine.read += size
        if slot.name.endswith("_to_hbm"):
            machine.written += size
    else:
        done_at = float(machine.clock)
    flag = machine.value(slot.named.get("dst_syncflagno", "-1"))
    machine.flags.setdefault(-1 if flag is None else flag, deque()).append(done_at)
