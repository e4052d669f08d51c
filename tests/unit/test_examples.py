"""The examples, the notebook and the benchmarks run, with warnings as errors."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_tiered_cache.bench import longcontext

ROOT = Path(__file__).parents[2]
# Ignore warnings of other packages at their import, which these examples do not concern.
_IGNORED = ("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::SyntaxWarning")


def _run(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *_IGNORED, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))])
def test_notebook_runs(name: str) -> None:
    notebook = json.loads((ROOT / "notebooks" / name).read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "identical" in _run("\n".join(cells))


def test_manager_example_runs() -> None:
    code = f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'manager.py')!r}, run_name='__main__')"
    assert "still equal" in _run(code)


def test_device_map_example_runs() -> None:
    """Layers are in several places, and accelerate loads the offloaded ones to compute them."""
    code = f"""
import runpy
from accelerate.hooks import AlignDevicesHook

brought_in, pre_forward = set(), AlignDevicesHook.pre_forward

def noting(hook, module, *arguments, **options):
    if hook.offload and all(weight.is_meta for weight in module.parameters(recurse=False)):
        brought_in.add(module)
    return pre_forward(hook, module, *arguments, **options)

AlignDevicesHook.pre_forward = noting
runpy.run_path({str(ROOT / "examples" / "device_map.py")!r}, run_name="__main__")
print(f"{{len(brought_in)}} modules were brought in")
"""
    output = _run(code)
    assert "The tokens are identical, all 24." in output
    layers = re.findall(r"^ +\d+  (cpu|disk|\d+) +(\S+)$", output, re.MULTILINE)
    kept_on = [place for place, _ in layers]
    assert len(layers) == 16 and len(set(kept_on)) > 1
    first = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert all(window == (f"cuda:{place}" if place.isdigit() else first) for place, window in layers)
    modules_per_layer = 9  # four projections of the attention, three of the MLP, two norms
    offloaded = sum(place == "disk" or (place == "cpu" and first != "cpu") for place in kept_on)
    assert offloaded > 0
    assert int(re.findall(r"(\d+) modules were", output)[0]) >= modules_per_layer * offloaded
    below = re.findall(r"^(?:host|L1|L2) +([\d,]+)", output, re.MULTILINE)
    assert any(tokens != "0" for tokens in below), "everything stayed in the windows"


def test_overlap_benchmark_prints_json_last() -> None:
    code = (
        "import sys, runpy; sys.argv = ['bench', 'overlap', '--context', '4096', '--prompt', '1500', "
        "'--steps', '1', '--runs', '1', '--prefill-runs', '1']; "
        "runpy.run_module('hf_tiered_cache.bench', run_name='__main__')"
    )
    result = json.loads(_run(code).splitlines()[-1])
    assert all(result[case]["ratio"] > 0 for case in ("overlap, 1", "decode", "prefill"))


def test_longcontext_benchmark_says_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is far too short for its first limit reports that; its outputs are exact and nothing grows."""
    arguments = argparse.Namespace(model_tokens=3000, manager_tokens=8192, chunk=512, steps=2, device="cpu")
    with pytest.raises(SystemExit, match="less than 5 %"):
        longcontext.run(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in ("model", "manager"):
        assert "outputs equal the reference" not in result[part]["missed"]
        assert result[part]["max_error"] > 0


def test_overhead_benchmark_prints_json_last() -> None:
    code = (
        "import sys, runpy; sys.argv = ['bench', 'overhead', '--context', '200', '--steps', '2', '--pairs', '1', "
        "'--layers', '2']; runpy.run_module('hf_tiered_cache.bench', run_name='__main__')"
    )
    result = json.loads(_run(code).splitlines()[-1])
    assert result["fits"]["step_ratio"] > 0 and result["tiers"]["step_ratio"] > 0
