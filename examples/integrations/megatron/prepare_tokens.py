"""Text as tokens that both Outlast and Megatron train on.

    python prepare_tokens.py tokens/ --tokenizer tokenizer.json corpus/**/*.txt
    torchrun ... pretrain_gpt.py --data-path tokens/train ...

The last line makes `tokens/train.idx` beside `tokens/train.bin`.
"""

import argparse
from pathlib import Path

from outlast.data import prepare, read_index, write_index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--tokenizer", default="byte")
    chosen = parser.parse_args()
    data = prepare(
        "text", cache=chosen.tokens, train_patterns=chosen.texts, tokenizer=chosen.tokenizer
    )
    write_index(data.train)
    index = read_index(data.train.path)
    assert index is not None
    print(f"{index.tokens} tokens in {len(index.lengths)} documents")
    print(f"--data-path {data.train.path.with_suffix('')}")


if __name__ == "__main__":
    main()
