"""Makes shards of tokens from text: `python -m models.extras.tokenize --help`."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from models.extras import shards
from models.extras.text import FIELD, Tokenizer, documents
from models.extras.usage import HelpFormatter

PROGRAM = "python -m models.extras.tokenize"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with one line of text for an input that can't be used."""
    options = _parse(arguments)
    try:
        tokenizer = Tokenizer.load(options.tokenizer, options.end_token)
        texts = (documents(path, options.field) for path in options.files)
        index = shards.write(
            options.out,
            shards.Index(
                shards.dtype_for(tokenizer.vocab), tokenizer.vocab, tokenizer.end, tokenizer.digest
            ),
            tokenizer.arrays(itertools.chain.from_iterable(texts)),
            options.shard_tokens,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    print(f"{index.tokens} tokens ({index.dtype}) in {len(index.shards)} shards: {options.out}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Tokenize text, .jsonl and .parquet files for models.pretrain --data FOLDER.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, help="text, .jsonl or .parquet files")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the shards")
    parser.add_argument("--tokenizer", help="tokenizer.json; default: bytes")
    parser.add_argument(
        "--end-token", help="token after each document; default: the tokenizer's usual one"
    )
    parser.add_argument("--field", default=FIELD, help="member or column that holds the text")
    parser.add_argument("--shard-tokens", type=int, default=1 << 27, help="tokens of a shard")
    options = parser.parse_args(arguments)
    if options.shard_tokens < 1:
        parser.error("--shard-tokens must be at least 1")
    return options


if __name__ == "__main__":
    main()
