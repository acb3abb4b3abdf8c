"""TPU schedules: read, executed, and what the compiler takes."""

import math
from dataclasses import replace

import pytest

from halfulp.compress.lowering import (
    Job,
    can_compile,
    compile_jobs,
    dtype_of,
    execute,
    operands,
    parse,
    table,
    target,
    targets,
)
from halfulp.compress.lowering._legality import job_of, measured

V5E = replace(target("v5e"), hbm=32.0, clock=1.0, copy_seconds=0.0, delay=1)  # a granule in a cycle
compiles = pytest.mark.skipif(not can_compile(), reason="libtpu, the TPU's compiler, is not installed")


def loop(trips, body=""):
    """A loop whose last bundle before the delay slot branches back."""
    return f"""
     0   :  {{ %s0_s0 = smov 0 }}
   0x1 LB: > {{ %s1_s0 = sphi %s0_s0, %s2_s0  ;;  %s2_s0 = sadd.s32 1, %s1_s0 }} /* Start region 5 */
{body}   0x7   : > {{ %p3_p0 = scmp.ge.s32.totalorder %s2_s0, {trips} /* exit */ }}
   0x8   :  {{ %9 = sbr.rel (!%p3_p0) target = $region5 }}
   0x9   :  {{}}
"""


def test_slots_are_read():
    program = parse(
        "   0   :  { %s1_s0 = smov (%p5_p1, %s0_s2), 4 /* a /* nested */ comment ;; } */  ;;  "
        "%7 = dma.hbm_to_vmem [thread:$0]  (!%p2_p0), /*hbm=*/%s3_s1, /*size_in_granules=*/64, "
        "/*dst_syncflagno=*/[#allocation2 + $0x1] } /* Start region 1 :: Start/End empty region 12 */\n"
        "  0x1 PF: > { %8 = sbr.rel (%p2_p0) target = $region12 }\n"
    )
    move, copy = program.bundles[0]
    assert (move.result, move.name, move.operands) == ("s1_s0", "smov", ("4",))
    assert (move.predicate, move.unless, move.otherwise) == ("p5_p1", False, "s0_s2")
    assert (copy.predicate, copy.unless) == ("p2_p0", True)
    assert copy.named["size_in_granules"] == "64"
    assert copy.named["dst_syncflagno"] == "[#allocation2 + $0x1]"
    assert program.regions == {"1": 0, "12": 0}
    assert program.bundles[1][0].target == "12"
    with pytest.raises(ValueError, match="no bundles"):
        parse("schedule analysis:")


@pytest.mark.parametrize("trips", [1, 2, 37])
def test_trips_are_counted(trips):
    schedule = execute(parse(loop(trips)), V5E)
    # the slot after a branch is issued whether it is taken or not
    assert schedule.visits == (1, trips, trips, trips, trips)
    assert schedule.cycles == schedule.bundles == 1 + 4 * trips


def test_a_branch_in_the_shadow_of_one_that_is_taken_is_none():
    text = """
     0   :  { %p0_p0 = scmp.eq.s32.totalorder 1, 1 }
   0x1   :  { %1 = sbr.rel (%p0_p0) target = $region3 }
   0x2   :  { %2 = sbr.rel (%p9_p0) target = $region4 }
   0x3   :  {} /* Start region 4 */
   0x4   :  {} /* Start region 3 */
"""
    assert execute(parse(text), V5E).visits == (1, 1, 1, 0, 1)
    with pytest.raises(ValueError, match="p9_p0, which the program computes from its data"):
        execute(parse(text.replace("1, 1 }", "1, 2 }")), V5E)


def test_a_multiplication_waits_for_its_unit():
    body = "".join(
        f"   0x{i}   : > {{ %{i} = vmatmul.{kind}.gmra.mxu{unit} %v1_v0 }}\n"
        for i, (kind, unit) in enumerate([("s8", 0), ("s8", 1), ("s8", 0)], 2)
    )
    one = execute(parse(loop(1, body)), V5E)
    # the third comes 14 cycles before unit 0, which takes a register's 32 rows two in a cycle, is free
    assert (one.matrix_stall, one.cycles) == (14, 1 + 4 + 3 + 14 + 12)
    many = execute(parse(loop(50, body)), V5E)
    assert many.matmuls == {"vmatmul.s8.gmra": 150}
    assert many.busy == (1600, 800, 0, 0)
    assert many.cycles == pytest.approx(1600, abs=20)
    assert many.useful == pytest.approx(2400 / 4 / many.cycles)


def test_copies_go_one_after_the_other_and_waits_wait():
    text = "".join(
        f"   0x{i}   :  {{ %{i} = dma.hbm_to_vmem [thread:$0], /*hbm=*/%s0_s0, /*size_in_granules=*/100, "
        f"/*vmem=*/%s1_s1, /*dst_syncflagno=*/[#allocation{i}] }}\n"
        for i in (1, 2)
    )
    text += "   0x3   :  { %3 = dma.done.wait [#allocation1], 100 }\n   0x4   :  { %4 = dma.done.wait [#allocation2], 100 }\n"
    schedule = execute(parse(text), V5E)
    assert schedule.read == 2 * 100 * 32
    # the first ends at 100, the second at 200
    assert (schedule.copy_stall, schedule.cycles) == (98 + 99, 201)
    assert execute(parse(text), replace(V5E, copy_seconds=7.0)).cycles == 208
    assert execute(parse(text), replace(V5E, hbm=math.inf)).cycles == 4


def test_a_program_without_an_end_is_given_up():
    with pytest.raises(ValueError, match="not ended after 1000 bundles"):
        execute(parse(loop(2**31 - 1)), V5E, limit=1000)


def test_every_pair_is_known_for_every_target():
    known = table()
    assert set(known) == set(targets())
    pairs = set(known["v5e"])
    for name, rows in known.items():
        assert set(rows) == pairs
        for found in rows.values():
            assert found[0].way == "direct"
            for way in found:
                assert (way.cycles is None) == (way.error is not None) == (way.instruction is None)
                if way.cycles is not None:
                    # no schedule is faster than the matrix units
                    assert way.cycles >= 512**3 / (target(name).matrix_units * target(name).side ** 2) / 8
    assert sum(len(found) for rows in known.values() for found in rows.values()) > 200


@pytest.mark.parametrize(
    ("x", "w", "on", "way", "unit"),
    [
        ("int8", "int8", "tpu-v5e", "direct", "vmatmul.s8"),
        ("int8", "int4", "tpu-v6e", "int8", "vmatmul.s8"),
        ("bf16", "e4m3fn", "tpu-v6e", "direct", "vmatmul.bf16"),
        ("e4m3fn", "e4m3fn", "tpu-7x", "direct", "vmatmul.f8e4m3fn"),
        ("int8", "int8", "tpu-v4", "bf16", "vmatmul.bf16"),
    ],
)
def test_the_cheapest_way(x, w, on, way, unit):
    found = operands(x, w, on)
    assert (found.way, found.instruction) == (way, unit)


def test_what_a_target_refuses_is_said_with_what_it_takes():
    with pytest.raises(ValueError, match=r"bf16 x e2m1 does not compile for v5e .*it takes .*bf16 x int4"):
        operands("bf16", "e2m1", "tpu-v5e")
    with pytest.raises(ValueError, match="no pair of the table; it has fp32 x fp32"):
        operands("int4", "int8", "tpu-v5e")
    with pytest.raises(ValueError, match="no operand of a TPU kernel: choose fp32"):
        dtype_of("posit8")
    with pytest.raises(ValueError, match="choose tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu-7x"):
        target("tpu-v9")


@pytest.mark.skipif(can_compile(), reason="libtpu is installed")
def test_without_the_compiler_it_is_asked_for():
    with pytest.raises(ImportError, match="pip install 'halfulp\\[tpu\\]'"):
        compile_jobs([])


@compiles
@pytest.mark.parametrize("name", ["v5e", "v6e", "tpu7x"])
def test_the_table_is_what_the_compiler_says(name):
    pairs = [("int8", "int8", "direct"), ("bf16", "e4m3fn", "direct"), ("e4m3fn", "e2m1", "e4m3fn")]
    for compiled in compile_jobs([job_of(target(name), *pair) for pair in pairs]):
        x, w, way = compiled.job.name.split("-")
        found = measured(compiled)
        assert next(known for known in table()[name][x, w] if known.way == way) == replace(
            found, cycles=None if found.cycles is None else float(f"{found.cycles:g}")
        )


@compiles
def test_a_job_that_kills_the_compiler_costs_itself_alone():
    v4 = target("v4")
    jobs = [
        job_of(v4, "bf16", "int8", "bf16"),
        job_of(v4, "bf16", "int2", "bf16"),
        job_of(v4, "bf16", "bf16", "direct"),
    ]
    errors = [compiled.error for compiled in compile_jobs(jobs)]
    assert errors[0] is errors[2] is None
    assert "died by signal 6" in errors[1]
    with pytest.raises(ValueError, match="one name"):
        compile_jobs([jobs[0], jobs[0]])


@compiles
def test_what_raises_is_an_error_of_its_job():
    (compiled,) = compile_jobs([Job("a", "halfulp.compress.lowering._tile:tile", target("v5e"), {"x": "int8"})])
    assert compiled.error.startswith("TypeError")
