"""Text as the token ids of a checkpoint's own tokenizer."""

from __future__ import annotations

import tempfile

from ._checkpoint import Checkpoint


def tokens_of(checkpoint: Checkpoint, content: str) -> tuple[list[int], int | None]:
    """The ids of a text by the checkpoint's own tokenizer, and the BOS id if that tokenizer adds one.

    Raises ValueError where there is no tokenizer, ImportError without transformers.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise ImportError("a tokenizer needs transformers: pip install 'halfulp[hf]'") from None
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.copy_side_files(folder)
        # the tokenizer warns of a text longer than the model's context; windows are cut from it below
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            ids = list(tokenizer(content)["input_ids"])
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise ValueError(f"{checkpoint.source} has no tokenizer that transformers can read: {line}") from None
        finally:
            logging.set_verbosity(verbosity)
    bos = tokenizer.bos_token_id
    return ids, bos if bos is not None and ids[:1] == [bos] else None
