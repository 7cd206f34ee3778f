"""The checksums that torch.save() leaves in a zip file, compared with what was read from it."""

import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch

from lib.errors import UserError


def tensors_in(value):
    """Yield the tensors that nested dicts and lists hold."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def checksum_of(storage):
    """(bytes, CRC-32) of the memory behind a tensor."""
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    return len(data), zlib.crc32(data.numpy())


def written_checksums(path):
    """
    {(bytes, CRC-32)} of what torch.save() wrote to a zip file. Raises BadZipFile for a damaged one.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(('/data.pkl', '/byteorder')):
                archive.read(entry)  # compares its checksum
        return {(entry.file_size, entry.CRC) for entry in archive.infolist()}


def require_checksums(path, state, advice):
    """
    Raise UserError, ending in the advice, unless `state` is what torch.save() wrote to the zip file
    `path`: torch.load() does not compare the checksums that the zip keeps of each tensor. Entries
    that were dropped from `state` are not read, as checking costs time.
    """
    try:
        storages = [tensor.untyped_storage() for tensor in tensors_in(state)]
        storages = {storage.data_ptr(): storage for storage in storages}  # tied weights share one
        written = written_checksums(path)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            whole = written.issuperset(pool.map(checksum_of, storages.values()))
    except Exception:  # zipfile has no common class for all that can be wrong in a zip
        whole = False
    if not whole:
        raise UserError(f'{path} is damaged: its bytes differ from their checksums. {advice}')
