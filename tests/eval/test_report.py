"""The report: what it says, what it must never say, and what a browser makes of it."""

import functools
import html
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halfulp.eval import _findings as findings
from halfulp.eval import _layers as pictures
from halfulp.eval import _plots as plots
from halfulp.eval import _report as page
from halfulp.eval._record import (
    Accuracy,
    Estimate,
    Latency,
    ModelId,
    RecipeId,
    Record,
    Size,
    TensorResult,
    Timing,
)

E = Estimate
PARAMETERS = 134_515_008
# name, bits/weight, KL, what the tensors become
RECIPES = [
    ("w8-channel", 8.02, 0.0011, "int8:channel"),
    ("w8-g128", 8.13, 0.00105, "int8:g128"),
    ("fp8-e4m3", 8.02, 0.0094, "e4m3fn:channel"),
    ("w6-g64", 6.25, 0.0062, "int6:g64"),
    ("w4-gptq-g64", 4.31, 0.0482, "int4:g64"),
    ("w4-gptq-g128", 4.16, 0.0521, "int4:g128"),
    ("w4-rtn-g128", 4.16, 0.0913, "int4:g128"),
    ("w4-awq-g128", 4.16, 0.0547, "int4:g128"),
    ("nvfp4", 4.5, 0.0743, "nvfp4"),
    ("mxfp4", 4.25, 0.1412, "mxfp4"),
    ("w3-gptq-g64", 3.31, 0.231, "int3:g64"),
    ("sparse24-w4-g128", 2.88, 0.612, "2:4+int4:g128"),
]


def timing(median: float, spread: float = 0.02, **more: Any) -> Timing:
    return Timing(median_s=median, low_s=median * (1 - spread), high_s=median * (1 + spread), n=20, **more)


def latency(scale: float = 1.0, **more: Any) -> Latency:
    fields = {"path": "dequantized to float32, eager torch", "threads": 2, "prompt": 128, "new": 32}
    return Latency(**(fields | more), prefill=timing(0.31 * scale), decode=timing(0.0412 * scale, 0.03))


def layers(name: str, bits: float, action: str, count: int = 30) -> list[TensorResult]:
    rng, base = random.Random(name), 0.9 * 2.0 ** -(bits - 1)
    kinds = {f"self_attn.{k}_proj": 0.9 for k in "qkvo"} | {f"mlp.{k}_proj": 1.0 for k in ("gate", "up", "down")}
    found = [
        TensorResult(
            name="model.embed_tokens.weight",
            shape=[49152, 576],
            action="keep",
            bits_per_weight=16,
            relative_error=0,
        )
    ]
    for layer in range(count):
        edge = 1.5 if layer in (0, count - 1) else 1.0
        for kind, weight in kinds.items():
            kept = kind == "mlp.down_proj" and layer == 1
            error = base * weight * edge * (1.4 if kind == "mlp.down_proj" else 1) * rng.uniform(0.85, 1.15)
            found.append(
                TensorResult(
                    name=f"model.layers.{layer}.{kind}.weight",
                    shape=[576, 576],
                    action="keep" if kept else action,
                    reason="the recipe keeps it" if kept else "",
                    bits_per_weight=16 if kept else bits,
                    relative_error=0 if kept else error,
                    sqnr_db=None if kept else -20 * math.log10(error),
                )
            )
        found.append(
            TensorResult(
                name=f"model.layers.{layer}.input_layernorm.weight",
                shape=[576],
                action="keep",
                bits_per_weight=16,
                relative_error=0,
            )
        )
    return found


def record(index: int = 0, **changes: Any) -> Record:
    name, bits, kl, action = RECIPES[index % len(RECIPES)]
    if index >= len(RECIPES):
        name, kl, bits = f"{name}-{index}", kl * (1 + index / 40), bits + index / 50
    size = int(57_000_000 + 106_000_000 * bits / 8)
    rise = kl * 0.9
    fields: dict[str, Any] = {
        "kind": "score",
        "name": name,
        "created": f"2026-01-31T12:{index % 60:02d}:00Z",
        "command": ["halfulp", "score", f"out/{name}", "--baseline", "SmolLM2-135M", "--text", "my text.txt"],
        "versions": {
            "python": "3.11.9",
            "halfulp": "0.1.0",
            "torch": "2.13.0",
            "numpy": "2.3.0",
            "transformers": "5.24.0",
        },
        "machine": {
            "system": "Linux",
            "cpu": "Xeon Platinum 8481C",
            "cores": 2,
            "memory_bytes": 8_000_000_000,
        },
        "seed": 7,
        "model": ModelId(source="SmolLM2-135M-Instruct", sha256="ab" * 32, parameters=PARAMETERS),
        "recipe": RecipeId(name=f"{name}.yaml", sha256=f"{index:064x}", text=f"weights: {action}\n"),
        "seconds": {"load": 3.1, "compress": 41.0, "score": 212.4},
        "peak_rss_bytes": 1_310_000_000,
        "size": Size(
            bytes_on_disk=size,
            weight_bytes=size,
            quantized_parameters=106_168_320,
            bits_per_weight=bits,
            bits_per_parameter=size * 8 / PARAMETERS,
        ),
        "baseline_size": Size(
            bytes_on_disk=269_060_552,
            weight_bytes=269_030_016,
            quantized_parameters=0,
            bits_per_weight=None,
            bits_per_parameter=16.0,
        ),
        "tensors": layers(name, bits, action),
        "accuracy": Accuracy(
            text="wikitext2 test",
            text_sha256="cd" * 32,
            tokens=65_536,
            windows=128,
            window=512,
            stride=512,
            bos="no BOS token; the first token of a window is not scored",
            perplexity=E(value=18.41 * math.exp(rise), se=0.24),
            baseline_perplexity=E(value=18.41, se=0.23),
            log_perplexity_ratio=E(value=rise, se=0.0016 + rise * 0.03),
            kl=E(value=kl, se=kl * 0.03),
            top1=E(value=1 - 0.35 * math.sqrt(kl), se=0.0011),
            kl_p99=kl * 11,
        ),
        "latency": latency(1.01 + 0.018 * (index % 5)),
        "baseline_latency": latency(1.0),
        "notes": ["down_proj of layer 1 kept: the recipe names it"] if index % 3 == 0 else [],
    }
    return Record(**(fields | changes))


def text_of(path: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", path.read_text(encoding="utf-8")))


@functools.cache
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on the path: what the page looks like was not checked")
    return found


def browse(file: Path, tmp: Path, *flags: str) -> str:
    quiet = [
        "--hide-scrollbars",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={tmp / 'profile'}",
    ]
    return subprocess.run(
        [*command, *flags, file.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def made(tmp_path: Path, records: list[Record]) -> tuple[str, str]:
    """The page as HTML, and as one line of text."""
    out = page.report(records, tmp_path / "report.html")
    return out.read_text(encoding="utf-8"), re.sub(r"\s+", " ", text_of(out))


def without_accuracy(**changes: Any) -> dict[str, Any]:
    return {"accuracy": None, "latency": None, "baseline_latency": None} | changes


def score(index: int = 0, **changes: Any) -> Record:
    """A record with changed fields of its accuracy."""
    base = record(index)
    assert base.accuracy is not None
    return base.model_copy(update={"accuracy": base.accuracy.model_copy(update=changes)})


@pytest.mark.parametrize("count", [1, 3, 12])
def test_every_recipe_has_its_row_its_points_and_its_layers(tmp_path: Path, count: int) -> None:
    source, text = made(tmp_path, [record(i) for i in range(count)])
    assert source.count('<th scope="row">') == count + 1  # and the baseline
    assert source.count('class="plot wide"') == source.count('class="plot narrow"') == 2
    assert source.count('class="strip"') == count
    assert source.count('<circle class="point') == 4 * count
    for name, bits, *_ in RECIPES[:count]:
        assert f"{name} " in text
        assert f"{bits:.2f}" in text
        # both plots, wide and narrow, name it: no label was left out
        assert len(re.findall(rf'<text class="label"[^>]*>{name}</text>', source)) == 4
    assert "left out for want of room" not in text
    assert "SmolLM2-135M-Instruct, 134,515,008 parameters" in text
    assert "halfulp score out/w8-channel --baseline SmolLM2-135M --text 'my text.txt'" in text
    for fact in ("seed 7", "torch 2.13.0", "cores 2", "ab" * 32, "cd" * 32, "1.31 GB", "window"):
        assert fact in text


def test_the_page_is_the_same_bytes_for_the_same_records(tmp_path: Path) -> None:
    records = [record(i) for i in range(3)]
    first = page.report(records, tmp_path / "a.html").read_bytes()
    assert page.report(records, tmp_path / "b.html").read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    source, _ = made(tmp_path, [record(i) for i in range(3)])
    assert set(re.findall(r"https?://[^\s\"'<]*", source)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=|@font-face", source)


HOSTILE = "<script>alert(1)</script>\"'&"


def test_hostile_text_is_shown_and_not_run(tmp_path: Path) -> None:
    base = score(text=HOSTILE, bos=HOSTILE)
    tensors = [
        *base.tensors,
        TensorResult(name=HOSTILE, shape=[2, 2], action=HOSTILE, bits_per_weight=1, relative_error=9),
    ]
    tensors.append(
        TensorResult(
            name=f"layers.1.{HOSTILE}",
            shape=[2, 2],
            action="keep",
            reason=HOSTILE,
            bits_per_weight=1,
            relative_error=0,
        )
    )
    hostile = base.model_copy(
        update={
            "name": HOSTILE,
            "notes": [HOSTILE],
            "command": [HOSTILE],
            "machine": {HOSTILE: HOSTILE, "cpu": HOSTILE},
            "versions": {HOSTILE: HOSTILE},
            "recipe": RecipeId(name=HOSTILE, sha256=HOSTILE, text=HOSTILE),
            "model": ModelId(source=HOSTILE, sha256=None, parameters=1),
            "latency": latency(path=HOSTILE).model_copy(update={"decode": timing(1.0, unstable=True, why=HOSTILE)}),
            "seconds": {HOSTILE: 1.0},
            "tensors": tensors,
        }
    )
    out = page.report([hostile, record(1)], tmp_path / "r.html", title=HOSTILE)
    source = out.read_text(encoding="utf-8")
    assert "<script" not in source
    assert text_of(out).count("<script>alert(1)</script>") >= 12
    assert not re.search(r'title="[^"]*"\'', source)


# --- what is claimed ---------------------------------------------------------------------------------------


def test_the_headline_names_the_smallest_recipe_below_each_level_and_its_ties(tmp_path: Path) -> None:
    _, text = made(tmp_path, [record(i) for i in range(12)])
    assert "Smallest with KL below 0.01 nats/token: w6-g64, 6.25 bits/weight, 139.8 MB (0.52× the baseline)" in text
    assert "Below 0.1: w4-gptq-g128, 4.16 bits/weight" in text
    assert "same size and no difference in KL shown: w4-awq-g128." in text  # and not w4-rtn-g128, which is worse
    assert "Lowest KL: w8-g128 (0.00105 ± 0.00006 nats/token); no difference shown from w8-channel." in text
    assert "Perplexity: no difference from the baseline shown for w8-channel and w8-g128; higher by 0.56 % to" in text


def test_wide_error_bars_take_every_claim_away(tmp_path: Path) -> None:
    wide = [score(i, kl=E(value=0.05 + i / 100, se=0.04), log_perplexity_ratio=E(value=0.05, se=0.1)) for i in range(3)]
    _, text = made(tmp_path, wide)
    assert "No recipe has a KL shown to be below 0.1 nats/token." in text
    assert "Lowest KL: w8-channel (0.05 ± 0.08 nats/token); no difference shown from" in text
    assert "higher by" not in text
    assert not any(findings.beaten(row, findings.rows_of(wide)) for row in findings.rows_of(wide))


def test_a_difference_is_claimed_where_the_intervals_part(tmp_path: Path) -> None:
    good, bad = score(0, kl=E(value=0.02, se=0.001)), score(1, kl=E(value=0.05, se=0.001))
    rows = findings.rows_of([good, bad])
    assert [findings.beaten(row, rows) for row in rows] == [False, True]  # w8-g128 is larger too
    assert "its interval wholly below the others’" in made(tmp_path, [good, bad])[1]


def test_a_value_without_an_error_bar_is_shown_but_not_ranked(tmp_path: Path) -> None:
    _, text = made(tmp_path, [score(0, kl=E(value=1e-9)), record(1)])
    assert "A KL without an error bar is shown but not ranked." in text
    assert "Only w8-g128 (0.00105 ± 0.00006 nats/token) has a KL with an error bar." in text
    rows = findings.rows_of([score(0, kl=E(value=1e-9)), record(1)])
    assert [line["mark"] for line in page.table_of(rows, {})] == ["", "", "filled"]


@pytest.mark.parametrize(
    ("path", "claim"),
    [
        ("dequantized to float32, eager torch", True),
        ("fake-quantized, eager", True),
        ("int4 packed kernel, compiled", False),
    ],
)
def test_an_emulated_path_claims_no_speed_up(tmp_path: Path, path: str, claim: bool) -> None:
    _, text = made(tmp_path, [record(i, latency=latency(path=path)) for i in range(2)])
    assert f"Path timed: {path}." in text
    assert ("no speed-up is claimed" in text) == claim


def test_times_are_compared_to_their_own_baseline_by_interval() -> None:
    assert findings.time_note(timing(1.0, 0.05), timing(1.08, 0.05)) == "no difference shown"
    assert findings.time_note(timing(1.0, 0.01), timing(2.0, 0.01)) == "0.50× baseline"
    assert findings.time_note(timing(1.0), None) == ""


def test_an_unstable_time_is_marked_with_its_reason(tmp_path: Path) -> None:
    shaky = latency().model_copy(
        update={"decode": timing(0.04, 0.3, unstable=True, why="spread 31 % of the median", confidence=0.94)}
    )
    source, text = made(tmp_path, [record(0, latency=shaky), record(1)])
    assert source.count('<span class="flag"') == 1
    assert source.count('title="median of 20, 94% interval"') == 1
    assert "w8-channel, decode unstable spread 31 % of the median" in text


# --- what may be compared ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"text_sha256": "ee" * 32},
        {"window": 1024},
        {"stride": 256},
        {"bos": "BOS in every window"},
        {"tokens": 99},
    ],
)
def test_other_texts_and_windows_are_set_apart(tmp_path: Path, change: dict[str, Any]) -> None:
    source, text = made(tmp_path, [record(0), score(1, **change), record(2)])
    assert source.count('<section class="group">') == 2
    assert "shown in 2 groups; numbers of different groups must not be compared" in text


def test_another_model_is_set_apart(tmp_path: Path) -> None:
    other = record(1, model=ModelId(source="SmolLM2-135M-Instruct", sha256="00" * 32, parameters=PARAMETERS))
    assert made(tmp_path, [record(0), other])[0].count('<section class="group">') == 2


@pytest.mark.parametrize(
    "change",
    [{"machine": {"system": "Linux", "cpu": "another", "cores": 64}}, {"latency": latency(threads=1)}],
)
def test_times_of_other_conditions_are_lettered_and_drawn_apart(tmp_path: Path, change: dict[str, Any]) -> None:
    source, text = made(tmp_path, [record(0), record(1, **change), record(2)])
    assert "do not compare across the letters" in text
    assert source.count('<section class="group">') == 1
    assert "decode latency, condition A" in text
    assert "decode latency, condition B" in text
    assert source.count("<b>B</b>") == 2  # prefill and decode of the one


def test_differing_versions_and_baselines_are_said(tmp_path: Path) -> None:
    other = score(1, baseline_perplexity=E(value=19.0, se=0.2)).model_copy(update={"versions": {"torch": "2.6.0"}})
    _, text = made(tmp_path, [record(0), other])
    assert "different versions of torch: 2.13.0, 2.6.0." in text
    assert "did not share one baseline" in text


# --- what is missing ---------------------------------------------------------------------------------------


def test_missing_parts_are_said_to_be_missing(tmp_path: Path) -> None:
    bare = record(0, **without_accuracy(kind="compress", size=None, baseline_size=None, tensors=[], notes=[]))
    _, text = made(tmp_path, [bare])
    assert "No accuracy was recorded" in text
    assert "No damage against size: no run here scored a recipe" in text
    assert "No damage against latency: no time was measured" in text
    assert "No run here recorded its tensors" in text


def test_no_baseline_and_no_latency(tmp_path: Path) -> None:
    alone = score(baseline_perplexity=None, log_perplexity_ratio=None, kl=None, top1=None, kl_p99=None)
    _, text = made(tmp_path, [alone.model_copy(update={"baseline_size": None, "baseline_latency": None})])
    assert "No recipe has a KL with an error bar (no baseline was scored)" in text
    assert "no run here scored a recipe against a baseline" in text
    only = record(0, recipe=None, name="the model")
    assert "there is nothing to compare" in made(tmp_path, [only])[1]


def test_perplexity_stands_in_for_kl(tmp_path: Path) -> None:
    source, _ = made(
        tmp_path, [score(i, kl=None, log_perplexity_ratio=E(value=i / 10 - 0.1, se=0.01)) for i in range(3)]
    )
    assert source.count("<h4>ln(perplexity / baseline’s) against size</h4>") == 1
    assert source.count("nan") == 0


@pytest.mark.parametrize("kl", [math.nan, math.inf, 0.0, -1e-12])
def test_odd_values_are_drawn_or_named(tmp_path: Path, kl: float) -> None:
    odd = score(
        0,
        kl=E(value=kl, se=0.0),
        perplexity=E(value=kl, se=math.nan),
        kl_p99=kl,
        log_perplexity_ratio=E(value=kl, se=kl),
    )
    source, text = made(tmp_path, [odd, record(2), record(5), record(11)])
    assert not re.search(r'(x|y|x1|x2|y1|y2|cx|cy|width|height)="-?(nan|inf)', source)
    assert ("not finite for w8-channel" in text) == (not math.isfinite(kl))
    if not math.isfinite(kl):
        assert "Not drawn, for a value is missing or not finite: w8-channel." in text


@pytest.mark.parametrize("se", [math.nan, math.inf, None])
def test_an_odd_error_bar_is_drawn_and_never_ranked(tmp_path: Path, se: float | None) -> None:
    source, text = made(tmp_path, [score(0, kl=E(value=0.001, se=se)), record(2), record(11)])
    assert not re.search(r'(x|y|x1|x2|y1|y2|cx|cy|width|height)="-?(nan|inf)', source)
    assert "Lowest KL: fp8-e4m3" in text


def test_a_compress_record_lends_its_tensors_to_the_score_record(tmp_path: Path) -> None:
    compressed = record(0, **without_accuracy(kind="compress"))
    scored = record(0, tensors=[])
    source, text = made(tmp_path, [compressed, scored, record(1, tensors=[])])
    assert source.count('<section class="group">') == 1
    assert source.count('<th scope="row">') == 3
    assert source.count('class="strip"') == 1
    assert "No tensors were recorded for w8-g128." in text


def test_the_same_name_twice_stays_two_rows(tmp_path: Path) -> None:
    _, text = made(tmp_path, [record(0), record(0)])
    assert "w8-channel (2)" in text


def test_no_records_and_a_folder_as_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records to report on"):
        page.report([], tmp_path / "r.html")
    with pytest.raises(IsADirectoryError, match="add a file name"):
        page.report([record()], tmp_path)


# --- layers and figures ------------------------------------------------------------------------------------


def tensor(name: str, error: float | None = 0.1, action: str = "int4", shape: tuple[int, ...] = (4, 4)) -> TensorResult:
    return TensorResult(name=name, shape=list(shape), action=action, bits_per_weight=4, relative_error=error)


def test_experts_share_a_cell_that_shows_the_worst_of_them() -> None:
    names = [f"model.layers.2.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    strip = pictures.strip_of(findings.Row("r", record(), [tensor(n, 0.1 + i / 10) for i, n in enumerate(names)]))
    assert "worst of 4: relative error 0.4000" in strip["svg"]
    assert strip["worst"][0][:2] == ("model.layers.2.mlp.experts.3.up_proj", "0.4000")


def test_modules_of_one_name_in_two_places_keep_apart() -> None:
    kinds = {
        "encoder.layers.attn.q",
        "decoder.layers.attn.q",
        "decoder.layers.cross.q",
        "decoder.layers.mlp.up",
    }
    assert set(pictures._short_kinds(kinds).values()) == {
        "encoder.layers.attn.q",
        "decoder.layers.attn.q",
        "cross.q",
        "up",
    }


def test_a_star_never_stands_alone() -> None:
    assert pictures._short_kinds({"l.experts.*.down", "l.shared.down"})["l.experts.*.down"] == "experts.*.down"


def test_kept_unknown_and_unnumbered_tensors() -> None:
    tensors = [
        tensor("model.layers.0.q.weight", 0.2),
        tensor("model.layers.1.q.weight", 0.0, "keep"),
        tensor("model.layers.2.q.weight", None),
        tensor("model.layers.3.q.weight", math.nan),
        tensor("model.layers.0.norm.weight", 0.0, "keep", (4,)),
        tensor("lm_head.weight", 0.05, "int8"),
        tensor("embed.weight", 0.0, "keep"),
    ]
    strip = pictures.strip_of(findings.Row("r", record(), tensors))
    assert [strip["svg"].count(f'<rect class="{kind}"') for kind in ("kept", "unknown")] == [
        2,
        3,
    ]  # with the legend
    assert strip["kept"] == "embed and norm"
    assert strip["outside"] == [("lm_head", "int8", 0.05)]
    assert [name for name, *_ in strip["worst"]] == ["model.layers.3.q", "model.layers.0.q", "lm_head"]


def test_heat_classes_cover_the_scale_and_noise_stays_pale() -> None:
    low, high = plots.heat_range([0.00680, 0.00681])
    assert (low, high) == (0.003405, 0.00681)
    assert plots.heat_class(low, low, high) == "h0"
    assert plots.heat_class(high, low, high) == "h6"
    assert [plots.heat_class(v / 7 + 0.01, 0, 1) for v in range(7)] == [f"h{i}" for i in range(7)]
    assert plots.heat_class(0.0, 0.0, 0.0) == "h0"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1e-4, 0.9), (3.1, 3.2), (97, 165), (1, 1e9), (-0.2, 0.3), (2e-9, 5e-9)]
)
def test_ticks_are_round_few_and_inside(low: float, high: float, log: bool) -> None:
    if log and low <= 0:
        low = high / 50
    found = plots.ticks(low, high, log=log)
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))
    assert all(low - 1e-9 * high <= v <= high * (1 + 1e-9) for v in found)
    assert all(len(plots.plain(v)) <= 8 for v in found)


def test_labels_never_cover_each_other_or_a_marker_and_give_up_when_full() -> None:
    rng = random.Random(1)
    frame = (0.0, 0.0, 500.0, 300.0)
    for count in (1, 12, 20, 200):
        anchors = [(rng.uniform(20, 480), rng.uniform(20, 280)) for _ in range(count)]
        boxes = plots.place_labels([80.0] * count, anchors, [], frame)
        placed = [b for b in boxes if b]
        assert len(placed) == count or count > 20
        assert len(placed) < count or count < 200
        for i, box in enumerate(placed):
            assert not any(plots._overlap(box, other) for other in placed[i + 1 :])
            assert not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in anchors)


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (0.05231, 0.0016, "0.0523 ± 0.0031"),
        (18.41, 0.2, "18.41 ± 0.39"),
        (12345.6, 50.0, "12,346 ± 98"),
        (-0.5, 0.1, "−0.50 ± 0.20"),
        (0.05231, None, "0.05231"),
        (math.inf, 1.0, "∞"),
        (math.nan, None, "not a number"),
        (0.0, 0.0, "0.00 ± 0.00"),
    ],
)
def test_numbers_are_cut_to_what_their_error_bears(value: float, se: float | None, text: str) -> None:
    assert findings.plus_minus(E(value=value, se=se)).replace("\xa0", " ") == text


# --- in a browser ------------------------------------------------------------------------------------------

PROBE = """<script>
const seen = svg => svg.getClientRects().length > 0;
const texts = svg => [...svg.querySelectorAll("text.label")].map(t => t.getBoundingClientRect());
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
  && a.top < b.bottom - 3 && b.top < a.bottom - 3;
const hits = boxes => boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => meet(a, b))).length;
const plots = [...document.querySelectorAll("svg.plot")].filter(seen);
const beyond = svg => [...svg.querySelectorAll("text")].filter(t => {
  const a = t.getBoundingClientRect(), b = svg.getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 2 || a.bottom > b.bottom + 2;
}).map(t => t.textContent);
const out = {
  inner: innerWidth,
  scroll: document.documentElement.scrollWidth,
  plots: plots.length,
  narrow: plots.filter(svg => svg.classList.contains("narrow")).length,
  rows: document.querySelectorAll("tbody tr").length,
  strips: document.querySelectorAll("svg.strip").length,
  collisions: plots.map(svg => hits(texts(svg))),
  outside: [...document.querySelectorAll("svg")].filter(seen).flatMap(beyond),
  paper: getComputedStyle(document.body).backgroundColor,
};
parent.postMessage(JSON.stringify(out), "*");
</script>"""
# a frame, for the window of a headless browser is never as narrow as a phone
FRAME = """<!doctype html><body style="margin:0"><script>
onmessage = event => { document.body.dataset.probe = event.data; };
</script><iframe src="probe.html" style="border:0;height:900px;width:%dpx"></iframe>"""


def probe(tmp_path: Path, count: int, width: int, *flags: str) -> dict[str, Any]:
    source, _ = made(tmp_path, [record(i) for i in range(count)])
    (tmp_path / "probe.html").write_text(source.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, encoding="utf-8")
    dom = browse(tmp_path / "frame.html", tmp_path, *flags, "--virtual-time-budget=3000", "--dump-dom")
    found = re.search(r'data-probe="([^"]*)"', dom)
    assert found, dom[-500:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@pytest.mark.parametrize(("count", "width"), [(1, 1280), (3, 800), (3, 1000), (12, 1280), (12, 400), (12, 360)])
def test_in_a_browser_nothing_overflows_or_collides(tmp_path: Path, count: int, width: int) -> None:
    seen = probe(tmp_path, count, width)
    assert seen["scroll"] <= seen["inner"] == width
    assert seen["rows"] == count + 1
    assert seen["strips"] == count
    assert seen["plots"] == 2
    assert seen["narrow"] == (2 if width <= 560 else 0)
    assert seen["collisions"] == [0, 0]
    assert seen["outside"] == []


def test_light_and_dark_screenshots_differ(tmp_path: Path) -> None:
    file = page.report([record(i) for i in range(3)], tmp_path / "r.html")
    shots = {}
    for scheme, flag in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{scheme}.png"
        browse(file, tmp_path, f"--blink-settings=preferredColorScheme={flag}", f"--screenshot={shot}")
        shots[scheme] = shot.read_bytes()
    assert all(data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000 for data in shots.values())
    assert shots["light"] != shots["dark"]
    papers = [probe(tmp_path, 1, 800, f"--blink-settings=preferredColorScheme={flag}")["paper"] for flag in (1, 0)]
    assert papers == ["rgb(253, 253, 251)", "rgb(20, 23, 26)"]
