"""Samples from files: text through a tokenizer, arrays (.npz), token lists (.jsonl).

A sample is a dictionary of arrays by input name, each with a leading axis of one or more rows.
`attention_mask` says what is padding; `input_ids` stands for the model's token input.
"""

from __future__ import annotations

import importlib
import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError, MissingExtra, one_line
from qgraph.tokenizer_files import tokenizer_path
from qgraph.wording import counted

Sample = dict[str, NDArray[Any]]
IDS, MASK = "input_ids", "attention_mask"
_WANTED = "tokenizer of the tokenizers library"


class TextBlocks(NamedTuple):
    """Token ids `[blocks, sequence]`, and how many tokens the tokenizer knows in all."""

    ids: NDArray[np.int64]
    vocabulary: int


def token_blocks(
    text: Path, tokenizer: Path, *, sequence: int = 256, samples: int = 20
) -> TextBlocks:
    """The first blocks of a text, at most `samples`; see `cut_blocks`.

    Raises:
        InputError: a file that cannot be read, or a text of less than one block.
        MissingExtra: the package tokenizers is not installed.
    """
    encoder = load_tokenizer(tokenizer)
    ids, tokens = cut_blocks(text, encoder, sequence, samples)
    if not len(ids):
        raise InputError(
            f"the text {text} has {counted(tokens, 'token')}, less than one block of {sequence}: "
            "give a longer text, or a smaller --sequence"
        )
    return TextBlocks(ids, known_tokens(encoder))


def cut_blocks(
    text: Path, encoder: Any, sequence: int, samples: int
) -> tuple[NDArray[np.int64], int]:
    """The first blocks of a text `[blocks, sequence]`, and how many tokens the text has.

    The text is tokenized whole, without special tokens, and cut into consecutive blocks; what
    is left at its end is no block.

    Raises:
        InputError: a file that cannot be read.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the text {text} is not UTF-8 (byte {error.start}): convert it first"
        ) from None
    except OSError as error:
        raise InputError(f"the text {text} cannot be read: {error.strerror}") from None
    ids = encoder.encode(content, add_special_tokens=False).ids
    blocks = min(samples, len(ids) // sequence)
    return np.array(ids[: blocks * sequence], np.int64).reshape(blocks, sequence), len(ids)


def load_tokenizer(path: Path) -> Any:
    """A `tokenizers.Tokenizer` that neither pads nor cuts.

    path: the tokenizer.json, or the folder that holds it.

    Raises:
        InputError: no tokenizer.json at `path`, or one that is no tokenizer.
        MissingExtra: the package tokenizers is not installed.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise MissingExtra(
            "tokenizers",
            "text",
            "reading text",
            "Or give token ids: a .jsonl file for --data or --calibrate.",
        ) from None
    path = tokenizer_path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no {_WANTED}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise InputError(f"the tokenizer {path} cannot be read: {error.strerror}") from None
    try:
        found = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises bare Exception for whatever it cannot read
        raise InputError(
            f"{path} is no {_WANTED} (it says: {one_line(error)}): give the model's own "
            "tokenizer.json, or the folder that holds it"
        ) from None
    found.no_truncation()
    found.no_padding()
    return found


def known_tokens(encoder: Any) -> int:
    """How many tokens a `tokenizers.Tokenizer` has in all."""
    return int(encoder.get_vocab_size(with_added_tokens=True))


def read_samples(path: Path, samples: int | None = None) -> Iterator[Sample]:
    """The first `samples` of a .npz or .jsonl file, one row each.

    A .npz holds one array per input, each with a leading sample axis. A .jsonl holds one object
    a line: `input_ids`, and of the same length `attention_mask` or other inputs.

    Raises:
        InputError: another kind of file, or one that is damaged or empty.
    """
    readers = {".npz": _read_npz, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"the data {path} is neither a .npz nor a .jsonl file")
    _check_regular(path)
    try:
        count = 0
        for sample in itertools.islice(reader(path), samples):
            count += 1
            yield sample
    except OSError as error:
        raise InputError(f"the data {path} cannot be read: {error.strerror}") from None
    if not count:
        raise InputError(f"the data {path} holds no samples")


def _check_regular(path: Path) -> None:
    """Refuse a pipe or device, at which reading may wait for ever; data is read more than once."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"the data {path} is no regular file: write it to one first")


def _read_npz(path: Path) -> Iterator[Sample]:
    try:
        # numpy leaves a file that it opened itself open where it is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        foreign = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
        if foreign:
            raise ValueError(f"its member {foreign[0]} is no array")
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        # numpy's own words for pickles tell how to run them.
        why = "it holds Python objects" if "pickle" in str(error) else str(error)
        raise InputError(
            f"the data {path} is no .npz file of plain arrays: {why}; "
            "write it with numpy.savez(path, input_name=array, …)"
        ) from None
    except MemoryError as error:
        raise InputError(
            f"the data {path} does not fit in memory: {error}; give fewer samples, or write the "
            "file again if its arrays are smaller than that"
        ) from None
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(f"the arrays of {path} differ in their leading sample axis: {shapes}")
    for at in range(next(iter(lengths.values()), None) or 0):
        yield {name: array[at : at + 1] for name, array in arrays.items()}


def _read_jsonl(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _sample(line, f"{path} line {number}")
        except UnicodeDecodeError:
            raise InputError(f"the data {path} is not UTF-8 text") from None


def longest_sample(path: Path, samples: int) -> int:
    """Tokens in the longest of the first `samples` of a .npz or .jsonl file.

    Of a .npz nothing but the arrays' shapes is read. A .npz that cannot be read has none.
    """
    _check_regular(path)
    if path.suffix.lower() == ".npz":
        return max((shape[1] for shape in _npz_shapes(path) if len(shape) > 1), default=0)
    return max((sample[IDS].shape[1] for sample in read_samples(path, samples)), default=0)


def _npz_shapes(path: Path) -> Iterator[tuple[int, ...]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    read = readers.get(np.lib.format.read_magic(file))
                    if read is not None:
                        yield read(file)[0]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return  # what is wrong with it is said when it is read


def _sample(line: str, where: str) -> Sample:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict) or not found.get(IDS):
        raise InputError(f'{where}: wanted an object like {{"{IDS}": [1, 2, 3]}}')
    sample = {}
    for name, values in found.items():
        if not isinstance(values, list) or not all(type(item) is int for item in values):
            raise InputError(f"{where}: {name} is no list of integers")
        if len(values) != len(found[IDS]):
            raise InputError(
                f"{where}: {name} has {len(values)} entries, {IDS} has {len(found[IDS])}"
            )
        try:
            sample[name] = np.array([values], np.int64)
        except OverflowError:
            raise InputError(f"{where}: {name} holds a number beyond 64 bits") from None
    return sample
