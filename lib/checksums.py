"""The checksums that torch.save() leaves in a zip file, compared with what was read from it."""

import os
import struct
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
    with zipfile.ZipFile(path) as archive, open(path, 'rb') as file:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
        for entry, end in zip(entries, ends):
            # The header before a record says how long it is itself. One that is damaged may lead
            # torch.load() to another record, but what follows the right one is 24 bytes at most.
            file.seek(entry.header_offset + 26)
            start = entry.header_offset + 30 + sum(struct.unpack('<HH', file.read(4)))
            if not 0 <= end - start - entry.file_size <= 24:
                raise zipfile.BadZipFile(entry.filename)
            if entry.filename.endswith(('/data.pkl', '/byteorder')):
                archive.read(entry)  # compares its checksum
        return {(entry.file_size, entry.CRC) for entry in entries}


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
