"""The header of a token file: what its tokens are, and how to tell that they are whole.

`X.json` beside `X.bin`, specified in docs/data.md. It is published after the tokens, so that a
file with a header is complete.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, get_type_hints

from outlast.data.durable import publish_json, read_json
from outlast.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "outlast-tokens"
VERSION = 1


@dataclass(frozen=True)
class TokenHeader:
    """What is known of a token file.

    Attributes:
        dtype: `uint16` or `uint32`; stored little endian.
        tokens: Number of tokens, end-of-text tokens included.
        bytes: Bytes of source text, end-of-text tokens not counted; None if unknown.
        documents: Number of documents.
        tokenizer: Name of the tokenizer.
        vocabulary_size: The tokenizer's.
        end_of_text: Token after each document, or None.
        maximum_token: Largest id in the file.
        file_hash: xxh3-128 of the token file, hexadecimal.
        source_hash: xxh3-128 of the documents' names and contents, hexadecimal.
        listing_hash: xxh3-128 of the documents' names and sizes, hexadecimal.
    """

    dtype: str
    tokens: int
    bytes: int | None
    documents: int
    tokenizer: str
    vocabulary_size: int
    end_of_text: int | None
    maximum_token: int
    file_hash: str
    source_hash: str
    listing_hash: str


def header_path(path: Path) -> Path:
    """Where the header of a token file is."""
    return path.with_suffix(".json")


def read_header(path: Path) -> TokenHeader | None:
    """Reads the header of the token file `path`; None when it has none.

    A `.json` beside the file that does not call itself a header is somebody else's.

    Raises:
        DataError: The header is unreadable, incomplete or of a later version.
    """
    if not header_path(path).is_file():
        return None
    content = read_json(header_path(path))
    if content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(
            f"{header_path(path)} has format version {content.get('version')!r}; this Outlast "
            f"reads version {VERSION}"
        )
    types = get_type_hints(TokenHeader)
    for field in fields(TokenHeader):
        value = content.get(field.name)
        if field.name not in content or not isinstance(value, types[field.name]):
            raise DataError(
                f"{header_path(path)} is damaged: {field.name} = {value!r}; "
                "delete the token file and its .json to have them made again"
            )
    header = TokenHeader(**{field.name: content[field.name] for field in fields(TokenHeader)})
    if header.dtype not in ("uint16", "uint32"):
        raise DataError(f"{header_path(path)}: dtype {header.dtype!r} must be uint16 or uint32")
    return header


def publish_header(path: Path, header: TokenHeader) -> None:
    """Publishes the header of the token file `path`.

    Raises:
        DataError: The disk is full, or the place cannot be written.
    """
    publish_json(header_path(path), {"format": FORMAT, "version": VERSION, **asdict(header)})
