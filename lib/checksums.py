"""Checksums that detect damage in files of tensors: those of torch.save(), and our exports."""

import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._pytree import tree_leaves

from lib.errors import UserError


def checksum_of(storage):
    """(number of bytes, CRC-32) of the memory behind a tensor."""
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    return len(data), zlib.crc32(data.numpy())


def checksum_of_tensors(tensors):
    """CRC-32 over the names, types, shapes and bytes of {name: tensor}, as 8 hex digits."""
    def line(name):
        weight = tensors[name]
        checksum = zlib.crc32(weight.flatten().view(torch.uint8).numpy())
        return f'{name} {weight.dtype} {tuple(weight.shape)} {checksum}'

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return f"{zlib.crc32(' '.join(pool.map(line, sorted(tensors))).encode()):08x}"


def require_checksums(path, state):
    """
    Raise ValueError unless `state` is what torch.save() wrote to a zip file. The zip file has a
    checksum of each tensor, but torch.load() does not compare them.
    """
    storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if torch.is_tensor(leaf)]
    storages = {storage.data_ptr(): storage for storage in storages}  # tied weights share one
    with zipfile.ZipFile(path) as archive:
        written = {(entry.file_size, entry.CRC) for entry in archive.infolist()}
        for name in archive.namelist():
            if name.endswith(('/data.pkl', '/byteorder')):
                archive.read(name)  # zipfile compares the checksum of what it reads
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if not written.issuperset(pool.map(checksum_of, storages.values())):
            raise ValueError('bytes differ from their checksums')


def load_whole(path, advice, without=()):
    """
    Read what torch.save() wrote to a file. Its tensors are memory-mapped, in CPU memory. Raises
    UserError, with the advice at its end, if the file is damaged or of another kind. without: names
    of entries to leave out, which saves the time to check them.
    """
    with open(path, 'rb') as file:  # an OSError, such as for permissions, names the file
        is_zip = file.read(4) == b'PK\x03\x04'  # older files of torch.save() are not zip files
    try:
        # Windows cannot replace a mapped file, and a run replaces the checkpoint it resumed from.
        state = torch.load(path, map_location='cpu', weights_only=True,
                           mmap=is_zip and os.name != 'nt')
        for name in without:
            state.pop(name, None)
        if is_zip:
            require_checksums(path, state)
    except Exception as error:  # zip, unpickling and type errors share no class
        raise UserError(f'{path} is damaged, cut short or of another program '
                        f'({type(error).__name__}). {advice}') from error
    return state
