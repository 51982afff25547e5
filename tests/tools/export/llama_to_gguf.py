"""A converter for one architecture, called as llama.cpp's is: what tests of `export gguf` run where that is not there.

It takes Llama alone, writes no tokenizer, and refuses others in llama.cpp's words. `--wrong` in the model's name leaves
the query weights as transformers has them, not turned as llama.cpp's rotation wants them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gguf
import numpy
from safetensors import safe_open

KINDS = {"f32": numpy.float32, "f16": numpy.float16}


def turned(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rotary halves as pairs, which is how llama.cpp rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("model", type=Path)
    for name in ("--outfile", "--outtype", "--model-name"):
        words.add_argument(name)
    said = words.parse_args()
    config = json.loads((said.model / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        sys.exit(f"ERROR:hf-to-gguf:Model {config['architectures'][0]} is not supported")
    writer = gguf.GGUFWriter(said.outfile, "llama")
    heads, groups, blocks = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks)
    for file in sorted(said.model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                weight = opened.get_tensor(name).float().numpy()
                for part, count in (("q_proj", heads), ("k_proj", groups)):
                    if part in name and "wrong" not in said.model_name:
                        weight = turned(weight, count)
                kind = KINDS[said.outtype] if weight.ndim > 1 else numpy.float32
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
