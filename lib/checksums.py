"""
Checksums (CRC-32) that find damage: of any file, of the tensors of an export, and of the entries
of a file that torch.save() wrote, which is a zip file.
"""

import os
import zipfile
import zlib

import torch

from lib.errors import UserError

MIB = 2 ** 20


def checksum_of(path):
    """CRC-32 of a file, as 8 hex digits. Read, not mapped, because a map would fill the memory."""
    checksum = 0
    with open(path, 'rb') as file:
        while part := file.read(MIB):
            checksum = zlib.crc32(part, checksum)
    return f'{checksum:08x}'


def checksum_of_tensors(tensors):
    """CRC-32 over the names, types, shapes and bytes of {name: tensor}, as 8 hex digits."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(tensor.flatten().view(torch.uint8).numpy())
        lines.append(f'{name} {tensor.dtype} {tuple(tensor.shape)} {checksum}')
    return f"{zlib.crc32(' '.join(lines).encode()):08x}"


def load_whole(path, advice):
    """
    Read what torch.save() wrote to a file. Its tensors are memory-mapped, in CPU memory. Raises
    UserError, with the advice at its end, if the file is damaged or of another kind.
    """
    with open(path, 'rb') as file:  # an OSError, such as for permissions, names the file
        is_zip = file.read(4) == b'PK\x03\x04'  # older files of torch.save() are not zip files
    try:
        # torch.load() does not compare the checksums of the zip file. This takes 0.6 s for 1 GB.
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise ValueError(f'{damaged} differs from its checksum')
        # Windows cannot replace a mapped file, and a run replaces the checkpoint it resumed from.
        return torch.load(path, map_location='cpu', weights_only=True,
                          mmap=is_zip and os.name != 'nt')
    except Exception as error:  # zip, unpickling and type errors share no class
        raise UserError(f'{path} is damaged, cut short or of another program '
                        f'({type(error).__name__}). {advice}') from error
