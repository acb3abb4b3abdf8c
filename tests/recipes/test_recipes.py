"""Recipes: the shipped ones, the schema, and what a mistake is told."""

import json
from pathlib import Path

import pytest

from halfulp.compress import plan_of
from halfulp.recipes import read_recipe, schema, shipped

NAMES = [
    "fp8",
    "fp8-kv",
    "mxfp4",
    "mxfp4-gptq",
    "mxfp8",
    "nvfp4",
    "nvfp4-gptq",
    "sparse-2:4",
    "w4a16-g128",
    "w4a16-gptq",
    "w8a8-int8",
]
LAYERS = {
    "model.embed_tokens.weight": (64, 256),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 512),
    "model.norm.weight": (256,),
    "lm_head.weight": (64, 256),
}


def test_the_shipped_recipes_are_the_ones_the_readme_names():
    assert [read_recipe(path)[0].name for path in shipped().values()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_touches_the_linear_layers_alone(name):
    recipe, identity = read_recipe(name)
    plan = plan_of(LAYERS, recipe.transform())
    assert [row.name for row in plan.rows if row.touched] == [n for n in LAYERS if "layers" in n]
    assert recipe.description
    assert identity["name"] == name
    assert len(identity["sha256"]) == 64


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_two_steps_and_a_sparsity_that_yaml_would_read_as_124(tmp_path):
    path = write(
        tmp_path,
        "name: both\nsteps:\n  - prune: {pattern: 2:4}\n  - quantize: {weights: int4:g64, ignore: ['*.down_proj']}\n",
    )
    plan = plan_of(LAYERS, read_recipe(path)[0].transform())
    actions = {row.name.split(".")[-2]: row.action for row in plan.rows}
    assert actions == {
        "embed_tokens": "keep",
        "q_proj": "2:4 + int4:g64",
        "down_proj": "2:4",
        "norm": "keep",
        "lm_head": "keep",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nsteps: []\n", "steps: List should have at least 1 item"),
        ("name: x\n", "steps is missing"),
        ("steps:\n  - prune: {pattern: '2:4'}\n", "name is missing"),
        (
            "name: x\nsteps:\n  - quantize: {weights: int4:g64, group: 64}\n",
            "unknown key steps.0.quantize.group; the keys here are targets, ignore, weights, activations, kv, static, ragged",
        ),
        (
            "name: x\nsteps:\n  - quantise: {}\n",
            "unknown key steps.0.quantise; the keys here are shrink, permute, rotate, smooth, awq, quantize, gptq, learn, mixed, attention, prune",
        ),
        ("name: x\nstep: []\nsteps: []\n", "unknown key step; the keys here are name, description, calibration, steps"),
        ("name: x\nsteps:\n  - quantize: {weights: mxpf4}\n", "steps.0.quantize.weights: cannot read 'mxpf4'"),
        ("name: x\nsteps:\n  - quantize: {weights: mxpf4}\n", "did you mean mxfp4"),
        ("name: x\nsteps:\n  - prune: {pattern: '4:2'}\n", "give N:M with 0 < N < M, such as 2:4"),
        (
            "name: x\nsteps:\n  - {}\n",
            "a step is one of shrink, permute, rotate, smooth, awq, quantize, gptq, learn, mixed, attention, prune; this one has none",
        ),
        (
            "name: x\nsteps:\n  - {prune: {pattern: 0.5}, quantize: {weights: int8:channel}}\n",
            "this one has quantize and prune",
        ),
        ("name: x\nsteps:\n  - quantize: {weights: int8:channel, ragged: pad}\n", "steps.0.quantize.ragged"),
        ("- a\n- b\n", "the recipe should be a mapping of name, description, calibration, steps"),
        ("name: [\n", "is no YAML"),
        ("name: x\nname: y\nsteps: []\n", "the key name stands twice"),
        ("", "the recipe should be a mapping"),
        ("name: !!python/object/apply:os.system ['true']\n", "is no YAML"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_choices(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="yaml") as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert message in " ".join(str(caught.value).split())


def test_an_unknown_recipe_lists_near_names():
    with pytest.raises(FileNotFoundError, match="no recipe 'w4a16g128'; did you mean w4a16-g128"):
        read_recipe("w4a16g128")


def test_the_published_schema_is_the_current_one():
    path = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(schema())), "run make schema"
