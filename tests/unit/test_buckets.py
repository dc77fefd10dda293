"""Which parameter lies in which bucket: a function of the module alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.parallel.buckets import FIRST_CAP_BYTES, assign

SIZES = st.lists(st.integers(1, 400_000), min_size=1, max_size=30)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(sizes=SIZES, halves=st.lists(st.booleans(), min_size=30, max_size=30), cap=st.integers(1, 2**22))
def test_every_parameter_lies_in_one_bucket_of_its_kind_in_reverse_order(
    sizes: list[int], halves: list[bool], cap: int
) -> None:
    dtypes = [torch.float64 if half else torch.float32 for half in halves]
    parameters = [nn.Parameter(torch.empty(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=False)]
    buckets = assign(parameters, cap)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(parameters)]
    for index, bucket in enumerate(buckets):
        assert len({p.dtype for p in bucket}) == 1
        limit = cap if index else min(cap, FIRST_CAP_BYTES)
        assert len(bucket) == 1 or sum(p.numel() * p.element_size() for p in bucket) <= limit
