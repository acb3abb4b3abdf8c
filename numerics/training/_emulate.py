"""Run a torch module or a jax function with its layers in given formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._roles import Roles, roles_of

if TYPE_CHECKING:
    from ._jax_interpreter import EmulatedFunction
    from ._torch_mode import Emulation

ELEMENTWISE = ("norm", "softmax")
KINDS = ("linear", "convolution", "attention", *ELEMENTWISE)


def emulate(
    model: Any,
    *,
    linear: Any = None,
    convolution: Any = None,
    attention: Any = None,
    norm: Any = None,
    softmax: Any = None,
    overrides: Mapping[str, Any] | None = None,
    step: int = 0,
) -> Emulation:
    """A context in which a torch module computes in given formats, forward and backward; the module stays as it is.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> with emulate(model, linear=Roles("mxfp8", "mxfp8", "mxfp8-e5m2"), overrides={"2": None}) as emulation:
    ...     model(torch.ones(5, 64)).sum().backward()
    >>> print(emulation.report())
    module  operation  calls  becomes
    0       linear     1      weight mxfp8, activation mxfp8, gradient mxfp8-e5m2
    2       linear     1      stays: no roles given

    model: any torch.nn.Module, transformers' included; its functions are caught while its modules run, by
    hooks and a torch function mode. linear, convolution, attention, norm, softmax: `Roles`, or a format or
    `Cast` for weight, activation and gradient alike (of norm and softmax, for what comes out as well); None
    leaves the kind as it is.

    - linear: torch.nn.functional.linear and any matmul, mm, bmm, addmm, baddbmm, einsum or tensordot one
      operand of which is a parameter; attention: those products of two activations, and
      scaled_dot_product_attention as softmax(q k' scale + mask) v. Blocks run along the axis that each of the
      three products sums over, see `Roles`. Products with a sum over one element alone stay.
    - convolution: blocks along input channels forward, output channels for the gradient of the input, within
      a group of channels; along the batch for the gradient of the weight.
    - norm and softmax: input (activation), weight and result (output) are cast, and so are the gradients that
      come in (gradient) and go out (input_gradient, weight_gradient); what is between runs in torch's own
      precision. Modules that are called ...Norm and are not torch's are cast at their ends, without weight.

    overrides: patterns for names of modules, the first match wins: None (all of the module stays), roles for
    all of its operations, or a dict from the kinds to roles. A pattern matches a whole name or a part from a
    dot on; ``*`` stands for any text, and "re:..." is a regular expression.

    Sums run in the tensors' own dtype, as torch does them, unless roles have an accumulator. Stochastic
    roundings draw from a stream for each step, module, call and tensor: a step is one call of ``model``;
    ``emulation.step`` is the next one's number, and ``step=`` sets it, to go on from a checkpoint. The report
    says what ran in which formats, and which products stayed and why. What torch.compile compiled runs eagerly
    inside; scripted modules hide their calls. A context in which nothing was emulated warns.

    Raises ValueError for a pattern that matches no module (with near names), an unknown kind, or no roles at all.
    """
    given = dict(zip(KINDS, (linear, convolution, attention, norm, softmax)))
    base = {kind: roles_of(value, f"{kind}=...", kind in ELEMENTWISE) for kind, value in given.items()}
    chosen = {pattern: _override(pattern, value) for pattern, value in (overrides or {}).items()}
    if not any([*base.values(), *(any(value.values()) for value in chosen.values())]):
        raise ValueError(f"nothing to emulate: give roles for at least one of {', '.join(KINDS)}")
    from ._torch_mode import Emulation

    return Emulation(model, base, chosen, step)


def _override(pattern: str, value: Any) -> dict[str, Roles | None]:
    given = value if isinstance(value, Mapping) else dict.fromkeys(KINDS, value)
    if unknown := [key for key in given if key not in KINDS]:
        raise ValueError(f"override {pattern!r}: unknown kind {unknown[0]!r}; choose from {', '.join(KINDS)}")
    return {kind: roles_of(given.get(kind), f"override {pattern!r}", kind in ELEMENTWISE) for kind in KINDS}


def emulate_jax(
    function: Callable[..., Any],
    *,
    linear: Any = None,
    convolution: Any = None,
    attention: Any = None,
    overrides: Mapping[str, Any] | None = None,
    weights: int | tuple[int, ...] = 0,
    step: Any = 0,
) -> EmulatedFunction:
    """A jax function with its matrix products and convolutions in given formats, forward and backward.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jax.nn.relu(x @ w))
    >>> emulated = emulate_jax(loss, linear=Roles("mxfp8", "mxfp8", "mxfp8-e5m2"))
    >>> jax.jit(jax.grad(emulated))(jnp.ones((64, 32)), jnp.ones((5, 64))).shape
    (64, 32)
    >>> print(emulated.report())
    module       operation    calls  becomes
    (the model)  dot_general  1      weight mxfp8, activation mxfp8, gradient mxfp8-e5m2

    linear, convolution, attention: as in `emulate`. weights: numbers of the arguments that hold the weights
    (any pytrees). A product with an operand that comes from them by moving alone (transposing, reshaping,
    slicing, ...) is linear, one of two others attention. overrides: patterns, as in `emulate`, for names from
    `jax.named_scope` ("block.attention"), with None, roles or a dict from the kinds to roles.

    The function is traced and evaluated with its dot_general and conv_general_dilated replaced, also those in
    jit, scan, while, cond and checkpoint; jax.jit, grad and vmap of the result work. A custom_jvp or custom_vjp
    with a product inside gives way to its body. step: a whole number, traced or not, from which stochastic
    roundings draw; iterations of loops draw from streams of their own. Inside a training step, write
    ``emulate_jax(loss, linear=roles, step=step)(weights, batch)``.

    Array arguments are traced, all others are taken as they are. Float32 products run in full float32 precision,
    on TPUs too. Raises ValueError as `emulate` does.
    """
    base = {
        "linear": roles_of(linear, "linear=..."),
        "convolution": roles_of(convolution, "convolution=..."),
        "attention": roles_of(attention, "attention=..."),
    }
    chosen = {pattern: _override(pattern, value) for pattern, value in (overrides or {}).items()}
    if not any([*base.values(), *(any(value.values()) for value in chosen.values())]):
        raise ValueError(f"nothing to emulate: give roles for at least one of {', '.join(base)}")
    from ._jax_interpreter import EmulatedFunction

    return EmulatedFunction(function, base, chosen, (weights,) if isinstance(weights, int) else weights, step)
