"""
Tokenizers and token files: write, read, sample.

A prepared dataset is a folder, data/NAME, that is complete by itself:
    train.bin, val.bin, test.bin  the tokens of a split, one flat array; each document is followed
                                  by end-of-text
    train_starts.bin, ...         where the documents of the split start, int64
    tokenizer_state.json          the whole tokenizer, in the form that checkpoints hold
    meta.json                     what the files hold, and their checksums;
                                  written last: if meta.json exists, the other files are complete
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from lib.answers import OnlyWriter, note, optional, progress_bar, save_json, write_text
from lib.errors import ROOT, UserError, fault_of, require_kinds

MIB = 2 ** 20
EOT = '<|endoftext|>'
SPLITS = 'train', 'val', 'test'
# This pattern cuts text into words before BPE merges bytes. Every .tiktoken file uses it. It is
# GPT-4's pattern, written so that both tiktoken and tokenizers can read it. It matches
# contractions, words, up to 3 digits, punctuation, line ends, and other white space.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r'|\s*[\r\n]+|\s+(?!\S)|\s+')


# ---------------------------------------------------------------------- tokenizers

def get_tokenizer(name):
    """
    A tiktoken.Encoding, or an HFTokenizer, which has the same methods as far as we use them. name:
    'gpt2';
    'bytes': 256 bytes and end-of-text;
    FILE.tiktoken: each line has a base64 token and its rank; end-of-text is the highest rank + 1;
    FILE.json: a Hugging Face tokenizer.json;
    'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION': a tokenizer.json from the hub.
    """
    if name == 'bytes':
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken_encoding(name, ranks, r'[\s\S]{1,64}', 256)
    if name == 'gpt2':
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:
            raise UserError('The ranks of gpt2 could not be downloaded; gpt2 needs the network '
                            'once. Connect, or use --tokenizer=bytes or a local .tiktoken '
                            'file.') from error
    path = Path(name)
    if name.startswith('hf:'):
        advice = 'give a file that you have: --tokenizer=FOLDER/tokenizer.json.'
        path = from_hub(name, ['tokenizer*.json'], advice) / 'tokenizer.json'
    if path.suffix not in ('.tiktoken', '.json'):
        raise UserError(f"There is no tokenizer '{name}'. Choose gpt2, bytes, FILE.tiktoken, "
                        'FILE.json or hf:ORG/NAME.')
    with fault_of(path, 'a tokenizer file', 'Check the name, or get it again.'):
        text = path.read_text(encoding='utf-8')
        if path.suffix == '.json':
            shown = name if name.startswith('hf:') else path.name
            return HFTokenizer(shown, text, end_token(path.with_name('tokenizer_config.json')))
    ranks = parse_ranks(text, name)
    return tiktoken_encoding(path.name, ranks, PATTERN, max(ranks.values()) + 1)


def end_token(path):
    """The eos_token of a tokenizer_config.json, or None if the file or the entry is missing."""
    if not path.is_file():
        return None
    with fault_of(path, 'a tokenizer_config.json', 'Get it again.'):
        token = json.loads(path.read_text(encoding='utf-8')).get('eos_token')
        token = token['content'] if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise TypeError(f'eos_token is {token}')
        return token


def tiktoken_encoding(name, ranks, pattern, eot_token):
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={EOT: eot_token})


def parse_ranks(text, where):
    """{token: rank} from the text of a .tiktoken file. where: the file's name, for the error."""
    ranks = {}
    with fault_of(where, 'a list of base64 tokens and their ranks', 'Check the file.'):
        for line in text.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        if not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError('one of the 256 single bytes is missing')
        if len(set(ranks.values())) < len(ranks):
            raise ValueError('the file has a rank twice')
    return ranks


def format_ranks(ranks):
    return ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks.items())


def without_half_pairs(text):
    """
    Replace each half of a surrogate pair. JSON can hold such a half, but UTF-8 and tokenizers
    cannot. tiktoken replaces it without our help.
    """
    return re.sub('[\ud800-\udfff]', '\N{REPLACEMENT CHARACTER}', text)


class HFTokenizer:
    """A Hugging Face tokenizer.json under the names that tiktoken.Encoding uses."""

    def __init__(self, name, text, eos):
        """
        text: of tokenizer.json. eos: the token that ends a text; None: look for the usual ones.
        """
        self.name, self.text = name, text
        package = optional('tokenizers')
        try:
            self.tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises no narrower class
            raise UserError(f'{name} is not a tokenizer.json: {error}. Check the file.') from error
        self.tokenizer.encode_special_tokens = True  # '</s>' in a document is text, not its end
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        self.n_vocab = max(vocab.values()) + 1  # not len(vocab), because some ids may be unused
        usual = eos, '</s>', EOT, '<|end_of_text|>', '<eos>'
        self.eos = next((token for token in usual if token in vocab), None)
        if self.eos is None:
            raise UserError(f'{name} has no end-of-text token that we know. Set eos_token in '
                            'tokenizer_config.json.')
        self.eot_token = vocab[self.eos]
        # The token before a text, such as <s>. If the tokenizer has none: end-of-text.
        plain = self.tokenizer.encode('a', add_special_tokens=False).ids
        first = self.tokenizer.encode('a').ids[0]
        self.start_token = self.eot_token if first == plain[0] else first

    def encode_ordinary(self, text):
        # A batch of one. Unlike encode(), this keeps no offsets and lets other threads run.
        batch = [without_half_pairs(text)]
        return self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)[0].ids

    def decode(self, ids):
        """The text of ids, without special tokens such as <s>. decode_bytes() keeps these."""
        return self.tokenizer.decode(list(ids))

    def decode_bytes(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False).encode()


def start_token(encoding):
    """
    The token before a text: the start token of a Hugging Face tokenizer, such as <s>, or
    end-of-text if there is none.
    """
    return getattr(encoding, 'start_token', encoding.eot_token)


def from_hub(source, patterns, advice):
    """
    Download the files of a source that match the patterns, once, into the hub's cache. source:
    'hf:ORG/NAME' or 'hf:ORG/NAME@REVISION'. Returns their folder. If the download fails, raises
    UserError with the reason and the advice.
    """
    hub = optional('huggingface_hub')
    repo, _, revision = source.removeprefix('hf:').partition('@')
    try:
        return Path(hub.snapshot_download(repo, revision=revision or None,
                                          allow_patterns=list(patterns)))
    except Exception as error:  # errors of name, network, proxy and disk share no class
        raise UserError(f'{source} could not be downloaded ({type(error).__name__}): check name, '
                        f'revision and network. Or {advice}') from error


def tokenizer_state(encoding):
    """
    The whole tokenizer as a dict of str and int. tokenizer_from_state() rebuilds it without files
    or network.
    """
    if isinstance(encoding, HFTokenizer):
        return {'kind': 'hf', 'name': encoding.name, 'text': encoding.text, 'eos': encoding.eos}
    return {'kind': 'tiktoken', 'name': encoding.name,
            'text': format_ranks(encoding._mergeable_ranks), 'pattern': encoding._pat_str,
            'eot_token': encoding.eot_token}


def tokenizer_from_state(state):
    if state is None:
        raise UserError('The checkpoint came without a tokenizer. Put the tokenizer.json of the '
                        'model, or of the model that it was trained from, into its folder. If that '
                        "is the hub's cache, copy its files into another folder first.")
    with fault_of(f"tokenizer {state.get('name')}", 'whole', 'Get its file again.'):
        require_tokenizer_kinds(state)
        if state['kind'] == 'hf':
            return HFTokenizer(state['name'], state['text'], state['eos'])
        ranks = parse_ranks(state['text'], state['name'])
        return tiktoken_encoding(state['name'], ranks, state['pattern'], state['eot_token'])


def require_tokenizer_kinds(state):
    """Raise an error of MALFORMED if an entry of a tokenizer's state has the wrong type."""
    own = {'hf': {'eos': str | None}, 'tiktoken': {'pattern': str, 'eot_token': int}}
    require_kinds(state, name=str, text=str, **own[state['kind']])
    if state.get('pattern') == '':  # tiktoken would panic
        raise ValueError('pattern is empty')


def tokenizer_digest(state):
    """A digest of 16 hex digits. Tokenizers that differ only in their names have the same."""
    content = {key: value for key, value in state.items() if key != 'name'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def byte_characters():
    """
    {byte: character}: how tokenizer.json writes bytes. A printable byte other than space is its own
    character. Each other byte gets the next code point from 256 on.
    """
    others = itertools.count(256)
    return {byte: chr(byte if chr(byte).isprintable() and byte != ord(' ') else next(others))
            for byte in range(256)}


def word_splitter(pattern):
    """A pre-tokenizer of the package tokenizers that cuts text into words as tiktoken does."""
    package = optional('tokenizers')
    words = package.pre_tokenizers.Split(package.Regex(pattern), 'isolated')
    byte_level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return package.pre_tokenizers.Sequence([words, byte_level])


def train_bpe(texts, vocab_size, path):
    """
    Train a byte-level BPE and save it. Returns the tokenizer. texts: an iterable of str.
    vocab_size: number of tokens, including end-of-text.
    """
    package, characters = optional('tokenizers'), byte_characters()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = word_splitter(PATTERN)
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=list(characters.values()), show_progress=False)
    tokenizer.train_from_iterator(map(without_half_pairs, texts), trainer)
    # A token's rank is its place in the order of the merges. The single bytes come first.
    byte_of = {character: byte for byte, character in characters.items()}
    ranks = {bytes([byte]): byte for byte in range(256)}
    vocab = tokenizer.get_vocab()
    for token in sorted(vocab, key=vocab.get):
        ranks.setdefault(bytes(map(byte_of.get, token)), len(ranks))
    write_text(path, format_ranks(ranks))
    return get_tokenizer(str(path))


def tokenizer_for(name, documents, folder, total_bytes=0):
    """
    get_tokenizer(name), or for 'bpe:8192' a BPE of that vocabulary size, trained on the documents
    (as in write_corpus) and saved in folder. total_bytes: of text. If it is more than 200 MB, the
    BPE is trained on evenly spaced pieces of about 200 MB in total.
    """
    kind, _, vocab_size = name.partition(':')
    if kind != 'bpe':
        return get_tokenizer(name)
    if not vocab_size.isdecimal() or int(vocab_size) < 257:
        raise UserError(f"tokenizer is '{name}'. Write bpe: and the size of its vocabulary, as in "
                        'bpe:8192: the 256 bytes, end-of-text, and more.')
    print(f'training a BPE of {vocab_size} tokens')
    pieces = (piece for document in documents for piece, _ in cut(document, MIB))
    pieces = itertools.islice(pieces, 0, None, math.ceil(total_bytes / 2e8) or 1)
    return train_bpe(pieces, int(vocab_size), Path(folder) / 'tokenizer.tiktoken')


# ---------------------------------------------------------------------- writing token files

# Places where a long document may be cut into pieces: before a space that follows a non-space, and
# after a single line end. No word of PATTERN or of gpt2's pattern crosses such a place, and the
# text after it does not change the words before it. So the tokens stay the same.
CUT = re.compile(r'(?<=\S)(?= )|(?<=\S\n)(?=\S)')


def cut(document, limit):
    """
    Cut a document into pieces of limit to 2 * limit characters. Yields (piece, is_last); an empty
    document yields nothing. document: str, or an iterable of its consecutive parts. If a stretch of
    limit characters has no place to cut, it is cut anywhere: the text stays the same, but the
    tokens there may change.
    """
    parts = [document] if isinstance(document, str) else document
    if limit == math.inf:
        parts = [''.join(parts)]  # join once, because rest + part would copy the text each time
    rest = ''
    for part in parts:
        text, start = rest + part, 0
        while len(text) - start > 2 * limit:
            place = CUT.search(text, start + limit, start + 2 * limit)
            end = place.start() if place else start + 2 * limit
            yield text[start:end], False
            start = end
        rest = text[start:]
    if rest:
        yield rest, True


def chunks(documents, limit):
    """Yield lists of (piece, is_last), each of about MIB characters. A thread encodes one list."""
    chunk, size = [], 0
    for document in documents:
        for piece, is_last in cut(document, limit):
            chunk.append((piece, is_last))
            size += len(piece)
            if size >= MIB:
                yield chunk
                chunk, size = [], 0
    yield chunk


def encode(encoding, chunk):
    """The tokens of a chunk, the indices after each document's end, and the chunk's text bytes."""
    tokens, ends, n_bytes = [], [], 0
    for piece, is_last in chunk:
        tokens += encoding.encode_ordinary(piece)
        n_bytes += len(piece.encode(errors='replace'))
        if is_last:
            tokens.append(encoding.eot_token)
            ends.append(len(tokens))
    return np.array(tokens, token_type(encoding)), np.array(ends, np.int64), n_bytes


def write_split(folder, split, documents, encoding, workers, bar):
    """
    Tokenize documents into the files of a split. Returns the numbers of tokens, documents and text
    bytes. workers: number of threads. Threads are enough, because tokenizers are compiled code that
    runs in parallel.
    """
    # Some Hugging Face tokenizers put a space before each text, so they would add one per piece.
    limit = math.inf if isinstance(encoding, HFTokenizer) else MIB
    stream, starts, n_tokens, n_bytes = chunks(documents, limit), [[0]], 0, 0
    with ThreadPoolExecutor(workers) as pool, open(folder / f'{split}.bin', 'wb') as file:
        while group := list(itertools.islice(stream, 4 * workers)):  # to limit memory
            for tokens, ends, size in pool.map(functools.partial(encode, encoding), group):
                tokens.tofile(file)
                starts.append(ends + n_tokens)  # a document starts where the previous ends
                n_tokens += len(tokens)
                n_bytes += size
                bar.update(size)
    starts = np.concatenate(starts)[:-1].astype(np.int64)
    starts.tofile(folder / f'{split}_starts.bin')
    return {'tokens': n_tokens, 'documents': len(starts), 'bytes': n_bytes}


def token_type(encoding):
    return np.dtype(np.uint16 if encoding.n_vocab <= 2 ** 16 else np.uint32)


def write_corpus(folder, encoding, splits, workers=None, report=None, total_bytes=0):
    """
    Tokenize documents into folder and print a summary. The folder changes only after everything is
    tokenized. splits: {split: iterable of documents as in cut()}. workers: number of threads, by
    default one per core. report: a dict to keep in meta.json. total_bytes: of text, for the
    progress bar; may be an estimate. Raises UserError if a split has no text.
    """
    workers = workers or os.cpu_count()
    with (new_dataset(folder, encoding, report) as (temporary, counts),
          progress_bar(total_bytes, f'tokenizing {folder}', total_bytes > 8 * MIB) as bar):
        for split, documents in splits.items():
            counts[split] = write_split(temporary, split, documents, encoding, workers, bar)


@contextlib.contextmanager
def new_dataset(folder, encoding, report=None):
    """
    A context that yields a temporary folder for the files of all splits, and an empty dict for what
    write_split() returns for each split. At the end the new files replace the old ones in `folder`.
    After an error the old files remain. Raises UserError if a split has no text.
    """
    folder, counts = Path(folder), {}
    temporary, lock = folder / 'tokens.unfinished', only_dataset(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary, counts
        checksums = {}
        for split, count in counts.items():
            if not count['tokens']:
                raise UserError(f'No document is left for the {split} split of {folder.name}. Give '
                                'it more text.')
            for name in split_files(split):
                checksums[name] = checksum_of(temporary / name)
        state = tokenizer_state(encoding)
        write_text(temporary / 'tokenizer_state.json', json.dumps(state))
        # Remove meta.json first and write it last, so that a half-replaced folder looks unprepared.
        for split in SPLITS:
            for name in ('meta.json', *split_files(split)):
                (folder / name).unlink(missing_ok=True)
        for path in list(temporary.iterdir()):
            os.replace(path, folder / path.name)
        save_json(folder / 'meta.json', {
            'tokenizer': encoding.name, 'tokenizer_digest': tokenizer_digest(state),
            'vocab_size': encoding.n_vocab, 'dtype': token_type(encoding).name, 'splits': counts,
            'report': report or {}, 'checksums': checksums})
    finally:
        shutil.rmtree(temporary)
        lock.close()
    print(f'{folder}: tokenizer {encoding.name}, vocabulary {encoding.n_vocab:,}')
    for split, count in counts.items():
        print(f'{split:>6} {count["tokens"]:14,} tokens  {count["documents"]:10,} documents  '
              f'{count["bytes"] / count["tokens"]:.2f} bytes per token')


def only_dataset(folder):
    """
    The OnlyWriter of a dataset. new_dataset() takes it when it writes. A script that prepares a
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
                            f"{', '.join(meta['splits'])}.")
        count, checksums = meta['splits'][split], meta['checksums']
        file, arrays = open(folder / f'{split}.bin', 'rb'), []
        opened = size_and_time(file)
        for name, dtype, n in zip(split_files(split), (meta['dtype'], 'int64'),
                                  (count['tokens'], count['documents'])):
            arrays.append(open_array(folder / name, dtype, n, checksums[name], check))
    return TokenFile(*arrays, meta, state, checksums[f'{split}.bin'], file, opened)


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
    """True if the folder holds a whole dataset with this report."""
    try:
        return all(open_tokens(str(folder.resolve()), split).meta['report'] == report
                   for split in splits)
    except UserError:  # not prepared yet, or damaged
        return False


def dataset_folder(dataset):
    folder = ROOT / 'data' / dataset
    if not folder.is_dir():
        folder = Path(dataset)
    if (folder / 'meta.json').is_file():
        return folder
    if (folder / 'prepare.py').is_file():
        script = os.path.relpath(folder / 'prepare.py')
        raise UserError(f'Dataset {dataset} is not prepared. Run: python {script}')
    prepared = sorted(path.parent.name for path in (ROOT / 'data').glob('*/meta.json'))
    raise UserError(f'There is no dataset {dataset}. Prepared are: '
                    f'{", ".join(prepared) or "none"}.')


def checksum_of(path):
    """CRC-32 of a file, as 8 hex digits. Read, not mapped, because a map would fill the memory."""
    checksum = 0
    with open(path, 'rb') as file:
        while part := file.read(MIB):
            checksum = zlib.crc32(part, checksum)
    return f'{checksum:08x}'


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
        self.tokenizer_state = data.tokenizer_state

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
    name, _, weight = part.strip().partition(':')
    weight = weight or '1'
    if not name or not re.fullmatch(r'\d*\.?\d+([eE]-?\d+)?', weight) or float(weight) == 0:
        raise UserError(f"dataset has the part '{part}'. Write NAME:WEIGHT, where the weight is a "
                        'number above 0.')
    return name, float(weight)
