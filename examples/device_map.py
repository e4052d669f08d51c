"""A model that accelerate spreads over devices, with DynamicCache and with TieredCache: the tokens are the same.

    python examples/device_map.py                             # a small random Llama, over all that the machine has
    python examples/device_map.py --model Qwen/Qwen2.5-7B-Instruct

`device_map="auto"` fills the GPUs first, then host memory, then the disk. Here `max_memory` is so low that each of
them gets some layers; without it, accelerate uses all available memory. The window of a layer is on the device
that computes it. Layers kept in host memory or on disk are computed on the first GPU, or on the CPU if there is
none.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import transformers
from accelerate.utils import compute_module_sizes, get_max_memory
from packaging.version import Version
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_tiered_cache import TieredCache

# transformers 5.24 renamed generate's argument.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub or a directory; default: a small random one")
    name = parser.parse_args().model
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="device-map-") as directory:
        model = load_spread(name or save_random_llama(f"{directory}/model"), f"{directory}/offloaded")
        prompt = torch.randint(model.config.get_text_config().vocab_size, (1, 500)).to(model.device)
        expected = generate(model, prompt, DynamicCache(config=model.config))
        with TieredCache(config=model.config, window_tokens=128, block_tokens=32) as cache:
            found = generate(model, prompt, cache)
            kept_on = where_layers_are_kept(model)
            print("layer  kept on  window on")
            for layer_idx, layer in enumerate(cache.layers):
                print(f"{layer_idx:5}  {kept_on[layer_idx]!s:7}  {layer.device}")
            print(f"\n{cache.stats()}\n")
    if found != expected:
        raise SystemExit("FAILED: TieredCache and DynamicCache gave different tokens.")
    print(f"The tokens are identical, all {len(found)}.")


def load_spread(name: str, offload_folder: str) -> Any:
    """Load a model with at most an equal share on each GPU and in host memory, and the rest on disk."""
    memory = get_max_memory()  # free bytes by GPU, and those of the host as "cpu"
    model_bytes = compute_module_sizes(AutoModelForCausalLM.from_pretrained(name, device_map="meta"))[""]
    max_memory = {device: min(free, model_bytes // (len(memory) + 1)) for device, free in memory.items()}
    return AutoModelForCausalLM.from_pretrained(
        name, device_map="auto", max_memory=max_memory, offload_folder=offload_folder
    )


def where_layers_are_kept(model: Any) -> dict[int, int | str]:
    """Return for each layer the place of its weights: the number of a GPU, "cpu" or "disk"."""
    kept_on = {}
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx"):  # attention of a layer; the map lists it, or a module around it
            holder = max((key for key in model.hf_device_map if f"{name}.".startswith(f"{key}.")), key=len)
            kept_on[module.layer_idx] = model.hf_device_map[holder]
    return kept_on


def generate(model: Any, prompt: torch.Tensor, cache: DynamicCache) -> list[int]:
    """Return the new tokens of greedy decoding."""
    options = {CACHE_ARGUMENT: cache, "attention_mask": torch.ones_like(prompt)}
    output = model.generate(prompt, **options, max_new_tokens=24, do_sample=False)
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


def save_random_llama(directory: str) -> str:
    """Write a model with 16 layers of random weights, 4 MB, and return its directory."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
