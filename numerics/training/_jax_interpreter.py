"""Run a jax function with its products in given formats: its jaxpr is evaluated with some equations replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from ._jax_ops import convolve, product
from ._report import Report, Row, matcher, matches
from ._roles import Roles

PRODUCTS = {"dot_general": "linear", "conv_general_dilated": "convolution"}
OPAQUE = {"ragged_dot", "ragged_dot_general", "pallas_call", "custom_call", "ffi_call", "dot_product_attention"}
# calls whose body can take their place; their custom derivative, if they have one, gives way to that of the body
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}
_REMAT = {"remat", "remat2", "checkpoint"}
# what a weight may go through and still be the weight
_LAYOUT = {"transpose", "reshape", "convert_element_type", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice"}
_LAYOUT |= {"gather", "rev", "copy", "copy_p", "expand_dims", "optimization_barrier", "sharding_constraint"}


class Value(NamedTuple):
    """An array, and whether it is a weight."""

    array: Any
    weight: bool = False


class Where(NamedTuple):
    """The named scope of an equation, and the numbers of the step and of the loop iterations around it."""

    scope: str
    steps: tuple[Any, ...]

    def inside(self, equation: Any) -> Where:
        """Within the scopes of an equation."""
        own = str(equation.source_info.name_stack).replace("/", ".")
        return self._replace(scope=".".join(filter(None, (self.scope, own))))


class EmulatedFunction:
    """What `halfulp.numerics.emulate_jax` returns: call it as the function; `report` says what became of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        base: Mapping[str, Roles | None],
        overrides: Mapping[str, Mapping[str, Roles | None]],
        weights: Sequence[int],
        step: Any,
    ) -> None:
        self._function, self._base, self._weights = function, base, tuple(weights)
        self._overrides = [(pattern, matcher(pattern), given) for pattern, given in overrides.items()]
        self._step = step
        self._rows: dict[tuple[str, str, str, str], Row] = {}
        self._scopes: set[str] = set()
        self._count = 0
        self._traced: Any = None

    def report(self) -> Report:
        """What became of the products, in the order of the last trace: which were emulated, which stayed and why."""
        return Report(tuple(self._rows.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, its products emulated."""
        self._rows, self._scopes, self._count = {}, set(), 0
        places, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in places]
        arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, np.generic))]
        weights = [
            path[0].idx == 0 and path[1].idx in self._weights if path[0].idx == 0 else False
            for path, _ in (places[i] for i in arrays)
        ]

        def function(*given: Any) -> Any:
            filled = list(leaves)
            for i, value in zip(arrays, given):
                filled[i] = value
            args, kwargs = jax.tree_util.tree_unflatten(tree, filled)
            return self._function(*args, **kwargs)

        values = [leaves[i] for i in arrays]
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*values)
        self._traced = closed.jaxpr
        where = Where("", (jnp.asarray(self._step, jnp.int32),))
        outs = self.evaluate(closed, [Value(v, w) for v, w in zip(values, weights)], where)
        for pattern, _, _ in self._overrides:
            matches(pattern, self._scopes, "named scope with a product")
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), [out.array for out in outs])

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Value], where: Where) -> list[Value]:
        """The results of a jaxpr, equation by equation."""
        jaxpr = closed.jaxpr
        known: dict[Any, Value] = {var: Value(const) for var, const in zip(jaxpr.constvars, closed.consts)}
        known.update(zip(jaxpr.invars, args))

        def read(atom: Any) -> Value:
            return Value(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            values = [read(atom) for atom in equation.invars]
            with equation.ctx.manager:
                outs = self._equation(equation, values, where.inside(equation))
            known.update(zip(equation.outvars, outs))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        name = equation.primitive.name
        if name in PRODUCTS:
            return [Value(self._product(equation, values, where))]
        if name in OPAQUE:
            self._note(where, name, "product", reason="emulation does not see into it")
        elif has_products(equation):
            for names, rule in (((*_CALLS,), self._call), (_REMAT, self._remat), (("scan",), self._scan)):
                if name in names:
                    return rule(equation, values, where)
            if name in ("while", "cond"):
                return self._while(equation, values, where) if name == "while" else self._cond(equation, values, where)
            self._note(where, name, "product", reason="emulation does not see into it")
        return _plain(self._traced, equation, values)

    def _call(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        return self.evaluate(_closed(equation.params[_CALLS[equation.primitive.name]]), values, where)

    def _remat(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        closed = _closed(equation.params["jaxpr"])
        flags: list[bool] = []

        def body(*arrays: Any) -> list[Any]:
            outs = self.evaluate(closed, [Value(a, v.weight) for a, v in zip(arrays, values)], where)
            flags[:] = [out.weight for out in outs]
            return [out.array for out in outs]

        kept = {key: equation.params[key] for key in ("prevent_cse", "policy")}
        outs = jax.checkpoint(body, **kept)(*(v.array for v in values))
        return [Value(out, flag) for out, flag in zip(outs, flags)]

    def _scan(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        params = equation.params
        consts, carry = params["num_consts"], params["num_carry"]
        first, start, xs = values[:consts], values[consts : consts + carry], values[consts + carry :]

        def body(state: Any, slices: Any) -> Any:
            count, *carried = state
            given = [*first, *map(Value, carried), *(Value(a, v.weight) for a, v in zip(slices, xs))]
            inner = where._replace(steps=(*where.steps, count))
            outs = [out.array for out in self.evaluate(params["jaxpr"], given, inner)]
            return (count + 1, *outs[:carry]), outs[carry:]

        init = (jnp.int32(0), *(v.array for v in start))
        kept = {key: params[key] for key in ("length", "reverse", "unroll")}
        state, ys = jax.lax.scan(body, init, [v.array for v in xs], **kept)
        return [Value(a) for a in (*state[1:], *ys)]

    def _while(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        params = equation.params
        a, b = params["cond_nconsts"], params["body_nconsts"]

        def run(closed: Any, consts: list[Value], state: Any) -> list[Any]:
            inner = where._replace(steps=(*where.steps, state[0]))
            return [out.array for out in self.evaluate(closed, [*consts, *map(Value, state[1:])], inner)]

        def test(state: Any) -> Any:
            return run(params["cond_jaxpr"], values[:a], state)[0]

        def body(state: Any) -> Any:
            return (state[0] + 1, *run(params["body_jaxpr"], values[a : a + b], state))

        start = (jnp.int32(0), *(v.array for v in values[a + b :]))
        return [Value(out) for out in jax.lax.while_loop(test, body, start)[1:]]

    def _cond(self, equation: Any, values: list[Value], where: Where) -> list[Value]:
        index, *rest = values

        def branch(closed: Any) -> Callable[..., Any]:
            def run(*arrays: Any) -> list[Any]:
                given = [Value(a, v.weight) for a, v in zip(arrays, rest)]
                return [out.array for out in self.evaluate(closed, given, where)]

            return run

        branches = [branch(closed) for closed in equation.params["branches"]]
        return [Value(out) for out in jax.lax.switch(index.array, branches, *(v.array for v in rest))]

    def _note(self, where: Where, operation: str, kind: str, roles: Roles | None = None, reason: str = "") -> None:
        key = (where.scope, operation, kind, reason if roles is None else str(roles))
        calls = self._rows[key].calls if key in self._rows else 0
        self._rows[key] = Row(where.scope, operation, kind, calls + 1, roles, reason)
        self._scopes.add(where.scope)

    def _roles(self, kind: str, scope: str) -> Roles | None:
        for _, expression, given in self._overrides:
            if expression.fullmatch(scope):
                return given.get(kind)
        return self._base.get(kind)

    def _product(self, equation: Any, values: list[Value], where: Where) -> Any:
        name, params = equation.primitive.name, equation.params
        left, right = values
        kind = PRODUCTS[name]
        if name == "dot_general" and not (left.weight or right.weight):
            kind = "attention"
        roles = self._roles(kind, where.scope)
        reason = "" if roles is not None else "no roles given"
        if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
            reason = f"a product of {left.array.dtype}"
        elif name == "dot_general" and kind == "attention" and _summed(params, left.array) == 1:
            reason = reason or "an outer product, which sums over nothing"
        elif name != "dot_general" and params["batch_group_count"] != 1:
            reason = "a convolution with batch groups"
        elif name != "dot_general" and roles is not None and any(p.accumulator for p in roles.products()):
            raise ValueError("an accumulator is for matrix products: give convolutions Roles without one")
        if reason or roles is None:
            self._note(where, name, kind, reason=reason)
            return _plain(self._traced, equation, values)[0].array
        self._note(where, name, kind, roles)
        self._count += 1
        stream = f"{where.scope}/{self._count}"
        compute = dot if name == "dot_general" else convolution
        return compute(equation, left, right, roles, stream, where.steps)


def dot(equation: Any, left: Value, right: Value, roles: Roles, stream: str, steps: Any) -> Any:
    """A dot_general as one product in canonical form."""
    (sums, batches), dtype = equation.params["dimension_numbers"], equation.outvars[0].aval.dtype
    # a result wider than its operands, such as float32 of bfloat16: the operands are widened, which is exact
    a, m = _arrange(left.array.astype(dtype), sums[0], batches[0])
    b, n = _arrange(right.array.astype(dtype), sums[1], batches[1])
    names = tuple("weight" if v.weight else "activation" for v in (left, right))
    if names == ("weight", "activation"):
        y = product(b, a, roles.products("activation", "weight"), stream, steps).mT
    else:
        y = product(a, b, roles.products(*names), stream, steps)
    y = y.reshape(*(left.array.shape[i] for i in batches[0]), *m, *n)
    return _output(y, roles, stream, steps)


def _arrange(x: Any, sums: Sequence[int], batches: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """An operand as [batch, rows, sums] ([rows, sums] without batch), and the shape of its rows."""
    rows = [i for i in range(x.ndim) if i not in sums and i not in batches]
    batch, m, k = (tuple(x.shape[i] for i in axes) for axes in (batches, rows, sums))
    lead = (math.prod(batch),) if batch else ()
    return x.transpose(*batches, *rows, *sums).reshape(*lead, math.prod(m), math.prod(k)), m


def convolution(equation: Any, left: Value, right: Value, roles: Roles, stream: str, steps: Any) -> Any:
    """A conv_general_dilated with batch and channels first."""
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    x = left.array.astype(dtype).transpose(numbers.lhs_spec)
    weight = right.array.astype(dtype).transpose(numbers.rhs_spec)

    def convolve_plain(x: Any, weight: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x,
            weight,
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            feature_group_count=groups,
            precision="highest",
        )

    y = convolve(x, weight, roles.products("activation", "weight"), stream, steps, groups, convolve_plain)
    return _output(y.transpose(np.argsort(numbers.out_spec)), roles, stream, steps)


def _output(y: Any, roles: Roles, stream: str, steps: Any) -> Any:
    from ._jax_ops import fake_quantize

    return y if roles.output is None else fake_quantize(y, roles.output.stream(stream, *steps), "straight_through")


def _summed(params: Any, left: Any) -> int:
    return math.prod(left.shape[i] for i in params["dimension_numbers"][0][0])


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, ()) if isinstance(jaxpr, Jaxpr) else jaxpr


def _bodies(equation: Any) -> list[Jaxpr]:
    """The jaxprs inside of an equation."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (Jaxpr, ClosedJaxpr)):
                found.append(part if isinstance(part, Jaxpr) else part.jaxpr)
    return found


def has_products(equation: Any) -> bool:
    """Whether an equation is, or has inside, a product or what may hide one."""
    if equation.primitive.name in PRODUCTS or equation.primitive.name in OPAQUE:
        return True
    return any(has_products(inner) for body in _bodies(equation) for inner in body.eqns)


def _plain(around: Jaxpr, equation: Any, values: list[Value]) -> list[Value]:
    """The equation as it is; a weight stays one through what only moves it."""
    given = {atom: v.array for atom, v in zip(equation.invars, values) if not isinstance(atom, Literal)}
    parts = {"invars": list(given), "outvars": list(equation.outvars), "eqns": [equation]}
    alone = around.replace(constvars=[], **parts, effects=equation.effects)
    outs = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())
    name, everything = equation.primitive.name, bool(values) and all(v.weight for v in values)
    moved = values[0].weight if name in _LAYOUT else everything and (name == "concatenate" or _only_moves(equation))
    return [Value(out, moved) for out in outs]


def _only_moves(equation: Any) -> bool:
    """Whether an equation is a call of a body that only moves what it is given."""
    bodies = _bodies(equation) if equation.primitive.name in _CALLS else []
    return bool(bodies) and all(inner.primitive.name in _LAYOUT for body in bodies for inner in body.eqns)
