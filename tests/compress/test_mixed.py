"""Mixed precision: choices are the best there are, and what is written is what was chosen."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from halfulp.compress import calibration, chain, compress, load, open_checkpoint, plan_of, prune, quantize
from halfulp.compress.mixed import Group, Option, Sensitivity, allocate, frontier, mixed
from halfulp.compress.mixed._knapsack import choose, efficient, total
from halfulp.compress.mixed._mixed import Mixed

from . import common

FORMATS = ("int3:g32", "int4:g32", "int8:channel")
ALL_THREE = {"layers.0.*.o_proj": "int8:channel", "layers.1.*.o_proj": "int3:g32"}


def brute(loss, cost, budget):
    """The least loss of all choices within the budget."""
    picks = itertools.product(*(range(len(row)) for row in loss))
    return min(sum(r[j] for r, j in zip(loss, pick)) for pick in picks if total(cost, pick) <= budget)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better(seed, whole):
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 6), rng.randint(1, 4)
    magnitude = 10 ** rng.randint(1, 9)
    loss = [
        [rng.choice((0.0, rng.random() * 10 ** rng.randint(-6, 0), 1.0)) for _ in range(columns)] for _ in range(rows)
    ]
    if columns > 1:
        loss[0][1] = float("inf")
    cost = [[rng.randint(1, magnitude) if whole else rng.random() for _ in range(columns)] for _ in range(rows)]
    kept = [efficient(*row) for row in zip(loss, cost)]
    low, high = total(cost, [k[-1] for k in kept]), total(cost, [k[0] for k in kept])
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = max(low, low + (int((high - low) * share) if whole else (high - low) * share))
        chosen = choose(loss, cost, budget)
        assert total(cost, chosen) <= budget
        assert sum(r[j] for r, j in zip(loss, chosen)) == pytest.approx(brute(loss, cost, budget), rel=1e-12, abs=1e-15)
        assert chosen == choose(loss, cost, budget)


def test_a_budget_is_kept_to_the_last_byte():
    """Costs so large that a byte is less than the tolerance of the solver."""
    loss = [[1.0, 0.0]] * 8
    cost = [[10**9 + i, 2 * 10**9 + 3 * i + 1] for i in range(8)]
    best = [10**9 + 2 * i + 1 for i in range(8)]
    budget = sum(10**9 + i for i in range(8)) + sum(best[:3]) - 1
    chosen = choose(loss, cost, budget)
    assert total(cost, chosen) <= budget
    assert sum(chosen) == 2
    assert sum(choose(loss, cost, budget + 1)) == 3


def test_costs_that_are_no_whole_numbers_at_the_edge():
    chosen = choose([[1.0, 0.0]] * 3, [[0.1, 0.2]] * 3, 0.1 + 0.2 + 0.2)
    assert sum(chosen) == 2


def test_no_budget_and_no_column():
    with pytest.raises(ValueError, match="a budget of 1 is below the least possible, 2"):
        choose([[0.0], [0.0]], [[1], [1]], 1)
    with pytest.raises(ValueError, match="no column"):
        choose([[float("inf")]], [[1]], 1)


def group(name, kls, fused="", weights=64 * 1000, role="", tensors=1):
    bits = (3.5, 4.5, 8.25)
    options = tuple(Option(f, int(weights * b / 8), (kl, kl)) for f, b, kl in zip(FORMATS, bits, kls))
    return Group(name, role or name, 0, (name.replace(".", r"\."),), tensors, weights, fused, options)


def made(*groups):
    return Sensitivity("m", "t", (1, 1), "ragged", FORMATS, groups)


FOUND = made(
    group("a.q", (0.5, 0.2, 0.01), "a.qk"),
    group("a.k", (0.1, 0.01, 0.0), "a.qk"),
    group("a.o", (0.4, 0.1, 0.0)),
    group("b.o", (0.03, 0.02, 0.01), weights=64 * 4000),
)


def best_of(found, limit):
    """By hand: fused groups move together."""
    best = None
    for qk, o, b in itertools.product(FORMATS, repeat=3):
        pick = {"a.q": qk, "a.k": qk, "a.o": o, "b.o": b}
        size = sum(g.option(pick[g.name]).bytes for g in found.groups)
        loss = sum(found.kl(g, pick[g.name]) for g in found.groups)
        if size <= limit and (best is None or (loss, size) < best):
            best = (loss, size)
    return best


@pytest.mark.parametrize("bits", [3.5, 3.8, 4.2, 4.5, 5, 6.3, 8.25, 20])
def test_an_allocation_is_the_best(bits):
    got = allocate(FOUND, budget_bits=bits)
    loss, _ = best_of(FOUND, bits * FOUND.weights / 8)
    assert got.loss == pytest.approx(loss)
    assert got.bits <= bits
    assert got.formats["a.q"] == got.formats["a.k"]
    assert sum(s.bytes for s in got.shares) == got.cost
    assert sum(s.weights for s in got.shares) == FOUND.weights
    assert got == allocate(FOUND, budget_bytes=int(bits * FOUND.weights / 8))
    assert [line.split()[0] for line in str(got).splitlines()] == ["format", *(s.format for s in got.shares), "all"]


def test_other_costs():
    def seconds(group, format):
        return group.weights * {"int3:g32": 3e-6, "int4:g32": 1e-6, "int8:channel": 2e-6}[format]

    got = allocate(FOUND, cost=seconds, budget=FOUND.weights * 1e-6)
    assert set(got.formats.values()) == {"int4:g32"}
    with pytest.raises(
        ValueError, match=r"budget of 0\.1 in the unit of the costs is below the least possible, 0\.448"
    ):
        allocate(FOUND, cost=seconds, budget=0.1)
    with pytest.raises(ValueError, match=r"cost of a\.q in int3:g32 is nan"):
        allocate(FOUND, cost=lambda g, f: float("nan"), budget=1.0)


def test_choices_that_are_made_already():
    got = allocate(FOUND, budget_bits=7, at_least={"b.*": 8}, fixed={"q": "int3:g32"})
    assert got.formats["b.o"] == "int8:channel"
    assert got.formats["a.q"] == got.formats["a.k"] == "int3:g32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no budget given"),
        ({"budget_bits": 4, "budget_bytes": 9}, "budget_bits and budget_bytes given"),
        ({"budget": 4}, "cost and budget belong together"),
        ({"budget_bits": 3.4}, r"budget of 3\.4 bits per weight is below the least possible, 3\.5"),
        ({"budget_bytes": 9}, r"budget of 9 bytes is below the least possible, 196,000|196000"),
        ({"budget_bits": 0}, "positive number"),
        ({"budget_bits": float("nan")}, "positive number"),
        ({"budget_bits": 5, "at_least": {"c.o": 4}}, r"'c\.o' matches no group; groups are a\.q"),
        ({"budget_bits": 5, "fixed": {"a.o": "int2:g32"}}, "was not measured: int3:g32, int4:g32"),
        (
            {"budget_bits": 5, "fixed": {"a.q": "int3:g32", "a.k": "int4:g32"}},
            "a.q, a.k: no format of .* meets 'a.q', 'a.k'",
        ),
        ({"budget_bits": 5, "at_least": {"a.*": 9}}, "no format of"),
    ],
)
def test_what_cannot_be_allocated(options, message):
    with pytest.raises(ValueError, match=message):
        allocate(FOUND, **options)


def test_the_frontier_falls():
    found = frontier(FOUND, 12)
    losses = [a.loss for a in found]
    assert losses == sorted(losses, reverse=True)
    assert found[0].bits == pytest.approx(3.5)
    assert found[-1].loss == min(losses)
    for a in found:
        assert a.loss == pytest.approx(best_of(FOUND, a.budget)[0])
    assert [a.bits <= b for a, b in zip(frontier(FOUND, [4, 5]), (4, 5))] == [True, True]
    with pytest.raises(ValueError, match="at least 2"):
        frontier(FOUND, 1)


def test_json_there_and_back(tmp_path):
    text = FOUND.to_json()
    assert Sensitivity.from_json(text) == FOUND
    (tmp_path / "s.json").write_text(text)
    assert Sensitivity.read(tmp_path / "s.json") == FOUND
    for wrong, message in (
        ("{", "no sensitivities"),
        ("[]", "expected a JSON object"),
        ('{"kind": "other"}', "expected a JSON object"),
        (text.replace('"role"', '"rule"'), "no sensitivities"),
        (text.replace("int8:channel", "int9:channel", 1), "has the formats"),
        (text.replace("0.4", "NaN"), "finite"),
        (text.replace("a.k", "a.q"), "no group twice"),
    ):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(ValueError, match=message) as error:
            Sensitivity.read(tmp_path / "wrong.json")
        assert "wrong.json" in str(error.value)
    with pytest.raises(ValueError, match="was not measured in 'int2', only in int3:g32"):
        FOUND.kl(FOUND.groups[0], "int2")


def invented(checkpoint, formats=FORMATS, ragged="ragged"):
    """Sensitivities of a checkpoint as if they had been measured: the later the block, the less it hurts."""
    transformers = pytest.importorskip("transformers")
    assert transformers
    from halfulp.compress._layouts import OURS, stored
    from halfulp.compress._plan import start
    from halfulp.compress.mixed._groups import group_rows

    plan = start(checkpoint.tensors.values(), checkpoint.config)
    plans = {f: quantize(f, ragged=ragged).plan(plan) for f in formats}
    rows = [row for row in plans[formats[0]].rows if row.touched]
    blocks = {row.name: int(row.name.split(".")[2]) for row in rows}
    members, notes = group_rows(checkpoint, rows, blocks, "layer")
    groups = []
    for m in members:
        options = []
        for k, (f, p) in enumerate(plans.items()):
            mine = [row for row in p.rows if row.name in {r.name for r in m.rows}]
            size = sum(s.nbytes for row in mine for s in stored(row, OURS))
            options.append(Option(f, size, (len(m.name) / (1 + m.block) / 10**k,)))
        count = sum(r.spec.shape[-1] * r.spec.shape[-2] for r in m.rows)
        groups.append(Group(m.name, m.role, m.block, m.patterns, len(m.rows), count, m.fused, tuple(options)))
    return Sensitivity("s", "t", (1,), ragged, tuple(formats), tuple(groups), notes)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_what_is_written_is_what_was_chosen(tmp_path, kind):
    checkpoint = open_checkpoint(common.checkpoint(tmp_path / "source", kind, torch.float32))
    found = invented(checkpoint)
    step = mixed(found, budget_bits=4.6, fixed=ALL_THREE, by="nearest")
    manifest = compress(checkpoint, step, tmp_path / "out")
    plan = plan_of(checkpoint, step)
    chosen = step.allocation.formats
    assert len({*chosen.values()}) == 3
    groups = {g.name: g for g in found.groups}
    starred = {row.module: row for row in plan.rows if row.touched}
    for name, fmt in chosen.items():
        mine = [
            row
            for module, row in starred.items()
            if module == name or (groups[name].tensors > 1 and _like(module, name))
        ]
        assert len(mine) == groups[name].tensors
        assert {str(row.weights) for row in mine} == {fmt}
    assert len(starred) == sum(g.tensors for g in found.groups)
    assert any("mixed precision: 4." in note for note in manifest["notes"])
    assert sum("int4:g32" in note for note in manifest["notes"]) == 1
    assert manifest["layout"] == "compressed-tensors"
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 3
    ours = common.logits_of(load(tmp_path / "out"))
    # one format at a time, by plain steps
    names = {f: [f"re:{p}" for n, g in groups.items() if chosen[n] == f for p in g.patterns] for f in FORMATS}
    compress(checkpoint, chain(*(quantize(f, targets=t) for f, t in names.items())), tmp_path / "plain")
    assert torch.equal(ours, common.logits_of(load(tmp_path / "plain")))


def _like(module, name):
    before, after = name.split("*")
    return module.startswith(before) and module.endswith(after)


def test_transformers_reads_it(tmp_path):
    pytest.importorskip("compressed_tensors")
    checkpoint = open_checkpoint(common.checkpoint(tmp_path / "source", "llama", torch.float32))
    compress(checkpoint, mixed(invented(checkpoint), budget_bits=4.6, fixed=ALL_THREE, by="nearest"), tmp_path / "out")
    [theirs] = common.in_transformers([tmp_path / "out"], tmp_path)
    assert "error" not in theirs, theirs
    torch.testing.assert_close(theirs["logits"], common.logits_of(load(tmp_path / "out"))[: len(theirs["logits"])])


def test_gptq_keep_and_ragged(tmp_path):
    checkpoint = open_checkpoint(common.checkpoint(tmp_path / "source", "llama", torch.float32, inner=80))
    found = invented(checkpoint, ("int3:g64", "int8:g64"))
    groups = [replace(g, options=(*g.options, Option("keep", 4 * g.weights, (0.0,)))) for g in found.groups]
    found = replace(found, formats=(*found.formats, "keep"), groups=tuple(groups))
    step = mixed(found, budget_bits=6, fixed={"layers.0.mlp.down_proj": "keep"}, damp=0.05)
    assert all(s.rounding.damp == 0.05 for s in step.steps)
    read = calibration([[5, 6, 7, 8, 9, 10]])
    manifest = compress(checkpoint, step, tmp_path / "out", calibration=read)
    plan = plan_of(checkpoint, step)
    assert [row.name for row in plan.rows if row.kind == "linear" and not row.touched] == [
        "model.layers.0.mlp.down_proj.weight"
    ]
    assert any("short last block" in note for note in manifest["notes"])
    assert manifest["layout"] == "halfulp"
    assert torch.isfinite(common.logits_of(load(tmp_path / "out"))).all()


def test_after_pruning(tmp_path):
    checkpoint = open_checkpoint(common.checkpoint(tmp_path / "source", "llama", torch.float32))
    step = mixed(invented(checkpoint), budget_bits=4.6, fixed=ALL_THREE, by="nearest")
    compress(checkpoint, chain(prune("2:4"), step), tmp_path / "out")
    weight = load(tmp_path / "out").model.layers[1].mlp.up_proj.weight
    assert ((weight.reshape(-1, 4) != 0).sum(1) <= 2).all()


def test_another_model_is_told(tmp_path):
    checkpoint = open_checkpoint(common.checkpoint(tmp_path / "source", "llama", torch.float32))
    step = mixed(invented(checkpoint), budget_bits=4.6, fixed=ALL_THREE, by="nearest")
    other = open_checkpoint(common.checkpoint(tmp_path / "other", "llama", torch.float32, inner=128))
    with pytest.raises(ValueError, match="was measured with 1 of 6,144: measure the sensitivity of this model"):
        plan_of(other, step)
    with pytest.raises(ValueError, match="matches no module"):
        plan_of({"fc.weight": (4, 4)}, step)
    # a longer name that ends in the same words is another layer
    more = {spec.name: spec.shape for spec in checkpoint.tensors.values()}
    more |= {f"draft.{name}": shape for name, shape in more.items() if "proj" in name}
    touched = [row.name for row in plan_of(more, step).rows if row.touched]
    assert len(touched) == 14
    assert not any(name.startswith("draft") for name in touched)


def test_options_that_do_not_fit():
    for options, message in (
        ({"by": "magic"}, "choose 'gptq' or 'nearest'"),
        ({"ragged": "refit"}, "ragged: the sensitivity says so"),
        ({"targets": "x", "ignore": "y"}, "targets, ignore"),
    ):
        with pytest.raises(ValueError, match=message):
            mixed(FOUND, budget_bits=5, **options)
    step = mixed(FOUND, budget_bits=5, by="nearest", activations="int8:channel", kv="int8:channel")
    assert isinstance(step, Mixed)
    assert {str(s.activations) for s in step.steps} == {"int8:channel"}
    assert [s.kv is not None for s in step.steps] == [True] + [False] * (len(step.steps) - 1)
