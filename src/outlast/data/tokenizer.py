"""Tokenizers: text as bytes in, token ids out.

`ByteTokenizer` needs no file and has 256 symbols. The others wrap a `tokenizer.json` (Hugging
Face `tokenizers`) or a sentencepiece model. A tokenizer's name carries a hash of its file, so
that tokens made with another version of the same file are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from outlast.data.durable import read_json
from outlast.errors import DataError
from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_USUAL_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is its own token; byte 0, which text does not use, ends a document.

    Any bytes can be encoded, also such as are not UTF-8. A NUL byte inside a document cannot be
    told from a document's end.
    """

    name: str = "byte"
    vocabulary_size: int = 256
    end_of_text: int | None = 0

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Turn bytes into ids, (bytes,) uint8, without a copy."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            DataError: An id is not in [0, 256).
        """
        values = np.asarray(ids, dtype=np.int64)
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < 256:
            raise DataError(f"token id {int(values.max())} is not a byte: ids must be in [0, 256)")
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer that was read from a file, run by the library of its kind."""

    name: str
    vocabulary_size: int
    end_of_text: int | None
    _encode: Callable[[str], list[int]] = field(repr=False, compare=False)
    _decode: Callable[[list[int]], Any] = field(repr=False, compare=False)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Turn text into ids, (tokens,) uint32; bytes that are not UTF-8 become U+FFFD."""
        return np.array(self._encode(text.decode("utf-8", errors="replace")), np.uint32)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Turn ids into text, special tokens of a `tokenizer.json` included."""
        return str(self._decode(np.asarray(ids, dtype=np.int64).ravel().tolist()))


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""Turns text (UTF-8 bytes) into token ids in [0, vocabulary_size), and back.

Equal names make equal tokens of equal text; the token `end_of_text`, unless None, is written after
each document.
"""


def load_tokenizer(name: str, base: Path = Path()) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: `byte`; or the path of a `tokenizer.json`, of a folder that holds one (or a
            `tokenizer.model`), or of a sentencepiece `.model`.
        base: Folder that a relative path starts from.

    Raises:
        DataError: The name is neither, the file is broken, or its library is not installed.
    """
    if name == "byte":
        return ByteTokenizer()
    path = base / Path(name).expanduser()
    if path.is_dir():
        found = [path / file for file in ("tokenizer.json", "tokenizer.model")]
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(
                f"data.tokenizer = {name!r}: the folder {path} holds neither tokenizer.json "
                "nor tokenizer.model"
            )
        path = found[0]
    if not path.is_file():
        raise DataError(
            f"data.tokenizer = {name!r} is neither 'byte' nor a file or folder ({path} does not "
            "exist); give the path of a tokenizer.json or of a sentencepiece .model"
        )
    if path.suffix == ".json":
        return _load_json(path)
    if path.suffix == ".model":
        return _load_sentencepiece(path)
    raise DataError(
        f"data.tokenizer = {name!r} ends in {path.suffix!r}; it must be a .json or a .model file"
    )


def _load_json(path: Path) -> FileTokenizer:
    require("train", str(path), "tokenizers")
    from tokenizers import Tokenizer as Engine

    content = _read(path)
    try:
        engine = Engine.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{path} is not a readable tokenizer.json ({error})") from error
    # A model's own length limit would silently drop the rest of every document.
    engine.no_truncation()
    engine.no_padding()
    vocabulary: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path} holds an empty vocabulary")
    # `eos_token` in tokenizer_config.json beside the file ends a text, else a usual name.
    config = path.with_name("tokenizer_config.json")
    token = read_json(config).get("eos_token") if config.is_file() else None
    ending = token.get("content") if isinstance(token, dict) else token
    names = [ending, *_USUAL_END_OF_TEXT] if isinstance(ending, str) else _USUAL_END_OF_TEXT
    return FileTokenizer(
        f"tokenizer.json:{xxhash.xxh3_64_hexdigest(content)}",
        max(vocabulary.values()) + 1,
        next((vocabulary[name] for name in names if name in vocabulary), None),
        lambda text: engine.encode(text, add_special_tokens=False).ids,
        lambda ids: engine.decode(ids, skip_special_tokens=False),
    )


def _load_sentencepiece(path: Path) -> FileTokenizer:
    require("sentencepiece", str(path), "sentencepiece")
    from sentencepiece import SentencePieceProcessor

    content = _read(path)
    engine = SentencePieceProcessor()
    try:
        loaded = bool(content) and engine.LoadFromSerializedProto(content)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} is not a readable sentencepiece model ({error})") from error
    if not loaded:
        raise DataError(f"{path} is not a readable sentencepiece model (it is empty)")
    end_of_text = int(engine.eos_id())
    return FileTokenizer(
        f"sentencepiece:{xxhash.xxh3_64_hexdigest(content)}",
        int(engine.get_piece_size()),
        end_of_text if end_of_text >= 0 else None,
        engine.encode,
        engine.decode,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
