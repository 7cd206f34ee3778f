"""
Token files: write, read, sample.

A prepared dataset is a folder, data/NAME, that is complete by itself:
    train.bin, val.bin, test.bin  the tokens of a split, one flat array; each document is followed
                                  by end-of-text
    train_starts.bin, ...         where the documents of the split start, int64
    tokenizer_state.json          the whole tokenizer, in the form that checkpoints hold
    meta.json                     what the files hold, and their checksums;
                                  written last: if meta.json exists, the other files are complete
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.answers import OnlyWriter, note, progress_bar, save_json, write_text
from lib.checksums import MIB, checksum_of
from lib.errors import MALFORMED, ROOT, UserError, fault_of, require_kinds
from lib.tokenizers import (
    TRAINED,
    HFTokenizer,
    cut,
    require_tokenizer_kinds,
    tokenizer_digest,
    tokenizer_from_state,
    tokenizer_state,
)

SPLITS = 'train', 'val', 'test'
UNFINISHED = 'tokens.part'  # a folder, inside the dataset's, for files that are being written


# ---------------------------------------------------------------------- writing token files

def batches(documents, limit):
    """
    Yield lists of (piece, is_last), as from cut(), each of about 4 MIB characters. So the memory
    in use is bounded, and there is work for several threads.
    """
    batch, size = [], 0
    for document in documents:
        for piece, is_last in cut(document, limit):
            batch.append((piece, is_last))
            size += len(piece)
            if size >= 4 * MIB:
                yield batch
                batch, size = [], 0
    yield batch


def token_type(encoding):
    return np.dtype(np.uint16 if encoding.n_vocab <= 2 ** 16 else np.uint32)


class SplitWriter:
    """
    Appends documents to the token files of a split. bar: a progress_bar() over bytes of text.
    count: how many tokens, documents and bytes of text the files hold already. Whatever a killed
    run wrote after these is cut off.
    """

    def __init__(self, folder, split, encoding, bar, count=None):
        self.encoding, self.bar, self.dtype = encoding, bar, token_type(encoding)
        self.count = count or {'tokens': 0, 'documents': 0, 'bytes': 0}
        self.tokens, self.starts = [open(Path(folder, name), 'ab') for name in split_files(split)]
        sizes = self.count['tokens'] * self.dtype.itemsize, self.count['documents'] * 8
        for file, size in zip((self.tokens, self.starts), sizes):
            if file.tell() < size:
                raise UserError(f'{file.name} is shorter than when it was written. Remove {folder} '
                                'and start again.')
            file.truncate(size)

    def write(self, documents, max_tokens=math.inf):
        """
        Append documents, as in cut(). Stops after the document that reaches max_tokens in total.
        """
        # Some Hugging Face tokenizers put a space before each text, so each piece would get one.
        limit = math.inf if isinstance(self.encoding, HFTokenizer) else MIB
        count, start = self.count, self.count['tokens']
        for batch in batches(documents, limit):
            all_ids = self.encoding.encode_ordinary_batch([piece for piece, _ in batch])
            for (piece, is_last), ids in zip(batch, all_ids):
                n_bytes = len(piece.encode(errors='replace'))
                self.bar.update(n_bytes)
                count['bytes'] += n_bytes
                if is_last:
                    ids = [*ids, self.encoding.eot_token]
                self.tokens.write(np.array(ids, self.dtype).tobytes())
                count['tokens'] += len(ids)
                if is_last:
                    self.starts.write(np.int64(start).tobytes())
                    count['documents'] += 1
                    start = count['tokens']
                    if start >= max_tokens:
                        return

    def sync(self):
        """Write everything to disk, so that not even a power cut loses it."""
        for file in self.tokens, self.starts:
            file.flush()
            os.fsync(file.fileno())

    def close(self):
        self.tokens.close()
        self.starts.close()


def write_corpus(folder, encoding, splits, report=None, total_bytes=0):
    """
    Tokenize documents into folder and print a summary. The folder changes only after everything is
    tokenized; after an error the old files remain. splits: {split: iterable of documents as in
    cut()}. report: a dict to keep in meta.json. total_bytes: of text, for the progress bar; may be
    an estimate. Raises UserError if a split has no text.
    """
    temporary, counts = Path(folder, UNFINISHED), {}
    with only_dataset(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            with progress_bar(total_bytes, f'tokenizing {folder}', total_bytes > 8 * MIB) as bar:
                for split, documents in splits.items():
                    with closing(SplitWriter(temporary, split, encoding, bar)) as writer:
                        writer.write(documents)
                    counts[split] = writer.count
            finish_dataset(folder, encoding, counts, report)
        finally:
            shutil.rmtree(temporary)


def finish_dataset(folder, encoding, counts, report=None):
    """
    Replace the old files in `folder` by the token files in its folder UNFINISHED, and print a
    summary. counts: {split: the count of its SplitWriter}. Raises UserError if a split has no text.
    """
    folder, checksums = Path(folder), {}
    for split, count in counts.items():
        if not count['tokens']:
            raise UserError(f'No document is left for the {split} split of {folder.name}. Give '
                            'it more text.')
        for name in split_files(split):
            checksums[name] = checksum_of(folder / UNFINISHED / name)
    state = tokenizer_state(encoding)
    with contextlib.suppress(OSError, *MALFORMED):  # no dataset, or a damaged one
        was = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
        if was['tokenizer_digest'] != tokenizer_digest(state):
            note(f"{folder} had the tokenizer {was['tokenizer']}. Models that were trained with it "
                 'can no longer read this data set.')
    # Remove meta.json first and write it last, so that a half-replaced folder looks unprepared.
    for split in SPLITS:
        for name in ('meta.json', *split_files(split)):
            (folder / name).unlink(missing_ok=True)
    for name in checksums:
        os.replace(folder / UNFINISHED / name, folder / name)
    (folder / TRAINED).unlink(missing_ok=True)
    if encoding.name == TRAINED:  # so that another data set can use it
        write_text(folder / TRAINED, state['text'])
    write_text(folder / 'tokenizer_state.json', json.dumps(state))
    save_json(folder / 'meta.json', {
        'tokenizer': encoding.name, 'tokenizer_digest': tokenizer_digest(state),
        'vocab_size': encoding.n_vocab, 'dtype': token_type(encoding).name, 'splits': counts,
        'report': report or {}, 'checksums': checksums})
    print(f'{folder}: tokenizer {encoding.name}, vocabulary {encoding.n_vocab:,}')
    for split, count in counts.items():
        print(f'{split:>6} {count["tokens"]:14,} tokens  {count["documents"]:10,} documents  '
              f'{count["bytes"] / count["tokens"]:.2f} bytes per token')


def only_dataset(folder):
    """
    The OnlyWriter of a dataset. write_corpus() takes it when it writes. A script that prepares a
    dataset takes it before its work starts.
    """
    return OnlyWriter(Path(folder, 'meta.json'))


def split_files(split):
    return f'{split}.bin', f'{split}_starts.bin'


def split_by_hash(identity, val_fraction, test_fraction):
    """
    'train', 'val' or 'test'. The split depends only on the identity, so a document stays in its
    split when other documents are added or removed.
    """
    u = stable_hash(identity) / 2 ** 64
    if u < val_fraction:
        return 'val'
    return 'test' if u < val_fraction + test_fraction else 'train'


# ---------------------------------------------------------------------- reading token files

AGAIN = 'Prepare the dataset again.'
# Token files of fewer bytes are compared with their checksum when opened. Only train.py checks
# larger ones.
CHECKED_AT_OPEN = 2 ** 30


@dataclass
class TokenFile:
    tokens: np.memmap  # (n,) uint16 or uint32; each document is followed by end-of-text
    starts: np.memmap  # (documents,) int64, where each document begins
    meta: dict         # meta.json
    tokenizer_state: dict
    checksum: str = ''         # of the tokens
    file: object = None        # the open file of the tokens
    size_and_time: tuple = ()  # of that file when it was opened

    def __del__(self):
        if self.file:
            self.file.close()

    def require_unchanged(self):
        """
        Raise UserError if the token file was changed in place after it was opened. If the file was
        cut short, reading past its end would kill the process without a message.
        """
        if size_and_time(self.file) != self.size_and_time:
            raise UserError(f'{self.file.name} has changed since it was opened. {AGAIN} A run of '
                            'train.py then goes on with --init_from=resume.')


def open_tokens(dataset, split, check=False):
    """
    Open a split of a dataset as a TokenFile. dataset: the name of a folder in data/, or a path;
    split: 'train', 'val' or 'test'. check: True compares large files with their checksums, too,
    which takes a second for each GB or two. Raises UserError if the dataset is not prepared, lacks
    the split or is damaged.
    """
    folder = dataset_folder(dataset)
    require_files(folder, 'tokenizer_state.json')
    with fault_of(f'{folder}: meta.json or tokenizer_state.json', 'whole', AGAIN):
        meta, state = [json.loads((folder / name).read_text(encoding='utf-8'))
                       for name in ('meta.json', 'tokenizer_state.json')]
        require_tokenizer_kinds(state)
        if tokenizer_digest(state) != meta['tokenizer_digest']:
            raise ValueError('the tokenizer differs from the one in meta.json')
        require_kinds(meta, vocab_size=int, splits=dict, checksums=dict)
        if meta['dtype'] not in ('uint16', 'uint32'):
            raise ValueError(f"dtype is {meta['dtype']}")
        if split not in meta['splits']:
            raise UserError(f'Dataset {dataset} has no split {split}. It has '
                            f"{', '.join(meta['splits'])}. Prepare it again, so that some of its "
                            f'text goes to {split}.')
        require_files(folder, *split_files(split))
        count, checksums = meta['splits'][split], meta['checksums']
        file, arrays = open(folder / f'{split}.bin', 'rb'), []
        opened = size_and_time(file)
        for name, dtype, n in zip(split_files(split), (meta['dtype'], 'int64'),
                                  (count['tokens'], count['documents'])):
            arrays.append(open_array(folder / name, dtype, n, checksums[name], check))
    return TokenFile(*arrays, meta, state, checksums[f'{split}.bin'], file, opened)


def require_files(folder, *names):
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f'{folder} has no {name}. {AGAIN}')


def size_and_time(file):
    """The size of an open file in bytes, and when it was last written to, in ns."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def open_array(path, dtype, n, checksum, check):
    """A file's n numbers as a memory-mapped array. checksum, check: see open_tokens()."""
    with fault_of(path, 'as it was prepared', AGAIN):
        array = np.memmap(path, dtype, 'r')
        if len(array) != n:
            raise ValueError(f'it has {len(array):,} numbers, but meta.json says {n:,}')
        if array.nbytes >= CHECKED_AT_OPEN:
            if not check:
                return array
            note(f'reading all of {path}, {array.nbytes / 1e9:.1f} GB, to find damage')
        if checksum_of(path) != checksum:
            raise ValueError('its checksum differs from the one in meta.json')
    return array


def is_prepared(folder, splits, report):
    """True, with a line that says so, if the folder holds a whole dataset with this report."""
    try:
        found = [open_tokens(str(folder.resolve()), split).meta['report'] for split in splits]
    except UserError:  # not prepared yet, or damaged
        return False
    if any(of_split != report for of_split in found):
        return False
    print(f'{folder} is prepared already: same text, same tokenizer.')
    return True


def dataset_folder(dataset):
    folder = ROOT / 'data' / dataset
    if not folder.is_dir():
        folder = Path(dataset)
    if (folder / 'meta.json').is_file():
        return folder
    if (folder / 'prepare.py').is_file():
        script = os.path.relpath(folder / 'prepare.py')
        raise UserError(f'Dataset {dataset} is not prepared. Run: python {script} (--help says '
                        'what it takes).')
    prepared = sorted(path.parent.name for path in (ROOT / 'data').glob('*/meta.json'))
    raise UserError(f'There is no dataset {dataset}. Prepared are: '
                    f'{", ".join(prepared) or "none"}.')


def documents(data):
    """
    Yield (start, end) for each document of a TokenFile. data.tokens[start:end] is the document's
    text, without end-of-text.
    """
    boundaries = itertools.chain(data.starts, [len(data.tokens)])
    for start, after in itertools.pairwise(boundaries):
        yield int(start), int(after) - 1


# ---------------------------------------------------------------------- sampling

SLOTS = 10_000  # samples in a cycle; each cycle has the same number of samples from each source


def stable_hash(*parts):
    """A 64-bit hash of the parts' texts. Unlike hash(), it is the same in every process."""
    text = '/'.join(map(str, parts))
    text = text.encode(errors='surrogatepass')  # a file name may not be valid UTF-8
    return int.from_bytes(hashlib.sha256(text).digest()[:8], 'big')


@functools.lru_cache(maxsize=8)
def shuffled(n, key):
    """
    range(n), shuffled, (n,) int64. The order depends only on key, because numpy never changes the
    raw numbers of Philox.
    """
    return np.random.Philox(key=key).random_raw(n).argsort(kind='stable')


def mixture_slots(weights, dataset):
    """
    How many of SLOTS samples each source gets. Shares are rounded down; the samples left over go to
    the largest remainders.
    """
    if sum(weights) == math.inf:
        raise UserError(f'dataset is {dataset}; its weights are too large. Choose smaller ones.')
    exact = np.array(weights) / sum(weights) * SLOTS
    slots = np.floor(exact).astype(int)
    missing = SLOTS - slots.sum()
    slots[np.argsort(slots - exact, kind='stable')[:missing]] += 1
    if not all(slots):
        raise UserError(f'A part of {dataset} has hardly any weight: it gets no sample in '
                        f'{SLOTS:,}. Leave it out.')
    return tuple(slots.tolist())


@functools.lru_cache(maxsize=4)
def mixture_cycle(slots, key):
    """
    The source of each of SLOTS consecutive samples, (SLOTS,), shuffled by key. slots: how many
    samples each source has.
    """
    return np.repeat(np.arange(len(slots)), slots)[shuffled(SLOTS, key)]


class Windows:
    """
    Training and evaluation windows of a dataset, or of a weighted mixture such as
    'slimpajama:0.694,starcoder:0.306'. The val and test windows of a mixture are those of its first
    source. A window is a block of block_size + 1 consecutive tokens, which gives block_size
    predictions. Blocks do not overlap. check: as in open_tokens(). The attribute checksums,
    {source: checksum of its tokens}, identifies the text.
    """

    def __init__(self, dataset, split, block_size, seed=0, check=False):
        self.dataset, self.split, self.block_size, self.seed = dataset, split, block_size, seed
        parts = [parse_part(part) for part in dataset.split(',')]
        if split != 'train':
            if len(parts) > 1:
                note(f'the split {split} of {dataset} is only that of {parts[0][0]}')
            parts = parts[:1]  # the other sources may lack this split
        sources = {name: open_tokens(name, split, check) for name, _ in parts}
        self.checksums = {name: data.checksum for name, data in sources.items()}
        tokenizers = {data.meta['tokenizer_digest']: f"{name} has {data.tokenizer_state['name']}"
                      for name, data in sources.items()}
        if len(tokenizers) > 1:
            raise UserError(f'The parts of {dataset} have different tokenizers: '
                            f"{', '.join(tokenizers.values())}. Prepare all with the same one.")

        self.blocks, size = [], block_size + 1
        for name, _ in parts:
            data = sources[name]
            n = len(data.tokens) // size
            if n == 0:
                raise UserError(f'Split {split} of {name} has {len(data.tokens):,} tokens, less '
                                f'than a window of {block_size:,} + 1. Choose a shorter window or '
                                'prepare more text.')
            self.blocks.append(data.tokens[:n * size].reshape(n, size))
        self.sources = list(sources.values())
        self.data = self.sources[0]  # evaluation reads only the first source
        self.slots = mixture_slots([weight for _, weight in parts], dataset)
        self.tokenizer_state = self.data.tokenizer_state

    @property
    def vocab_size(self):
        """Vocabulary size, taken from the tokenizer: its digest was checked, meta.json's not."""
        return tokenizer_from_state(self.tokenizer_state).n_vocab

    def batch(self, step, batch_size, rows=slice(None)):
        """
        The windows of a step, (n_rows, block_size + 1) int64. They depend only on (seed, split,
        step). rows: the slice of the batch for this rank or micro-batch. Each source is read epoch
        after epoch. Each epoch reads each block once, in a new order.
        """
        for data in self.sources:
            data.require_unchanged()
        windows = []
        for sample in range(step * batch_size, (step + 1) * batch_size)[rows]:
            cycle, slot = divmod(sample, SLOTS)
            key = stable_hash(self.seed, self.split, 'cycle', cycle)
            sources = mixture_cycle(self.slots, key)
            s = int(sources[slot])
            before = int((sources[:slot] == s).sum())  # samples of this source in the cycle
            of_source = cycle * self.slots[s] + before
            epoch, i = divmod(of_source, len(self.blocks[s]))
            key = stable_hash(self.seed, self.split, s, epoch)
            windows.append(self.blocks[s][shuffled(len(self.blocks[s]), key)[i]])
        return np.array(windows, np.int64).reshape(-1, self.block_size + 1)

    def evenly_spaced(self, n, spacing=None):
        """
        Windows for evaluation, evenly spaced over the split, in order, (n, block_size + 1) int64.
        There are fewer than n if n would start less than `spacing` tokens apart. spacing None: they
        do not overlap.
        """
        starts, tokens = self.evenly_spaced_starts(n, spacing), self.blocks[0].reshape(-1)
        return tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)

    def evenly_spaced_starts(self, n, spacing=None):
        """Where the windows of evenly_spaced() start in the split, (n,)."""
        size = self.block_size + 1
        spacing = spacing or size
        places = (self.blocks[0].size - size) // spacing + 1
        n = min(n, places)
        return np.arange(n) * places // n * spacing


def parse_part(part):
    """('slimpajama', 0.694) from 'slimpajama:0.694'. Without a number, the weight is 1."""
    name, colon, weight = part.strip().rpartition(':')
    if not colon or re.search(r'[\\/]', weight):  # a colon in a path, as in C:\data
        name, weight = part.strip(), ''
    weight = weight or '1'
    is_number = re.fullmatch(r'\d*\.?\d+([eE]-?\d+)?', weight)
    if not (name and is_number and 0 < float(weight) < math.inf):
        raise UserError(f"dataset has the part '{part}'. Write NAME:WEIGHT, where the weight is a "
                        'number above 0.')
    return name, float(weight)
