"""Batches that say who published them, between others: the rows are the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.spark.test_decode import STORED_NS, decode

from flintmq.batch import encode_batch
from flintmq.limits import PRODUCER_ID_SIZE_MAX
from flintmq.message import internal_id
from flintmq.spark.schema import COLUMNS, arrow_schema

bodies = st.one_of(
    st.lists(st.binary(max_size=40), min_size=1, max_size=8),
    st.builds(lambda body, count: [body] * count, st.binary(max_size=40), st.integers(1, 8)),
)
producers = st.none() | st.tuples(st.binary(min_size=1, max_size=PRODUCER_ID_SIZE_MAX), st.integers(1, 2**62))


@pytest.mark.slow
@given(st.lists(st.tuples(bodies, producers), min_size=1, max_size=6), st.data())
def test_any_batches_any_range(batches, data):
    stored, first = b"", 5
    for batch, producer in batches:
        stored += encode_batch(internal_id(3, first), 0, STORED_NS, batch, producer=producer)
        first += len(batch)
    start = data.draw(st.integers(5, first - 1))
    end = data.draw(st.integers(start + 1, first))
    found, gaps = decode(stored, start, end, end)
    table = pa.Table.from_batches(found, arrow_schema(COLUMNS))
    assert gaps == []
    assert table["body"].to_pylist() == [body for batch, _ in batches for body in batch][start - 5 : end - 5]
    assert table["offset"].to_pylist() == list(range(start, end))
