"""torchao's quantize_ with our formats, and our codes in torchao's tensors and kernels."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfulp.compress import gptq, quantize
from halfulp.compress.modules import compress_module
from halfulp.compress.torchao import FormatTensor, halfulp_config, to_torchao, torchao_linear
from halfulp.numerics import cast, decode, encode

try:
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.workflows import Int8Tensor
except ImportError:
    quantize_ = None


def test_without_torchao_it_says_what_to_install():
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "from halfulp.compress.torchao import halfulp_config, to_torchao\n"
        "from halfulp.numerics import encode\n"
        "import torch\n"
        "for call in (lambda: halfulp_config('int8:channel'), lambda: to_torchao(encode(torch.ones(2, 2), 'int8:channel'))):\n"
        "    try:\n"
        "        call()\n"
        "    except ImportError as error:\n"
        "        assert 'pip install torchao' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no ImportError')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture(autouse=True)
def _present(request):
    if quantize_ is None and request.function is not test_without_torchao_it_says_what_to_install:
        pytest.skip("torchao 0.16 or later is not installed: pip install torchao")


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8, bias=False)).to(dtype)


FORMATS = ["int4:g64", "int4:g32:asym", "int8:channel", "mxfp4", "nvfp4", "e4m3fn:tensor", "nf4:g32", "e3m2", "bf16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_puts_our_formats_on_linear_layers(fmt, dtype):
    one, x = model(dtype), torch.randn(3, 5, 96, dtype=dtype)
    plain = copy.deepcopy(one)
    quantize_(one, halfulp_config(fmt, "int8:token"))
    for i in (0, 2):
        expected = cast(plain[i].weight.detach().float(), fmt).to(dtype)
        assert isinstance(one[i].weight, FormatTensor)
        assert torch.equal(one[i].weight.dequantize(), expected)
        plain[i].weight.data = expected
    with torch.no_grad():
        y = F.linear(cast(x, "int8:token"), plain[0].weight, plain[0].bias).relu()
        assert torch.equal(one(x), F.linear(cast(y, "int8:token"), plain[2].weight))


def test_a_weight_is_packed():
    one = model()
    quantize_(one, halfulp_config("int4:g32"))
    weight = one[0].weight
    assert weight.shape == (64, 96)
    assert weight.packed.nbytes == 64 * (48 + 6)
    assert repr(weight) == "FormatTensor(int4:g32, shape=(64, 96), dtype=torch.float32, device=cpu)"


def test_a_quantized_model_is_copied_stored_and_cast():
    one, x = model(), torch.randn(4, 96)
    quantize_(one, halfulp_config("nvfp4", "mxfp8"))
    with torch.no_grad():
        y = one(x)
        assert torch.equal(copy.deepcopy(one)(x), y)
        file = io.BytesIO()
        torch.save(one.state_dict(), file)
        file.seek(0)
        other = model()
        other.load_state_dict(torch.load(file, weights_only=True), assign=True)
        assert torch.equal(other(x), y)
        half = copy.deepcopy(one).bfloat16()
        assert half[0].weight.dtype == torch.bfloat16
        assert torch.equal(half[0].weight.dequantize(), one[0].weight.dequantize().bfloat16())
        assert half(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(one[0].weight.detach().clone().dequantize(), one[0].weight.dequantize())
    with pytest.raises(ValueError, match="goes to floating-point dtypes"):
        one[0].weight.to(torch.int8)


def test_torchao_says_which_layers():
    one = model()
    quantize_(one, halfulp_config("int8:channel"), filter_fn=lambda module, name: name == "2")
    assert [isinstance(one[i].weight, FormatTensor) for i in (0, 2)] == [False, True]


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "int8:channel", "Conv2d is no linear layer"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "int8:chanel", "did you mean channel"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), None, "give the format of the weights"),
    ],
)
def test_what_cannot_be_done_is_said(make, config, words):
    with pytest.raises(ValueError, match=words):
        quantize_(make(), halfulp_config(config), filter_fn=lambda module, name: name == "0")


def test_broken_and_quantized_weights_are_refused():
    one = model()
    with torch.no_grad():
        one[0].weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"shape \[64, 96\] holds NaN or infinity"):
        quantize_(one, halfulp_config("int8:channel"))
    one = model()
    quantize_(one, halfulp_config("int8:channel"))
    with pytest.raises(ValueError, match="a FormatTensor already"):
        quantize_(one, halfulp_config("int8:channel"))


INTEGERS = [
    ("int8:channel", None),
    ("int8:tensor", None),
    ("int8:g32", None),
    ("int4:g64", None),
    ("int4:channel", "int8"),
    ("int3:g32", None),
    ("int2:g32", None),
    ("int8n:channel", "int8"),
    ("int8:channel:asym", None),
    ("int4:g32:asym", "intx"),
    ("uint4:g32:asym", None),
    ("uint8:channel:asym", None),
    ("uint8:channel:zero_point=128", None),
    ("int4:g32:scale=e8m0:rule=floor", None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fmt", "kernel"), INTEGERS)
def test_torchao_finds_the_same_numbers_in_our_codes(fmt, kernel, dtype):
    torch.manual_seed(0)
    codes, bias = encode(torch.randn(48, 128), fmt), torch.randn(48).to(dtype)
    layer = torchao_linear(codes, bias, kernel=kernel, dtype=dtype)
    weight = decode(codes).to(dtype)
    assert torch.equal(layer.weight.dequantize(), weight)
    x = torch.randn(2, 7, 128).to(dtype)
    with torch.no_grad():
        y, expected = layer(x), F.linear(x.double(), weight.double(), bias.double())
    # the rounding of sums of 128 products, and, in torchao's Int8Tensor, of products before they are scaled
    share = (y.double() - expected).abs().max() / expected.abs().max()
    assert share < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("fmt", ["int8:channel", "int8:tensor", "int4:channel"])
def test_int8_products_are_ours_of_torchaos_inputs(fmt):
    from torchao.quantization import PerRow

    torch.manual_seed(0)
    codes, x = encode(torch.randn(48, 128), fmt), torch.randn(7, 128)
    layer = torchao_linear(codes, kernel="int8", activations="int8")
    inputs = Int8Tensor.from_hp(x, PerRow()).dequantize()
    expected = F.linear(inputs.double(), decode(codes).double())
    share = (layer(x).detach().double() - expected).abs().max() / expected.abs().max()
    assert share < 3e-7
    assert (F.linear(x, decode(codes)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_int4_kernel_multiplies_by_our_numbers(group):
    torch.manual_seed(0)
    codes = encode(torch.randn(64, 256), f"int4:g{group}")
    exact = torchao_linear(codes, kernel="int4")(torch.eye(256)).detach()
    assert torch.equal(exact.T, decode(codes))
    layer, x = torchao_linear(codes, kernel="int4", dtype=torch.bfloat16), torch.randn(5, 256).bfloat16()
    expected = F.linear(x.double(), decode(codes).double())
    assert (layer(x).detach().double() - expected).abs().max() < 2**-8 * expected.abs().max()


@pytest.mark.parametrize(
    ("fmt", "options", "words"),
    [
        ("mxfp4", {}, "e2m1 is no integer"),
        ("nvfp4", {}, "no integer"),
        ("int8:g16:tensor_scale=fp32:scale=e4m3fn", {}, "its scales have a scale"),
        ("int8:16x16", {}, "it has tiles"),
        ("int8:channel:axis=0", {}, "its blocks lie along the outputs"),
        ("int4:g48", {}, "48 does not divide 128"),
        ("uint8:channel", {}, "reach 255"),
        ("fixed8.2:channel", {}, "no integer"),
        ("int8:channel:asym", {"kernel": "int8"}, "zero points"),
        ("int8:g32", {"kernel": "int8"}, "one scale a channel"),
        ("int4:g16", {"kernel": "int4"}, "groups of 32, 64, 128, 256"),
        ("int4:g32:asym", {"kernel": "int4"}, "with zero points"),
        ("int8:g32", {"kernel": "int4"}, "8 bits in blocks of 1 x 32"),
        ("int4:g32:scale=fp32", {"kernel": "int4", "dtype": torch.bfloat16}, "scales in torch.bfloat16 are not those"),
        ("int4:g32", {"kernel": "int4", "activations": "int8"}, "leave activations out"),
        ("int8:channel", {"kernel": "int16"}, "choose 'int8', 'intx', 'int4'"),
        ("int8:channel", {"activations": "int4"}, "torchao rounds inputs to 'int8'"),
        ("int8:channel", {"dtype": torch.float64}, "choose torch.float32"),
    ],
)
def test_what_has_no_place_in_torchao_is_said(fmt, options, words):
    with pytest.raises(ValueError, match=words):
        to_torchao(encode(torch.randn(48, 128), fmt), **options)


def test_other_things_than_codes_are_refused():
    for wrong in (torch.ones(2, 2), encode(torch.ones(2, 2).numpy(), "int8:channel")):
        with pytest.raises(ValueError, match="takes the Quantized of a torch tensor"):
            to_torchao(wrong)
    for shape in ((0, 4), (4,)):
        with pytest.raises(ValueError, match=r"it is empty|a weight has two axes"):
            to_torchao(encode(torch.ones(shape), "int8:channel"))
    with pytest.raises(ValueError, match=r"the bias has shape \[3\], expected \[2\]"):
        torchao_linear(encode(torch.ones(2, 2), "int8:channel"), torch.ones(3))


@pytest.mark.parametrize("step", [quantize("int8:channel"), gptq("int4:g32")])
def test_a_compressed_module_runs_in_torchao(step):
    one, x = model(), torch.randn(9, 96)
    report = compress_module(one, step, [torch.randn(80, 96)])
    with torch.no_grad():
        y = one(x)
        for i in (0, 2):
            one[i] = torchao_linear(report.codes[f"{i}.weight"], one[i].bias)
        assert (one(x) - y).abs().max() < 1e-6 * y.abs().max()
