"""Any torch module: layers as matrices, folding, calibration in place, and that nothing is left behind by an error."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfulp.compress import chain, gptq, prune, quantize, rotate
from halfulp.compress.modules import (
    RoundInput,
    compress_module,
    fold_batch_norms,
    input_scale,
    layer_of,
    plan_module,
)
from halfulp.numerics import cast, decode, unpack

STATIC = quantize("int8:channel", "int8:tensor", static=True)
CONVOLUTIONS = [
    (nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), (2, 4, 9, 8)),
    (nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=4), (2, 4, 7, 6)),
    (nn.Conv2d(2, 3, (4, 1), padding="same"), (2, 2, 7, 6)),
    (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 5, 5)),
    (nn.Conv2d(2, 3, 2, padding=(2, 1), padding_mode="circular"), (2, 5, 5)),
    (nn.Conv1d(4, 6, 5, stride=2, padding=2, groups=2, padding_mode="replicate"), (3, 4, 11)),
    (nn.Conv1d(2, 3, 3, padding="valid"), (2, 9)),
]


class Residual(nn.Module):
    """Two normalized convolutions, one of them in groups and with a way around it, a depthwise one and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False, groups=2), nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, groups=8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = x + self.norm2(self.second(x))
        return self.classifier(self.depth(x).mean((2, 3)))


def images(count=6, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 1


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Residual()
    with torch.no_grad():
        for i in range(5):
            made(images(seed=i))
        for norm in (made.norm, made.norm2):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return made.eval()


def state(model):
    hooks = {name: list(m._forward_pre_hooks.values()) for name, m in model.named_modules()}
    kinds = {name: (type(m), m.training, "forward" in m.__dict__) for name, m in model.named_modules()}
    return {n: t.clone() for n, t in model.state_dict().items()}, hooks, kinds


def same(a, b):
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1:] == b[1:]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own copy
@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_a_convolution_is_its_matrix_over_its_vectors(module, shape):
    layer, x = layer_of(module), torch.randn(shape)
    vectors = torch.cat(list(layer.vectors(x)), 1)
    matrix = layer.matrix().reshape(layer.groups, -1, layer.shape[1])
    y = (vectors @ matrix.mT).permute(1, 0, 2).reshape(vectors.shape[1], -1)
    expected = (module(x) - module.bias.reshape(-1, *[1] * (module.weight.ndim - 2))).reshape(
        -1, module.weight.shape[0], *module(x).shape[layer.feature_axis + 1 :]
    )
    torch.testing.assert_close(y, expected.movedim(1, -1).reshape(y.shape), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fmt", ["int8:channel", "int4:g4:asym", "nf4:g8", "mxfp4", "nvfp4", "e4m3fn", "int8:tensor"])
def test_nearest_is_cast_of_the_matrix_and_the_report_packs_it(model, fmt):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = compress_module(model, quantize(fmt))
    for name, packed in report.packed().items():
        value = dict(model.named_parameters())[name]
        assert torch.equal(value, cast(before[name].flatten(1), fmt).reshape(value.shape))
        assert torch.equal(unpack(packed).reshape(value.shape), value)
    assert set(report.codes) == {"first.weight", "second.weight", "depth.weight"}
    assert report.nbytes[1] < report.nbytes[0]


@pytest.mark.parametrize("activations", ["int8:token", "mxfp8", "e4m3fn"])
def test_inputs_are_rounded_along_their_channels(activations):
    model = nn.Sequential(nn.Conv2d(40, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    x = torch.randn(2, 40, 4, 4)
    compress_module(model, quantize("int8:channel", activations))
    a = cast(x.movedim(1, -1).contiguous(), activations).movedim(-1, 1)
    y = F.conv2d(a.contiguous(), model[0].weight, model[0].bias).flatten(1)
    with torch.no_grad():
        torch.testing.assert_close(model(x), F.linear(cast(y.detach(), activations), model[2].weight, model[2].bias))


def test_gradients_pass_the_rounding():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    compress_module(model, STATIC, [torch.randn(9, 4)])
    x = torch.randn(3, 4, requires_grad=True)
    rounded = model(x)
    rounded.sum().backward()
    assert x.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(model(x), rounded)


def test_every_parameter_is_accounted_for(model):
    names = [name for name, _ in model.named_parameters()]
    report = compress_module(model, STATIC, [images()], bias_correction=True)
    rows = {row.name: row for row in report.plan.rows}
    assert list(rows)[: len(names)] == names
    assert set(rows) == {*names, *(name for name, _ in model.named_parameters())}
    assert all(row.touched or row.reason for row in rows.values())
    assert rows["norm2.weight"].reason == "folded into second"
    assert rows["second.bias"].reason == "added, for the folded normalization"
    assert rows["classifier.weight"].reason.startswith("the output head")
    assert "folded into first" in str(report)


def test_a_head_is_compressed_where_it_is_named_by_all_methods(model):
    every = gptq("int8:channel", "int8:tensor", static=True, targets=["linear", "classifier"])
    report = compress_module(model, every, [images()])
    assert report.results["classifier.weight"].facts["vectors"] == 6
    rest = compress_module(copy.deepcopy(Residual()), quantize("int4:g8", targets="classifier"))
    assert list(rest.codes) == ["classifier.weight"]
    plan = plan_module(Residual(), chain(quantize("int4:g8"), quantize("int8:channel", targets="classifier")))
    assert {row.name: str(row.weights) for row in plan.rows if row.touched}["classifier.weight"] == "int8:channel"


def test_a_vision_transformer_is_known_by_its_modules():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        before = model(x).logits
        report = compress_module(model, gptq("int8:channel", "int8:tensor", static=True), [{"pixel_values": x}])
        assert (model(x).logits - before).abs().max() < 0.05 * before.abs().max()
    touched = [row.name for row in report.plan.rows if row.touched]
    assert len(touched) == 13
    assert touched[0] == "vit.embeddings.patch_embeddings.projection.weight"
    assert all(report.results[name].facts["vectors"] in (80, 85) for name in touched)
    assert all(row.touched or row.reason for row in report.plan.rows)


def test_gptq_loses_less_of_a_convolution_than_nearest():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(8, 16, 3)), torch.randn(8, 8, 12, 12).cumsum(-1) / 4
    with torch.no_grad():
        y = model(x)
        losses = []
        for step in (quantize("int4:g24"), gptq("int4:g24")):
            one = copy.deepcopy(model)
            report = compress_module(one, step, [x[:4], x[4:]])
            losses.append(float((one(x) - y).square().sum()))
    assert losses[1] < 0.5 * losses[0]
    assert report.results["0.weight"].facts["vectors"] == 800


@pytest.mark.parametrize(
    "step",
    [
        gptq("int4:g6"),
        gptq("int8:channel:asym", order="static"),
        prune("2:4", by="sparsegpt"),
        chain(prune(0.5, by="wanda"), quantize("int4:g4")),
        gptq("nvfp4:tensor_scale=fp32"),
    ],
)
def test_a_group_of_a_convolution_is_a_convolution_of_its_own(step):
    torch.manual_seed(0)
    whole, x = nn.Conv2d(8, 6, 2, groups=2), torch.randn(5, 8, 6, 6)
    with torch.no_grad():  # a tensor's scale is of the whole: let both parts have the same largest magnitude
        whole.weight[0, 0, 0, 0] = whole.weight[3, 0, 0, 0] = 1.0
    parts = [nn.Conv2d(4, 3, 2) for _ in range(2)]
    for i, part in enumerate(parts):
        part.weight.data, part.bias.data = whole.weight.data[3 * i :][:3].clone(), whole.bias.data[3 * i :][:3].clone()
        compress_module(part, step, [x[:, 4 * i :][:, :4]])
    report = compress_module(whole, step, [x])
    assert torch.equal(whole.weight, torch.cat([part.weight for part in parts]))
    for codes in report.codes.values():
        assert torch.equal(decode(codes), whole.weight.flatten(1))


def test_depthwise_convolutions_fall_back_and_say_so(model):
    both = chain(prune(0.5, by="wanda"), gptq("int4:g8", targets="linear"))
    report = compress_module(model, both, [images()])
    row = next(row for row in report.plan.rows if row.name == "depth.weight")
    assert "depthwise: rounded to nearest, not by gptq and pruned by magnitude, not by wanda" in row.note
    assert report.results["depth.weight"].zeros == 36


def test_layers_are_calibrated_on_what_the_compressed_ones_before_them_give():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), [torch.randn(40, 16), torch.randn(30, 16)]
    step = gptq("int4:g8", "int8:tensor", static=True)
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    compress_module(one, step, x)
    compress_module(two[0], step, x)
    with torch.no_grad():
        compress_module(two[2], step, [two[:2](part) for part in x])
    assert torch.equal(one[2].weight, two[2].weight)
    assert torch.equal(one[2].input_scale, two[2].input_scale)
    with torch.no_grad():
        assert torch.equal(one(x[0]), two(x[0]))


def test_a_static_scale_travels_with_the_model(model):
    x = images()
    compress_module(model, STATIC, [x[:3], x[3:]])
    assert torch.equal(model.first.input_scale, input_scale([x], "int8:tensor"))
    assert model.first.input_scale.item() == pytest.approx(float(x.abs().max()) / 127, rel=0.01)
    assert "second.input_scale" in model.state_dict()
    with torch.no_grad():
        y = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), y)
            other.first.input_scale *= 2
            assert not torch.equal(other(x), y)


def test_clipping_by_percentile_and_by_least_error():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x[7] = 40.0
    scales = {clip: input_scale([x[:500], x[500:]], "int8:tensor", clip) for clip in ("amax", "mse", 99.0, 100)}
    assert torch.equal(scales["amax"], scales[100])
    third = x.abs().sort().values[989]  # 990 of 1000 are not above it
    assert torch.equal(scales[99.0], input_scale([third.reshape(1)], "int8:tensor"))

    def error(scale):
        return float(((x / scale).round().clip(-128, 127) * scale - x).square().sum())

    assert error(scales["mse"]) < min(error(scales["amax"]), error(scales[99.0]))
    with pytest.raises(ValueError, match="choose 'amax', 'mse' or a percentile above 50"):
        input_scale([x], "int8:tensor", 0.999)
    with pytest.raises(ValueError, match="60 % of the inputs are zero"):
        input_scale([torch.tensor([0.0, 0.0, 0.0, 1.0])], "int8:tensor", 60)


def test_the_bias_takes_up_the_shift_of_the_mean():
    torch.manual_seed(0)
    x = torch.rand(64, 6, 5, 5)
    for model in (nn.Conv2d(6, 4, 3, bias=False), nn.Conv2d(6, 4, 3, groups=2), nn.Linear(5, 4)):
        step = quantize("int3:channel", "int4:tensor", static=True)
        corrected, plain = copy.deepcopy(model), copy.deepcopy(model)
        compress_module(plain, step, [x[:30], x[30:]])
        compress_module(corrected, step, [x[:30], x[30:]], bias_correction=True)
        axes = (0, 1, 2) if isinstance(model, nn.Linear) else (0, 2, 3)
        with torch.no_grad():
            shifts = [(m(x) - model(x)).double().mean(axes).abs().max() for m in (plain, corrected)]
        assert shifts[1] < 1e-6 < 1e-3 < shifts[0]


def test_batch_norms_are_folded_where_they_alone_take_a_layers_output(model):
    x = images()
    with torch.no_grad():
        y = model(x)
        folds = fold_batch_norms(model, [x])
        assert [(f.layer, f.norm) for f in folds] == [("first", "norm"), ("second", "norm2")]
        assert (model(x) - y).abs().max() <= 1e-5 * y.abs().max()
    assert isinstance(model.norm2, nn.Identity)


class Uses(nn.Module):
    """A convolution whose output goes to its norm, and elsewhere too."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.norm, self.how = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), how
        self.norm.running_mean.fill_(1.0)

    def forward(self, x):
        y = self.layer(x)
        if self.how == "inplace":
            y.relu_()
        z = self.norm(y)
        if self.how == "again":
            z = self.norm(z)
        return {"residual": z + y, "view": z.sum() + y[0].sum()}.get(self.how, z)


@pytest.mark.parametrize("how", ["inplace", "again", "residual", "view"])
def test_batch_norms_stay_where_something_else_takes_the_output(how):
    model = Uses(how).eval()
    assert fold_batch_norms(model, [torch.randn(3, 2, 4)]) == ()
    report = compress_module(model, quantize("int8:channel"), [torch.randn(3, 2, 4)])
    assert report.folds == ()
    assert isinstance(model.norm, nn.BatchNorm1d)


def test_a_fold_that_changes_outputs_is_taken_back():
    class Both(Uses):
        def forward(self, x):
            y = self.layer(x)
            return {"features": y, "result": [self.norm(y)]}

    model = Both("").eval()
    before = state(model)
    with pytest.raises(ValueError, match="1 batch normalizations are not folded: outputs would change by"):
        fold_batch_norms(model, [torch.randn(3, 2, 4)])
    assert same(state(model), before)
    report = compress_module(model, quantize("int8:channel"), [torch.randn(3, 2, 4)])
    assert "are not folded: outputs would change by" in report.plan.notes[-1]
    assert "takes inputs to prove it on" in compress_module(Uses(""), quantize("int8:channel")).plan.notes[-1]


def test_whatever_is_raised_the_model_is_as_it_was(model):
    model.train()
    model.norm2.eval()
    before = state(model)
    bad = images()
    bad[2, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="first: activations with NaN or infinity"):
        compress_module(model, STATIC, [images(), bad], fold=False)
    with pytest.raises(ValueError, match="first: activations with NaN or infinity in batch 1 of the inputs"):
        compress_module(model, gptq("int4:g8"), [images(), bad], fold=False)

    assert same(state(model), before)
    with torch.no_grad():
        model.depth.weight[3, 0, 0, 0] = torch.inf
    before = state(model)
    with pytest.raises(ValueError, match=r"depth\.weight holds NaN or infinity"):
        compress_module(model, gptq("int4:g8", "int8:tensor", static=True), [images()], bias_correction=True)
    assert same(state(model), before)
    assert model.training


def test_modes_are_kept(model):
    model.train()
    model.norm.eval()
    compress_module(model, STATIC, [images()], fold=False)
    assert model.training
    assert not model.norm.training
    assert int(model.norm2.num_batches_tracked) == 5


def test_a_layer_that_is_never_reached(model):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if len(x) < 10 else self.b(x)

    x = torch.randn(5, 4)
    one = Branch()
    before = state(one)
    with pytest.raises(ValueError, match="b: no batch of the inputs reaches it, so its static activations have no"):
        compress_module(one, STATIC, [x])
    assert same(state(one), before)
    report = compress_module(one, gptq("int4:g4"), [x])
    assert "rounded to nearest" in report.results["b.weight"].facts["fallback"]
    # reached by the second batch only
    compress_module(Branch(), STATIC, [x, torch.randn(12, 4)])
    with pytest.raises(ValueError, match="a: no input other than zero was seen"):
        compress_module(Branch(), STATIC, [torch.zeros(5, 4), torch.randn(12, 4)])


def test_a_layer_that_runs_twice_is_calibrated_on_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(20, 4)
    with torch.no_grad():
        seen = torch.cat([x, model.a(x)])
    report = compress_module(model, gptq("int8:channel", "int8:tensor", static=True), [x])
    assert report.results["a.weight"].facts["vectors"] == 40
    assert "runs several times a pass" in report.results["a.weight"].facts["fallback"]
    assert torch.equal(model.a.input_scale, input_scale([seen], "int8:tensor"))
    assert len(model.a._forward_pre_hooks) == len(model.b._forward_pre_hooks) == 1


def test_parameters_that_are_no_layers_alone_are_kept_with_a_reason():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 4),
            "tied": nn.Linear(4, 8, bias=False),
            "attention": nn.MultiheadAttention(4, 2),
            "turned": nn.ConvTranspose2d(4, 4, 2),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "embed_patches": nn.Linear(4, 4),
        }
    )
    model["tied"].weight = model["embedding"].weight
    plan = plan_module(model, quantize("int8:channel"))
    reasons = {row.name: row.reason for row in plan.rows}
    assert [row.name for row in plan.rows if row.touched] == ["embed_patches.weight"]
    assert reasons["embedding.weight"] == "shared by embedding.weight and tied.weight"
    assert "never calls the layer" in reasons["attention.out_proj.weight"]
    assert reasons["turned.weight"].startswith("in a ConvTranspose2d")
    assert reasons["normed.parametrizations.weight.original0"].startswith("parametrized")
    for target in ("embedding", "attention.out_proj", "re:.*original1"):
        with pytest.raises(ValueError, match="cannot be compressed, it is"):
            plan_module(model, quantize("int8:channel", targets=target))


def test_torchs_own_transformer_layers_run_through_the_hooks():
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        before = model(x)
        report = compress_module(model, quantize("int4:channel", "int4:tensor", static=True), [x])
        assert set(report.codes) == {"linear1.weight", "linear2.weight"}
        rounded = model(x)
        for layer in (model.linear1, model.linear2):
            layer.input_scale *= 1e6
        assert not torch.equal(model(x), rounded)
        assert not torch.equal(before, rounded)


def test_masks_stay_through_later_steps(model):
    steps = chain(
        prune("2:4", by="sparsegpt", ignore=["first", "depth"]), gptq("int8:channel", "int8:tensor", static=True)
    )
    compress_module(model, steps, [images()])
    groups = model.second.weight.flatten(1).unflatten(1, (-1, 4))
    assert int((groups != 0).sum(-1).max()) == 2
    with pytest.raises(ValueError, match="2:4 sparsity needs 27 inputs to divide by 4"):
        compress_module(Residual(), prune("2:4"))


def test_numbers_that_the_module_cannot_hold_are_told():
    model = nn.Linear(16, 8).bfloat16()
    report = compress_module(model, quantize("int8:channel"))
    assert report.results["weight"].facts["held"] == "rounded to bfloat16 in the module"
    exact = compress_module(nn.Linear(16, 8).bfloat16(), quantize("mxfp4"))
    assert "held" not in exact.results["weight"].facts


def test_tensors_that_share_a_scale_do_so_here_too():
    model = nn.ModuleDict({name: nn.Linear(16, 4) for name in ("query", "key", "value", "dense")})
    most = max(float(model[name].weight.detach().abs().max()) for name in ("query", "key", "value"))
    report = compress_module(model, quantize("e4m3fn:tensor"))
    scales = {decode(report.codes[f"{name}.weight"].scale, "fp32").item() for name in ("query", "key", "value")}
    assert scales == {
        decode(compress_module(_one(most), quantize("e4m3fn:tensor")).codes["weight"].scale, "fp32").item()
    }


def _one(value):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    return model


def test_how_batches_reach_the_model():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x, shift=0.0):
            return self.layer(x + shift)

    x, step = torch.randn(7, 4), gptq("int8:channel")
    counts = []
    for batches in ([x], [(x, 1.0)], [{"x": x, "shift": 2.0}], iter([[x], [x]])):
        counts.append(compress_module(Two(), step, batches).results["layer.weight"].facts["vectors"])
    labelled = compress_module(Two(), step, [(x, torch.zeros(7))], forward=lambda model, batch: model(batch[0]))
    assert [*counts, labelled.results["layer.weight"].facts["vectors"]] == [7, 7, 7, 14, 7]


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (gptq("int4:g8"), {}, "first.weight needs a calibration: give inputs"),
        (STATIC, {}, "first.weight needs a calibration"),
        (quantize("int8:channel"), {"bias_correction": True}, "bias_correction needs a calibration"),
        (quantize("int8:channel", kv="int8:token"), {}, "leave kv and attention out"),
        (rotate(), {}, "does not work tensor by tensor"),
        (chain(rotate(), quantize("int8:channel")), {}, "does not work tensor by tensor"),
        ("int8", {}, "does not work tensor by tensor"),
        (quantize("int8:channel", targets="frist"), {}, "near names: first"),
        (quantize("int8:channel", targets="norm"), {}, "which is no matrix"),
        (quantize("int8:channel"), {"inputs": images()}, "inputs is one tensor"),
        (quantize("int8:channel"), {"inputs": []}, "inputs has no batch"),
        (quantize("int8:channel"), {"clip": "max"}, "choose 'amax', 'mse' or a percentile"),
        (quantize("int8:channel", "e4m3fn:1x8"), {}, "inputs of a convolution have no tiles"),
    ],
)
def test_what_cannot_be_done_is_said(step, options, words):
    model = Residual()
    before = state(model)
    with pytest.raises(ValueError, match=words):
        compress_module(model, step, **options)
    assert same(state(model), before)


def test_inputs_are_not_rounded_twice(model):
    compress_module(model, quantize("int8:channel", "int8:token"))
    assert sum(isinstance(hook, RoundInput) for m in model.modules() for hook in m._forward_pre_hooks.values()) == 3
    with pytest.raises(ValueError, match="its inputs are rounded already"):
        compress_module(model, STATIC, [images()])
    compress_module(model, quantize("int4:g8"))


def test_parameters_without_data_are_refused():
    with pytest.raises(ValueError, match="has no shape yet"):
        compress_module(nn.LazyLinear(4), quantize("int8:channel"))
    with pytest.raises(ValueError, match="meta device"):
        compress_module(nn.Linear(4, 4, device="meta"), quantize("int8:channel"))
    with pytest.raises(ValueError, match="no linear layers"):
        compress_module(nn.LayerNorm(4), quantize("int8:channel"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_types(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(dtype), torch.randn(9, 2, 4, 4)
    with torch.no_grad():
        y = model(x.to(dtype))
        step = chain(prune(0.1, by="sparsegpt"), gptq("int8:channel", "int8:tensor", static=True))
        compress_module(model, step, [x.to(dtype)], clip="mse", bias_correction=True)
        assert model(x.to(dtype)).dtype == dtype
        assert (model(x.to(dtype)) - y).norm() < 0.1 * y.norm()


def test_empty_batches_say_nothing():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), torch.randn(9, 2, 4, 4)
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    step = gptq("int4:g6", "int8:tensor", static=True)
    compress_module(one, step, [x[:0], x], bias_correction=True)
    compress_module(two, step, [x], bias_correction=True)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    report = compress_module(model, gptq("int4:g6"), [x[:0]], bias_correction=True)
    assert "rounded to nearest" in report.results["0.weight"].facts["fallback"]


def test_least_error_on_many_inputs_is_of_a_part_of_them():
    x = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    few, many = (input_scale([part], "int4:tensor", "mse").item() for part in (x[: 1 << 18], x))
    assert few == pytest.approx(many, rel=0.03)
    assert input_scale([x], "int4:tensor", "mse").item() == many


def test_propagation_makes_good_what_the_layers_before_did():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 2, groups=2), nn.Flatten(), nn.Linear(72, 6))
    x = torch.randn(300, 4, 6, 6).cumsum(-1) / 2
    losses = []
    with torch.no_grad():
        y = model(x)
        for propagate in (0.0, 1.0):
            one = copy.deepcopy(model)
            compress_module(one, gptq("int3:channel", propagate=propagate), [x[:150], x[150:]])
            losses.append(float((one(x) - y).square().mean()))
    assert losses[1] < 0.9 * losses[0]


def test_a_first_layer_has_nothing_to_make_good(model):
    x, other = [images(), images(4, 2)], copy.deepcopy(model)
    only = dict(targets=["first"])
    compress_module(model, gptq("int4:g9", propagate=1.0, **only), x)
    compress_module(other, gptq("int4:g9", **only), x)
    assert torch.equal(model.first.weight, other.first.weight)
