"""Cross entropy over a split vocabulary against torch's own: sum and gradient, at the edges of numbers and shards."""

import numpy as np
import pytest

from tests.distributed import tensor_work
from tests.distributed.pool import Pool


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [61, 5, 2])
def test_the_sum_and_its_gradient_are_those_of_the_whole(pool: Pool, ranks: int, vocabulary: int) -> None:
    """61 divides by nothing here; 5 and 2 leave ranks without a part. fp64, so that only logic can differ."""
    expected = tensor_work.whole_loss(vocabulary)
    world = max(2, ranks)
    for result in pool.run(world, "tests.distributed.tensor_work:split_loss", ranks=ranks, vocabulary=vocabulary):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-12)
        np.testing.assert_allclose(result["gradient"], expected["gradient"], atol=1e-12)
