"""What the Trainer checks of what it was handed."""

import pytest
from torch import nn

from shardwise.errors import ModelError
from shardwise.train.setup import require_vocabulary


class Ids:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def test_a_vocabulary_smaller_than_the_tokens_is_an_error_that_names_the_embedding() -> None:
    model = nn.Sequential(nn.Embedding(256, 4), nn.Embedding(8, 4))
    with pytest.raises(ModelError, match="0 embeds 256 token ids, and the data has 257"):
        require_vocabulary(model, Ids(257))
    require_vocabulary(model, Ids(256))
    require_vocabulary(nn.Linear(2, 2), Ids(257))
    require_vocabulary(model, [1, 2])
