"""A format of five bits, from one line that defines it to perplexity under three ways to sum."""

# %% [markdown]
# # A format of five bits
#
# Run it as a script (`python docs/examples/five_bits.py`, about five minutes on two cores) or cell by cell in an
# editor that knows `# %%`. It needs the checkpoint that the README's set-up brings. What it printed stands in
# `five_bits.txt`.
#
# ## One line defines it
# A sign, three bits of exponent and one of mantissa; no infinities and no NaN, so that all 32 codes are numbers.

# %%
import time
from dataclasses import replace
from statistics import mean, stdev

import torch
from transformers import AutoTokenizer

import halfulp as hu
from halfulp.eval import perplexity, windows
from halfulp.numerics import HARDWARE, Chunked

e3m1 = hu.Float(exponent=3, mantissa=1, inf=False, nan=False)
codes = torch.arange(32, dtype=torch.uint8)
print(e3m1, e3m1.bits, "bits, up to", e3m1.max)
print("positive values:", hu.decode(codes[:16], e3m1).tolist())

# %% [markdown]
# ## Blocks of it
# 64 weights share a scale, which maps the largest of them to the format's largest number. The scale is itself
# a number of eight bits, so that a weight takes 5.125 bits.

# %%
blocks = hu.Block(e3m1, size=64, scale="e8m0", rule="rceil")
integers = hu.format("int5:g64:scale=e8m0:rule=rceil")
print(blocks, "takes", blocks.bits_per_element, "bits a weight;", integers, integers.bits_per_element)

# %% [markdown]
# ## On the weights of SmolLM2-135M
# How much of each matrix survives: the signal over the error, in decibels, of all 210 of them together.

# %%
checkpoint = hu.open_checkpoint("smollm2-135m")
model = hu.load(checkpoint).eval()
linears = {
    name: m.weight for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name
}


def decibels(fmt):
    """Signal over error of all matrices: 10 log10 of the sum of squares over the sum of squared errors."""
    signal = error = 0.0
    for weight in linears.values():
        w = weight.detach()
        signal += w.double().square().sum().item()
        error += (hu.cast(w, fmt) - w).double().square().sum().item()
    return 10 * torch.tensor(signal / error).log10().item()


for fmt in (blocks, integers, hu.format("mxfp4"), hu.format("mxfp6")):
    print(f"{fmt!s:28} {fmt.bits_per_element:6.3f} bits {decibels(fmt):6.2f} dB")

# %% [markdown]
# ## Perplexity, with the sums of two machines
# Weights in the new format, activations in e4m3fn with one scale a token. Every product of the linear layers is
# summed twice over: exactly, with one rounding at the end, and by the rule that the tensor cores of NVIDIA's
# Hopper have for fp8, which keep 13 bits of fraction below the largest product of each 32. No such machine takes
# our format, so we borrow its rule alone. The weights' scales are powers of two and are multiplied into the
# operands, exactly.

# %%
tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.path.parent), gguf_file=checkpoint.path.name)
text = hu.text("embedded").content[:9000]
cut = windows(tokenizer(text)["input_ids"], window=128)[:8]
print(len(cut), "windows of 128 tokens of", hu.text("embedded").source)


def score(name, exact=None, **roles):
    """Perplexity with the linear layers so, the output layer left in float32; against ``exact``, window by window."""
    start = time.perf_counter()
    with hu.emulate(model, linear=hu.Roles(**roles), overrides={"lm_head": None}):
        result = perplexity(model, cut)
    line = f"{name:40} {result.perplexity.value:8.3f}"
    if exact is not None:
        change = [(a - b) / n for a, b, n in zip(result.window_nll, exact.window_nll, result.window_tokens)]
        error = stdev(change) / len(change) ** 0.5
        line += f"   {100 * mean(change):+6.2f} % +- {100 * error:.2f} against exact sums"
    print(f"{line}   ({time.perf_counter() - start:.0f} s)")
    return result


print(f"{'float32':40} {perplexity(model, cut).perplexity.value:8.3f}")
hopper = HARDWARE["hopper-fp8"].rule
print("Hopper's rule:", hopper)
operands = {"weight": blocks, "activation": "e4m3fn:channel"}
exact = score("e3m1 weights, e4m3fn activations, exact", **operands, accumulator="exact")
score("... Hopper's sums", exact, **operands, accumulator=hopper)
score("... Hopper's, in float32 every 128", exact, **operands, accumulator=Chunked(hopper, 128))
score("... Hopper's with 6 bits instead of 13", exact, **operands, accumulator=replace(hopper, fraction=6))

# %% [markdown]
# Thirteen bits are enough for sums this short: the differences are no larger than their errors. They are not zero
# either, for one changed bit of an activation changes codes downstream. With six bits the loss is real.
