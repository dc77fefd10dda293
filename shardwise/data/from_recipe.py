"""What a recipe's [data] means: its tokenizer, and its token files. No torch: the command line asks before any rank."""

from shardwise.data import conversations
from shardwise.data.coder import require_rows
from shardwise.data.token_file import Progress, TokenFile, prepare_as, split_samples
from shardwise.data.tokenize import Coding, named, source_of
from shardwise.inputs.recipe import DataSpec


def coding_of(spec: DataSpec, hf: str | None) -> Coding:
    """How text becomes tokens, beside this model of Hugging Face. Raises: ModelError where "auto" finds none."""
    return Coding(source_of(spec.tokenizer, hf), chat=bool(spec.chat), template=spec.chat_template)


def require_tokenizer(spec: DataSpec, hf: str | None, rows: int | None, model: str) -> None:
    """Before any text is read. Raises: DataError for a tokenizer that is not there, or whose ids the model has not."""
    if spec.given is None:
        require_rows(named(coding_of(spec, hf), spec.messages_key), rows, model)


def prepare_recipe(spec: DataSpec, progress: Progress | None = None, hf: str | None = None) -> tuple[TokenFile, ...]:
    """The token file of each source of a recipe's [data], in order. `hf`: the recipe's model.hf.

    Raises: DataError, also where one is too short.
    """
    coding = coding_of(spec, hf)
    if spec.chat:
        made = prepare_as(coding, spec.chat, spec.messages_key, progress)
        found, tokens = conversations.read(made), conversations.stream(made)
        conversations.split(found, spec.sequence_length, spec.too_long, spec.valid_fraction, tokens)
        return (made,)
    sources = [spec.text] if spec.text else [source.text for source in spec.mixture]
    files = tuple(prepare_as(coding, text, spec.text_key, progress) for text in sources)
    for token_file in files:
        split_samples(token_file.header.tokens, spec.sequence_length, spec.valid_fraction)
    return files
