"""The package names the device of every tensor that it makes: `torch.set_default_device` is for the model's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import hf_tiered_cache

PACKAGE = Path(hf_tiered_cache.__file__).parent

# Functions that make a tensor from scratch. Those that ignore the default device, such as `from_numpy` and
# `frombuffer`, are left out: tests/generation/test_default_device.py would fail if that changed.
FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_permuted",
        "empty_quantized",
        "empty_strided",
        "eye",
        "full",
    ),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("tensor", "tril_indices", "triu_indices", "zeros", "fftfreq", "rfftfreq", "nested_tensor"),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    *("sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor"),
    *("sparse_csc_tensor", "sparse_csr_tensor"),
}
# These appear in annotations as well, so only calls count.
CLASSES = {
    "Generator",
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "LongTensor",
    "IntTensor",
    "ByteTensor",
    "BoolTensor",
}


def without_device(source: str) -> list[int]:
    """Return the lines that call or pass on a factory of torch without a device by name."""
    tree = ast.parse(source)
    modules, names = {"torch"}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: alias.name for alias in node.names}

    def factory(node: ast.AST) -> str | None:
        """Return the name in torch of the factory to which an expression refers, if it is one."""
        if isinstance(node, ast.Name):
            name = names.get(node.id)
        elif isinstance(node, ast.Attribute):
            name, root = node.attr, node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if not isinstance(root, ast.Name) or root.id not in modules | set(names):
                return None
        else:
            return None
        return name if name in FACTORIES | CLASSES else None

    called, named = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called.add(node.func)
            devices = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
            devices += node.args[:1] * (factory(node.func) == "Generator")
            if any(not isinstance(device, ast.Constant) or device.value for device in devices):
                named.add(node.func)
    found = [node for node in ast.walk(tree) if factory(node) in FACTORIES and node not in named]
    found += [node for node in called - named if factory(node) in CLASSES]
    return sorted(node.lineno for node in found)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_factories_name_their_device(path: Path) -> None:
    assert not without_device(path.read_text()), f"{path}: pass device= (the CPU's, or that of another tensor)"


@pytest.mark.parametrize(
    "snippet",
    [
        "torch.empty(3)",
        "torch.empty(3, dtype=torch.uint8, pin_memory=True)",
        "torch.arange(5, device=None)",
        "import torch as t\nt.zeros(2)",
        "from torch import full as filled\nfilled(2, 0)",
        "torch.fft.fftfreq(8)",
        "list(map(torch.tensor, rows))",
        "make = torch.ones",
        "torch.randn(2, **options)",
        "torch.Tensor([1.0])",
        "torch.Generator()",
        "def f():\n    return [torch.as_tensor(x) for x in y]",
    ],
)
def test_a_factory_without_a_device_is_found(snippet: str) -> None:
    assert len(without_device(snippet)) == 1


@pytest.mark.parametrize(
    "snippet",
    [
        "torch.empty(3, device='cpu')",
        "np.empty(3)",
        "states.new_empty(3)",
        "torch.empty_like(states)",
        "torch.from_numpy(array)",
        "def f(x: torch.Tensor, g: torch.Generator) -> torch.Tensor: ...",
        "torch.Generator('cpu')",
        "isinstance(x, torch.Tensor)",
        "rows.tensor(key)",
        "range(3)",
    ],
)
def test_what_is_no_factory_or_names_a_device_is_not(snippet: str) -> None:
    assert without_device(snippet) == []


def test_the_list_of_factories_is_whole() -> None:
    """The list has all functions to which this version of torch gives a default device."""
    names = {function.__name__.removeprefix("fft_") for function in _device_constructors()}
    assert names <= FACTORIES
