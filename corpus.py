"""
Tokenizers and token files: write, read, sample.

A prepared dataset is a folder, data/NAME, that needs nothing from outside:
    train.bin, val.bin, test.bin  the tokens of a split, one flat array; each document is followed by end-of-text
    train_starts.bin, ...         where its documents start, int64
    tokenizer_state.json          the whole tokenizer, as checkpoints carry it
    meta.json                     what the files hold, and their checksums;
                                  written last, so where it stands the rest is whole
"""

import base64
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from runtime import ROOT, Progress, note, optional, save_json, write_text

MIB = 2 ** 20
EOT = '<|endoftext|>'
# How text is cut into words before BPE merges anything, for every .tiktoken file: GPT-4's way, in a form that tiktoken
# and tokenizers both read. Contractions, words, up to 3 digits, punctuation, line ends, other white space.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r'|\s*[\r\n]+|\s+(?!\S)|\s+')


# ----------------------------------------------------------------------------- tokenizers

def get_tokenizer(name):
    """
    A tiktoken.Encoding, or an HFTokenizer, which has those of its methods that we use. name: 'gpt2'; 'bytes', 256 bytes
    and end-of-text; FILE.tiktoken, a base64 token and its rank per line, end-of-text being one past the highest rank;
    FILE.json, a Hugging Face tokenizer.json; 'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION', the same downloaded.
    """
    if name == 'bytes':
        return tiktoken_encoding(name, {bytes([byte]): byte for byte in range(256)}, r'[\s\S]{1,64}', 256)
    if name == 'gpt2':
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:
            raise ValueError('The ranks of gpt2 could not be downloaded; it needs the network once. Connect, or take '
                             '--tokenizer=bytes or a local .tiktoken file.') from error
    path = Path(name)
    if name.startswith('hf:'):
        path = from_hub(name, ['tokenizer.json', 'tokenizer_config.json'],
                        'give a file that you have: --tokenizer=FOLDER/tokenizer.json.') / 'tokenizer.json'
    if path.suffix not in ('.tiktoken', '.json'):
        raise ValueError(f"There is no tokenizer '{name}'. Take gpt2, bytes, FILE.tiktoken, FILE.json, hf:ORG/NAME.")
    if not path.is_file():
        raise FileNotFoundError(f'There is no tokenizer file {path}. Check the name.')
    if path.suffix == '.json':
        config = path.with_name('tokenizer_config.json')
        try:
            eos = json.loads(config.read_text(encoding='utf-8')).get('eos_token') if config.is_file() else None
            eos = eos['content'] if isinstance(eos, dict) else eos
            if not isinstance(eos, str | None):
                raise ValueError(f'eos_token is {eos}')
        except (ValueError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f'{config} is not a tokenizer_config.json ({error}). Get it again.') from error
        return HFTokenizer(name if name.startswith('hf:') else path.name, read_utf8(path), eos)
    ranks = parse_ranks(read_utf8(path), name)
    return tiktoken_encoding(path.name, ranks, PATTERN, max(ranks.values()) + 1)


def read_utf8(path):
    """The text of a file. Raises ValueError that names it if it is not UTF-8."""
    try:
        return path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8: {error}. Get it again, or convert it.') from error


def tiktoken_encoding(name, ranks, pattern, eot_token):
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: eot_token})


def parse_ranks(text, where):
    """{token: rank} from the lines of a .tiktoken file. where: its name, for the error."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f'{where}, line {number}, is not a base64 token and its rank. Check the file.') from error
    if not all(bytes([byte]) in ranks for byte in range(256)) or len(set(ranks.values())) < len(ranks):
        raise ValueError(f'{where} lacks one of the 256 single bytes or has a rank twice. Is the file whole?')
    return ranks


def format_ranks(ranks):
    return ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks.items())


def without_half_pairs(text):
    """
    The text with each half of a surrogate pair replaced. JSON can hold one, UTF-8 and tokenizers
    cannot; tiktoken replaces it by itself.
    """
    return re.sub('[\ud800-\udfff]', '\N{REPLACEMENT CHARACTER}', text)


class HFTokenizer:
    """A Hugging Face tokenizer.json under the names that tiktoken.Encoding uses."""

    def __init__(self, name, text, eos):
        """text: of tokenizer.json. eos: the token that ends a text, or None to look for the usual ones."""
        self.name, self.text = name, text
        package = optional('tokenizers')
        try:
            self.tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f'{name} is not a tokenizer.json: {error}. Check the file.') from error
        self.tokenizer.encode_special_tokens = True  # '</s>' in a document is text, not the end of it
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        self.n_vocab = max(vocab.values()) + 1  # not their number: some ids may be unused
        self.eos = next((token for token in (eos, '</s>', EOT, '<|end_of_text|>', '<eos>') if token in vocab), None)
        if self.eos is None:
            raise ValueError(f'{name} has no end-of-text token that we know. Set eos_token in tokenizer_config.json.')
        self.eot_token = vocab[self.eos]
        plain, whole = (self.tokenizer.encode('a', add_special_tokens=special).ids for special in (False, True))
        before = whole[:whole.index(plain[0])]  # such as <s>
        self.start_token = before[0] if before else self.eot_token

    def encode_ordinary(self, text):
        # as a batch of one: unlike encode() it keeps no offsets, and lets other threads run
        texts = [without_half_pairs(text)]
        return self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)[0].ids

    def decode(self, ids):
        """The text of ids, special tokens such as <s> left out; decode_bytes() shows them."""
        return self.tokenizer.decode(list(ids))

    def decode_bytes(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False).encode()


def start_token(encoding):
    """The token that stands before a text: a Hugging Face tokenizer's own, such as <s>, or else end-of-text."""
    return getattr(encoding, 'start_token', encoding.eot_token)


def from_hub(source, patterns, advice):
    """
    The folder that has the files of 'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION' that match the patterns, downloaded once
    into the hub's cache. Raises ValueError, which says why and ends in the advice, where they cannot be had.
    """
    hub, (repo, _, revision) = optional('huggingface_hub'), source.removeprefix('hf:').partition('@')
    try:
        return Path(hub.snapshot_download(repo, revision=revision or None, allow_patterns=list(patterns)))
    except Exception as error:  # of the name, the network, the proxy, the disk: they share no class
        why = {'RepositoryNotFoundError': f'there is no {repo}, or it is private',
               'RevisionNotFoundError': f'{repo} has no revision {revision}'}.get(
                   type(error).__name__, f'{type(error).__name__}: check name, revision and network')
        raise ValueError(f'{source} could not be had: {why}. Or {advice}') from error


def tokenizer_state(encoding):
    """All that a tokenizer is, as a dict of str and int, from which tokenizer_from_state needs no file or network."""
    if isinstance(encoding, HFTokenizer):
        return {'kind': 'hf', 'name': encoding.name, 'text': encoding.text, 'eos': encoding.eos}
    return {'kind': 'tiktoken', 'name': encoding.name, 'text': format_ranks(encoding._mergeable_ranks),
            'pattern': encoding._pat_str, 'eot_token': encoding.eot_token}


def tokenizer_from_state(state):
    if state['kind'] == 'hf':
        return HFTokenizer(state['name'], state['text'], state['eos'])
    ranks = parse_ranks(state['text'], state['name'])
    return tiktoken_encoding(state['name'], ranks, state['pattern'], state['eot_token'])


def tokenizer_digest(state):
    """16 hex digits that two tokenizers share if they are the same but for their names."""
    content = {key: value for key, value in state.items() if key != 'name'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def byte_characters():
    """{byte: character}: how tokenizer.json writes bytes, as itself where that is printable, else the next from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def train_bpe(texts, vocab_size, path):
    """Train a byte-level BPE of vocab_size tokens, end-of-text included, on an iterable of str; save and return it."""
    if vocab_size < 257:
        raise ValueError(f'A BPE of {vocab_size} tokens cannot hold the 256 bytes and end-of-text. Take 257 or more.')
    package = optional('tokenizers')
    tokenizer = package.Tokenizer(package.models.BPE())
    words = package.pre_tokenizers.Split(package.Regex(PATTERN), 'isolated')
    byte_level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([words, byte_level])
    tokenizer.train_from_iterator(map(without_half_pairs, texts), package.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), show_progress=False))
    byte_of = {char: byte for byte, char in byte_characters().items()}
    vocab = tokenizer.get_vocab()
    merged = [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.get) if len(token) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + merged  # a token's rank says when it was merged
    write_text(path, format_ranks({token: rank for rank, token in enumerate(tokens)}))
    return get_tokenizer(str(path))


def tokenizer_for(name, documents, folder, total_bytes=0):
    """
    get_tokenizer(name), or for 'bpe:8192' a BPE of that vocabulary, trained on documents (as in write_corpus) and kept
    in folder. Of more than 200 MB, by total_bytes, evenly chosen pieces have to do.
    """
    kind, _, vocab_size = name.partition(':')
    if kind != 'bpe':
        return get_tokenizer(name)
    if not vocab_size.isdecimal():
        raise ValueError(f"tokenizer is '{name}'. Write bpe: and the size of its vocabulary, as in bpe:8192.")
    print(f'training a BPE of {vocab_size} tokens')
    pieces = (piece for document in documents for piece, _ in cut(document, MIB))
    pieces = itertools.islice(pieces, 0, None, math.ceil(total_bytes / 2e8) or 1)
    return train_bpe(pieces, int(vocab_size), Path(folder) / 'tokenizer.tiktoken')


# ----------------------------------------------------------------------------- writing token files

# Where a long document may be cut into pieces: before a space that follows a non-space, and after a lone line end. No
# word of PATTERN or of gpt2's reaches across, or is cut otherwise for what comes after: so the tokens stay the same.
CUT = re.compile(r'(?<=\S)(?= )|(?<=\S\n)(?=\S)')


def cut(document, limit):
    """
    Yield (piece, last), the document in pieces of limit to 2 * limit characters; last is True on its last piece. An
    empty document yields none. document: str, or an iterable of str, its consecutive parts. A stretch of limit
    characters with no place to cut is cut anywhere: the text stays the same, the tokens there may not.
    """
    rest, parts = '', [document] if isinstance(document, str) else document
    for part in parts if limit < math.inf else [''.join(parts)]:  # joined once: rest + part copies it all again
        text, start = rest + part, 0
        while len(text) - start > 2 * limit:
            place = CUT.search(text, start + limit, start + 2 * limit)
            end = place.start() if place else start + 2 * limit
            yield text[start:end], False
            start = end
        rest = text[start:]
    if rest:
        yield rest, True


def chunks(splits, limit):
    """Yield (split, [(piece, last), ...]), MIB characters or up to a piece more at a time: the work of a thread."""
    for split, documents in splits.items():
        chunk, size = [], 0
        for document in documents:
            for piece, last in cut(document, limit):
                chunk.append((piece, last))
                size += len(piece)
                if size >= MIB:
                    yield split, chunk
                    chunk, size = [], 0
        if chunk:
            yield split, chunk


def encode(encoding, chunk):
    """Returns the tokens of a chunk (uint32), the places in them just after each document, and its bytes of text."""
    tokens, ends, n_bytes = [], [], 0
    for piece, last in chunk:
        tokens += encoding.encode_ordinary(piece)
        n_bytes += len(piece.encode(errors='replace'))  # JSON can hold half a surrogate pair, UTF-8 cannot
        if last:
            tokens.append(encoding.eot_token)
            ends.append(len(tokens))
    return np.array(tokens, np.uint32), np.array(ends, np.int64), n_bytes


def encode_all(stream, encoding, workers):
    """
    Yield (split, encode(chunk)) in the order of the stream, of which at most 4 chunks per worker are in memory. Workers
    are threads: tokenizers are compiled code, which runs beside Python's own.
    """
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for split, chunk in stream:
            pending.append((split, pool.submit(encode, encoding, chunk)))
            if len(pending) == 4 * workers:
                first, result = pending.popleft()
                yield first, result.result()
        for first, result in pending:
            yield first, result.result()


def write_corpus(folder, encoding, splits, workers=None, report=None, total_bytes=0):
    """
    Tokenize documents into folder and print a summary; the folder changes only when all is done.
    splits: {split: iterable of documents as in cut()}. workers: threads, by default one per core. report: a dict to
    keep in meta.json. total_bytes: of text, for the progress bar; an estimate will do. Raises ValueError if a split has
    no text.
    """
    folder, state = Path(folder), tokenizer_state(encoding)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2 ** 16 else np.uint32)
    limit = MIB if state['kind'] == 'tiktoken' else math.inf  # others may begin each text with a space: never cut
    counts = {split: {'tokens': 0, 'documents': 0, 'bytes': 0} for split in splits}
    ends = {split: [] for split in splits}
    progress, done = Progress(total_bytes, f'tokenizing {folder.name}', enabled=total_bytes > 8 * MIB), 0
    temporary = folder / 'tokens.unfinished'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for split, (tokens, after, n_bytes) in encode_all(chunks(splits, limit), encoding, workers or os.cpu_count()):
            with open(temporary / f'{split}.bin', 'ab') as file:
                file.write(tokens.astype(dtype).tobytes())
            count = counts[split]
            ends[split].append(after + count['tokens'])
            count['tokens'] += len(tokens)
            count['documents'] += len(after)
            count['bytes'] += n_bytes
            done += n_bytes
            progress.update(min(done, progress.total - 1))
        for split in splits:
            if not ends[split]:
                raise ValueError(f'No document is left for the {split} split of {folder.name}. Give it more text.')
            starts = np.concatenate([[0], *ends[split]])[:-1]  # a document starts where the one before it ended
            (temporary / f'{split}_starts.bin').write_bytes(starts.astype(np.int64).tobytes())
        progress.update(progress.total)
        write_text(temporary / 'tokenizer_state.json', json.dumps(state))
        remove_dataset(folder)
        for new in list(temporary.iterdir()):
            os.replace(new, folder / new.name)
    finally:
        shutil.rmtree(temporary)
    finish_dataset(folder, {
        'tokenizer': encoding.name, 'tokenizer_digest': tokenizer_digest(state), 'vocab_size': encoding.n_vocab,
        'dtype': dtype.name, 'splits': counts, 'report': report or {}})


def remove_dataset(folder):
    """Remove what is prepared in folder, meta.json first, so that what is half removed does not look whole."""
    for name in ('meta.json', *(f'{split}{end}.bin' for split in ('train', 'val', 'test') for end in ('', '_starts'))):
        (folder / name).unlink(missing_ok=True)


def finish_dataset(folder, meta):
    """Write meta.json, with which the dataset is whole, and print a summary."""
    names = [f'{split}{end}.bin' for split in meta['splits'] for end in ('', '_starts')]
    checksums = {name: read_through(folder / name, np.uint8)[0] for name in names}
    save_json(folder / 'meta.json', meta | {'checksums': checksums})
    print(f'{folder}: tokenizer {meta["tokenizer"]}, vocabulary {meta["vocab_size"]:,}')
    for split, count in meta['splits'].items():
        print(f'{split:>6} {count["tokens"]:14,} tokens  {count["documents"]:10,} documents  '
              f'{count["bytes"] / count["tokens"]:.2f} bytes per token')


def split_by_hash(identity, val_fraction, test_fraction):
    """'train', 'val' or 'test': by identity alone, so a document stays where it is when others come and go."""
    u = key_of(identity) / 2 ** 64
    return 'val' if u < val_fraction else 'test' if u < val_fraction + test_fraction else 'train'


# ----------------------------------------------------------------------------- reading token files

CHECKED_AT_OPEN = 2 ** 30  # bytes of a token file, above which only train.py reads it through first


@dataclass
class TokenFile:
    tokens: np.memmap  # (n,) uint16 or uint32; each document is followed by end-of-text
    starts: np.memmap  # (documents,) int64, where each begins
    meta: dict         # meta.json
    tokenizer_state: dict
    checksum: str | None = None  # of the file of tokens, where it was read through


def open_tokens(dataset, split, check=False):
    """
    dataset: the name of a folder in data/, or the path of one; split: 'train', 'val' or 'test'. Returns a TokenFile.
    check: True compares a large file with its checksum too, which takes about a second a GB.
    Raises FileNotFoundError if it is not prepared or has no such split, ValueError if a file is damaged.
    """
    folder = ROOT / 'data' / dataset
    folder = folder if folder.is_dir() else Path(dataset)
    if not (folder / 'meta.json').is_file():
        if (folder / 'prepare.py').is_file():
            prepare = os.path.relpath(folder / 'prepare.py')
            raise FileNotFoundError(f'Dataset {dataset} is not prepared. Run: python {prepare}')
        prepared = sorted(path.parent.name for path in (ROOT / 'data').glob('*/meta.json'))
        raise FileNotFoundError(f'There is no dataset {dataset}. Prepared are: {", ".join(prepared) or "none"}.')
    try:
        meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
        state = json.loads((folder / 'tokenizer_state.json').read_text(encoding='utf-8'))
        dtype, whole = np.dtype(meta['dtype']), tokenizer_digest(state) == meta['tokenizer_digest']
        counts = {split: (count['tokens'], count['documents']) for split, count in meta['splits'].items()}
        sizes = [meta['vocab_size'], *itertools.chain(*counts.values())]
        whole = whole and dtype in (np.uint16, np.uint32) and type(meta['tokenizer']) is str
        whole = whole and type(meta.get('checksums', {})) is dict  # a data set of long ago has none
        whole = whole and all(type(size) is int and size > 0 for size in sizes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f'{folder}: meta.json or tokenizer_state.json is damaged. Prepare the dataset again.')
    if split not in counts:
        raise FileNotFoundError(f'Dataset {dataset} has no split {split}. It has {", ".join(counts)}.')
    n_tokens, n_documents = counts[split]
    tokens = map_array(folder / f'{split}.bin', dtype, n_tokens)
    starts = map_array(folder / f'{split}_starts.bin', np.dtype(np.int64), n_documents)
    if starts[0] != 0 or starts[-1] >= n_tokens or (starts[1:] <= starts[:-1]).any():
        raise ValueError(f'{folder}/{split}_starts.bin is damaged: where documents start must rise '
                         f'from 0 to less than {n_tokens:,}. Prepare the dataset again.')
    data = TokenFile(tokens, starts, meta, state)
    if check or tokens.nbytes < CHECKED_AT_OPEN:
        data.checksum = require_whole(folder, split, data)
    return data


def require_whole(folder, split, data):
    """The checksum of a split's tokens. Raises ValueError if a file is not what was written."""
    checksums = data.meta.get('checksums', {})
    if not checksums:
        note(f'{folder} was prepared before token files had checksums: '
             'damage to it may go unnoticed.')
    if data.tokens.nbytes >= CHECKED_AT_OPEN:
        gigabytes = data.tokens.nbytes / 1e9
        note(f'reading {folder}/{split}.bin through, {gigabytes:.1f} GB, to find damage')
    found, highest = read_through(folder / f'{split}.bin', data.tokens.dtype)
    if highest >= data.meta['vocab_size']:
        raise ValueError(f'{folder}/{split}.bin is damaged: it has token {highest}, but the '
                         f"vocabulary ends before {data.meta['vocab_size']}. "
                         'Prepare the dataset again.')
    starts_found, _ = read_through(folder / f'{split}_starts.bin', data.starts.dtype)
    for name, checksum in ((f'{split}.bin', found), (f'{split}_starts.bin', starts_found)):
        if checksums and checksums.get(name) != checksum:
            raise ValueError(f'{folder}/{name} is damaged: its checksum is {checksum}, by '
                             f'meta.json it should be {checksums.get(name)}. '
                             'Prepare the dataset again.')
    return found


def read_through(path, dtype):
    """CRC-32 of a file of numbers, as 8 hex digits, and the highest of them."""
    stat = path.stat()
    return read_version(path, dtype, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=64)
def read_version(path, dtype, *version):
    """read_through() of a version of a file: stages open the same one for each row of a table."""
    checksum, highest = 0, 0
    with open(path, 'rb') as file:
        while part := file.read(16 * MIB):
            checksum = zlib.crc32(part, checksum)
            highest = max(highest, int(np.frombuffer(part, dtype).max()))
    return f'{checksum:08x}', highest


def map_array(path, dtype, count):
    """The array of count numbers in a file, mapped, not read. Raises ValueError if the file has another size."""
    found, expected = path.stat().st_size if path.is_file() else 0, count * dtype.itemsize
    if found != expected:
        raise ValueError(f'{path} has {found:,} bytes, by meta.json it should have {expected:,}. Prepare it again.')
    return np.memmap(path, dtype, 'r')


def documents(data):
    """Yield (start, end) for each document of a TokenFile: data.tokens[start:end] is its text, end-of-text left out."""
    for start, after in itertools.pairwise(itertools.chain(data.starts, [len(data.tokens)])):
        yield int(start), int(after) - 1


# ----------------------------------------------------------------------------- sampling

SLOTS = 10_000  # each cycle of so many samples holds the weights of a mixture exactly


def key_of(*parts):
    """A 64-bit number from anything that prints; unlike hash(), the same in every process."""
    text = '/'.join(map(str, parts)).encode(errors='surrogatepass')  # a file name may be no UTF-8
    return int.from_bytes(hashlib.sha256(text).digest()[:8], 'big')


@functools.lru_cache(maxsize=8)
def shuffled(n, key):
    """range(n) in an order that key alone decides, (n,) int64: numpy never changes what Philox's raw numbers are."""
    return np.random.Philox(key=key).random_raw(n).argsort(kind='stable')


@functools.lru_cache(maxsize=4)
def mixture_cycle(slots, key):
    """
    The sources of SLOTS samples in a row, shuffled by key. slots: how many of them each source has. Returns source
    (SLOTS,) and ordinal (SLOTS,): how many of that source's came before it.
    """
    source, ordinal = np.repeat(np.arange(len(slots)), slots)[shuffled(SLOTS, key)], np.empty(SLOTS, np.int64)
    for s, count in enumerate(slots):
        ordinal[source == s] = np.arange(count)
    return source, ordinal


class Windows:
    """
    Training and evaluation windows of a dataset, or of a mixture by weight such as 'slimpajama:0.694,starcoder:0.306',
    of which val and test are the first source's.
    A window is a block of block_size + 1 consecutive tokens, that is block_size predictions; blocks do not overlap.
    check: as in open_tokens(). checksums: {source: checksum of its tokens}, which tells its text
    from others.
    """

    def __init__(self, dataset, split, block_size, seed=0, check=False):
        self.dataset, self.split, self.block_size, self.seed = dataset, split, block_size, seed
        parts = dataset.split(',') if split == 'train' else dataset.split(',')[:1]  # others may have no such split
        names, weights = zip(*(parse_part(part) for part in parts), strict=True)
        sources = [open_tokens(name, split, check) for name in names]
        self.checksums = {name: source.checksum for name, source in zip(names, sources)}
        first, self.blocks = sources[0], []
        for name, source in zip(names, sources, strict=True):
            if source.meta['tokenizer_digest'] != first.meta['tokenizer_digest']:
                one, other = (f'{s.meta["tokenizer"]} {s.meta["tokenizer_digest"]}' for s in (first, source))
                raise ValueError(f'{names[0]} has tokenizer {one}, {name} has {other}. Prepare both with the same one.')
            n = len(source.tokens) // (block_size + 1)
            if n == 0:
                raise ValueError(f'Split {split} of {name} has {len(source.tokens):,} tokens, less than a window of '
                                 f'{block_size:,} + 1. Choose a shorter one or prepare more text.')
            self.blocks.append(source.tokens[:n * (block_size + 1)].reshape(n, block_size + 1))
        exact = np.array(weights) / sum(weights) * SLOTS
        slots = np.floor(exact).astype(int)
        slots[np.argsort(slots - exact, kind='stable')[:SLOTS - slots.sum()]] += 1  # to the largest remainders
        if not all(slots):
            raise ValueError(f'A part of {dataset} has hardly any weight, no sample in {SLOTS:,}. Leave it out.')
        self.slots = tuple(slots.tolist())
        self.vocab_size, self.tokenizer_state = first.meta['vocab_size'], first.tokenizer_state

    def batch(self, step, batch_size, rows=slice(None)):
        """
        The windows of a step, (n_rows, block_size + 1) int64: a function of (seed, split, step) alone. rows: a slice of
        them, for this rank or micro-batch. Each source is read epoch after epoch, each block once in each, every time
        in another order.
        """
        windows = []
        for sample in range(step * batch_size, (step + 1) * batch_size)[rows]:
            cycle, slot = divmod(sample, SLOTS)
            sources, ordinals = mixture_cycle(self.slots, key_of(self.seed, self.split, 'cycle', cycle))
            s = int(sources[slot])
            blocks = self.blocks[s]
            epoch, i = divmod(cycle * self.slots[s] + int(ordinals[slot]), len(blocks))
            windows.append(blocks[shuffled(len(blocks), key_of(self.seed, self.split, s, epoch))[i]])
        return np.array(windows, np.int64).reshape(-1, self.block_size + 1)

    def fixed(self, n, spacing=None):
        """
        For evaluation: n windows evenly spaced over the split, in order, or fewer if they would start less than
        `spacing` tokens apart (None: no overlap). Returns (n, block_size + 1) int64.
        """
        tokens, size = self.blocks[0].reshape(-1), self.block_size + 1
        spacing = spacing or size
        places = (len(tokens) - size) // spacing + 1
        n = min(n, places)
        starts = np.arange(n) * places // n * spacing
        return tokens[starts[:, None] + np.arange(size)].astype(np.int64)


def parse_part(part):
    """('slimpajama', 0.694) from 'slimpajama:0.694', the weight being 1 where there is none."""
    name, _, weight = part.strip().partition(':')
    if not name or not re.fullmatch(r'|\d*\.?\d+([eE]-?\d+)?', weight) or float(weight or 1) == 0:
        raise ValueError(f"dataset has the part '{part}'. Write NAME:WEIGHT, the weight being a number above 0.")
    return name, float(weight or 1)
