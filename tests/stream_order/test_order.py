"""Every access is ordered, in every scenario."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .model import GPU, CudaModel
from .scenarios import Form, Scenario

FORMS: list[Form] = ["gather", "stream"]


@pytest.fixture
def cuda() -> Iterator[CudaModel]:
    with pytest.MonkeyPatch.context() as patch:
        yield CudaModel(patch)


@pytest.fixture
def scenario(cuda: CudaModel, tmp_path: Path) -> Iterator[Scenario]:
    """A scenario that must report no violation, including its clean-up."""
    scenario = Scenario(cuda, tmp_path)
    yield scenario
    assert not cuda.violations, cuda.report()
    assert cuda.counts["device memory"] and cuda.counts["staging memory"] and cuda.counts["host tier memory"]
    assert cuda.counts["events"] < cuda.counts["recorded"] / 2 and not cuda.counts["waits that spin"]
    assert not cuda.locked
    assert cuda.contexts == {GPU} and cuda.current_device == 0


@pytest.mark.parametrize("form", FORMS)
class TestOrder:
    @pytest.mark.parametrize(
        "options",
        [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 40}],
        ids=["greedy", "beams", "chunked"],
    )
    def test_generation(self, scenario: Scenario, form: Form, options: dict[str, Any]) -> None:
        assert scenario.generation(form, **options)

    def test_threads_on_their_own_streams(self, scenario: Scenario, form: Form) -> None:
        scenario.threads(form)

    def test_a_request_that_goes_from_thread_to_thread(self, scenario: Scenario, form: Form) -> None:
        scenario.handover(form)

    def test_windows_that_move_forks_crops_rows(self, scenario: Scenario, form: Form) -> None:
        scenario.moving_windows(form)

    def test_blocks_read_on_the_device_right_after_they_were_sealed(self, scenario: Scenario, form: Form) -> None:
        assert scenario.fresh_blocks(form)
        assert scenario.hits["L0"] and not scenario.hits["L1"]

    def test_a_thread_that_goes_from_stream_to_stream(self, scenario: Scenario, form: Form) -> None:
        scenario.streams(form)
