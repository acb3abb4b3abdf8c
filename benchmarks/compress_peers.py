"""Other tools on the same model and tokens: FUNCTION MODEL IDS OUT, run by compress.py in a Python that has them.

MODEL: a folder in float32; IDS: the calibration's token ids, a list of lists in JSON. OUT: the weights that the tool
made, decoded to float32, under the names of the parameters. OUT.used: CPU seconds and peak memory.
"""

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def _model(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _linears(model):
    found = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    found.pop("lm_head.weight", None)
    return found


# llm-compressor ---------------------------------------------------------------------------------------------------


def _oneshot(folder, ids, modifier):
    from datasets import Dataset
    from llmcompressor import oneshot

    model = _model(folder)
    data = None
    if ids is not None:
        data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    more = {"dataset": data, "num_calibration_samples": len(ids), "max_seq_length": len(ids[0])} if data else {}
    oneshot(model=model, recipe=modifier, **more)
    return model


def _decoded(model):
    """The weights that compressed-tensors' wrapped modules compute with."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    result = {}
    for name, module in _linears(model).items():
        scheme = getattr(module, "quantization_scheme", None)
        weight = module.weight.data
        if scheme is not None and scheme.weights is not None:
            weight = fake_quantize(
                weight,
                scale=module.weight_scale,
                zero_point=getattr(module, "weight_zero_point", None),
                global_scale=getattr(module, "weight_global_scale", None),
                args=scheme.weights,
            )
        result[name] = weight.float()
    return result


def _groups(bits=4, size=64):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def llmcompressor_gptq(folder, ids):
    """GPTQ, groups of 64."""
    from llmcompressor.modifiers.quantization import GPTQModifier

    return _decoded(_oneshot(folder, ids, GPTQModifier(**_groups())))


def llmcompressor_awq(folder, ids):
    """AWQ, groups of 64."""
    from llmcompressor.modifiers.awq import AWQModifier

    return _decoded(_oneshot(folder, ids, AWQModifier(**_groups())))


def _nearest(folder, scheme):
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return _decoded(_oneshot(folder, None, QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])))


def llmcompressor_nvfp4(folder, ids):
    """NVFP4 weights."""
    return _nearest(folder, "NVFP4A16")


def llmcompressor_mxfp4(folder, ids):
    """MXFP4 weights."""
    return _nearest(folder, "MXFP4A16")


def _sparse(folder, ids, kind, mask):
    from llmcompressor.modifiers import pruning

    modifier = getattr(pruning, kind)(sparsity=0.5, mask_structure=mask, targets=["Linear"], ignore=["re:.*lm_head"])
    return _decoded(_oneshot(folder, ids, modifier))


def llmcompressor_sparse24(folder, ids):
    """SparseGPT, 2:4."""
    return _sparse(folder, ids, "SparseGPTModifier", "2:4")


def llmcompressor_sparse50(folder, ids):
    """SparseGPT, half."""
    return _sparse(folder, ids, "SparseGPTModifier", "0:0")


def llmcompressor_wanda50(folder, ids):
    """Wanda, half."""
    return _sparse(folder, ids, "WandaPruningModifier", "0:0")


# torchao ----------------------------------------------------------------------------------------------------------


def _torchao(folder, config, dtype=torch.float32):
    from torchao.quantization import quantize_

    model = _model(folder, dtype)
    head = model.lm_head
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and module is not head)
    return {name: module.weight.dequantize().float() for name, module in _linears(model).items()}


def torchao_int4(folder, ids):
    """int4 weights, groups of 64."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return _torchao(folder, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)))


def torchao_int8(folder, ids):
    """int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(folder, Int8WeightOnlyConfig())


def torchao_mxfp4(folder, ids):
    """MXFP4 weights, its default scale rule."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    model = _model(folder)
    result = {}
    for name, module in _linears(model).items():
        made = MXTensor.to_mx(module.weight.data.bfloat16(), torch.float4_e2m1fn_x2, 32)
        result[name] = made.dequantize(torch.float32)
    return result


# GPTQModel --------------------------------------------------------------------------------------------------------


def gptqmodel_gptq(folder, ids):
    """GPTQ, groups of 64."""
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(folder, QuantizeConfig(bits=4, group_size=64, sym=True))
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids], batch_size=1)
    result = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            result[f"{name}.weight"] = module.dequantize_weight().T.float().contiguous()
    return result


def main():
    """Run one function."""
    function, folder, ids, out = sys.argv[1:]
    torch.set_num_threads(1)
    rows = json.loads(Path(ids).read_text())
    weights = globals()[function](folder, rows)
    used = {"cpu_s": time.process_time(), "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, out)
    used["version"] = version(function.split("_")[0])
    Path(f"{out}.used").write_text(json.dumps(used))


if __name__ == "__main__":
    main()
