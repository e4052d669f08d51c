"""Layouts, row maps and revisions of sealed blocks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.core.blocks import BlockLayout, BlockTable, as_bits

LAYOUT = BlockLayout(3, 2, 8, 1, 4, 16, torch.bfloat16)


def test_layout_views_share_memory_and_keep_k_before_v() -> None:
    storage = torch.zeros(5 * LAYOUT.nbytes + 3, dtype=torch.uint8)
    payload = LAYOUT.over(storage, 4)
    assert payload.shape == (4, 3, LAYOUT.row_elements)
    keys, values = LAYOUT.split(payload)
    assert keys.shape == (4, 3, 2, 16, 8) and values.shape == (4, 3, 1, 16, 4)
    keys[2, 1] = 1.0
    values[2, 1] = 2.0
    row = payload[2, 1]
    assert (row[: 2 * 16 * 8] == 1).all() and (row[2 * 16 * 8 :] == 2).all()
    assert payload.float().sum() == 2 * 16 * 8 + 2 * 16 * 4


def test_bits_share_memory_for_every_float() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float64):
        tensor = torch.zeros(4, dtype=dtype)
        as_bits(tensor)[2] = 1
        assert as_bits(tensor).tolist() == [0, 0, 1, 0]
        assert as_bits(tensor).dtype == BlockLayout(1, 1, 1, 1, 1, 16, dtype).bits_dtype


@given(
    st.lists(
        st.one_of(
            st.just("seal"),
            st.tuples(st.just("rows"), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
            st.tuples(st.just("truncate"), st.integers(0, 99)),
        ),
        max_size=30,
    )
)
def test_row_maps_are_what_moving_data_would_give(steps: list[object]) -> None:
    """Row maps agree with a plain list of blocks whose rows are really moved."""
    table = BlockTable("r", 0)
    batch = 2
    model: list[list[tuple[int, int]]] = []  # per block, per batch row: (identity of the block, stored row)
    keys = set()
    for step in steps:
        if step == "seal":
            block = table.seal(BlockLayout(batch, 1, 4, 1, 4, 16, torch.float32))
            assert block.key not in keys, "a key names one block for ever"
            keys.add(block.key)
            model.append([(id(block), row) for row in range(batch)])
        elif isinstance(step, tuple) and step[0] == "rows":
            rows = [row % batch for row in step[1]]
            table.select_rows(rows)
            model = [[block[row] for row in rows] for block in model]
            batch = len(rows)
        elif isinstance(step, tuple):
            keep = step[1] % (len(model) + 1)
            assert table.truncate(keep) is not None
            model = model[:keep]
        assert len(table) == len(model)
        found = {}
        for indices, run in table.runs(range(len(table))):
            assert {table.blocks[index].layout for index in indices} == {run.layout}
            for index in indices:
                found[index] = [(id(table.blocks[index]), int(row)) for row in run.row_map.rows]
        assert [found[index] for index in range(len(model))] == model


def test_revisions_of_forks_do_not_meet() -> None:
    table = BlockTable("a", 0)
    for _ in range(3):
        table.seal(LAYOUT)
    twin = table.fork("b", 0)
    keys = {block.key for block in table.blocks}
    for one in (table, twin):
        one.truncate(1)
        keys |= {one.seal(LAYOUT).key, one.seal(LAYOUT).key}
    assert len(keys) == 7
    assert twin.blocks[0] is table.blocks[0]


def test_reordering_a_fork_leaves_the_original_alone() -> None:
    table = BlockTable("a", 0)
    table.seal(LAYOUT)
    twin = table.fork("b", 0)
    twin.select_rows(np.array([2, 2]))
    assert [run.row_map.rows.tolist() for _, run in table.runs([0])] == [[0, 1, 2]]
    assert [run.row_map.rows.tolist() for _, run in twin.runs([0])] == [[2, 2]]
