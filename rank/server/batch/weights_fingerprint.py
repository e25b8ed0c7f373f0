"""A fingerprint of a model's weights that reads a megabyte: reading 140 GB would take minutes.

A digest of every weight file's name and header, which holds its tensors' names, types, shapes and places and so its
size, and of a kilobyte from the middle of each tensor. Of more than SAMPLES tensors so many are looked into, evenly
spread over the files. Training changes all of a matrix as a rule, so that other weights of the same shape differ there;
a change of a few rows elsewhere goes unseen.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from ....errors import MODEL, FatalError
from ... import untrusted_files
from ...checkpoint_files import directory, is_gguf, read_index
from ...safetensors_header import INDEX, SINGLE, Entry

SAMPLES = 1024
SIZE = 1024  # bytes of a sample
READERS = 16  # threads: on a network each read waits for an answer
NONE = "none"


def fingerprint(model_dir: str) -> str:
    """Raises FatalError where the weights cannot be read. NONE where there are none, as with --load-format dummy."""
    path = Path(model_dir)
    if not is_gguf(path) and not (path / SINGLE).exists() and not (path / INDEX).exists():
        return NONE
    headers, folder = read_index(path).headers, directory(path)
    tensors = [(folder / file, entry) for file, entries in sorted(headers.items()) for entry in entries.values()]
    count = min(SAMPLES, len(tensors))
    chosen = [tensors[number * len(tensors) // count] for number in range(count)]
    digest = blake2b(msgspec.json.encode(headers, order="deterministic"), digest_size=16)
    with ThreadPoolExecutor(READERS) as pool:
        for sample in pool.map(_sample, chosen):
            digest.update(sample)
    return digest.hexdigest()


def _sample(place: tuple[Path, Entry]) -> bytes:
    file, entry = place
    size = min(SIZE, entry.stop - entry.start)
    try:
        with untrusted_files.open_weights(file, 0) as opened:
            return os.pread(opened.fileno(), size, (entry.start + entry.stop - size) // 2)
    except OSError as error:
        raise FatalError(f"{file} cannot be read: {error.strerror}", MODEL) from None
