"""
Text to token files: tokenizers, and the writer that data/NAME/prepare.py calls. data.py reads what
it writes.
"""

import base64
import json
import math
import os
import re
import sys
import sysconfig
from itertools import chain, islice
from pathlib import Path

from configurator import UserError

import numpy as np
import tiktoken
from tqdm import tqdm

from common import save_json
from data import stable_hash

EOT = '<|endoftext|>'
# This pattern cuts text into words before BPE merges bytes. Every .tiktoken file uses it. It is
# GPT-4's pattern, written so that both tiktoken and tokenizers can read it. It matches
# contractions, words, up to 3 digits, punctuation, line ends, and other white space.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r'|\s*[\r\n]+|\s+(?!\S)|\s+')
SPLITS = 'train', 'val', 'test'


# ---------------------------------------------------------------------- tokenizers

class HFTokenizer:
    """A tokenizer.json of Hugging Face under the names that tiktoken.Encoding uses."""

    def __init__(self, name, text, eos=None):
        """text: of tokenizer.json. eos: the token that ends a text; None: a usual one."""
        self.name, self.text = name, text
        try:
            from tokenizers import Tokenizer
            self.tokenizer = Tokenizer.from_str(text)
            self.tokenizer.encode_special_tokens = True  # '</s>' in a document is text, no end
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            vocab = self.tokenizer.get_vocab()
            usual = [eos] if eos else ['</s>', EOT, '<|end_of_text|>', '<|im_end|>', '<eos>']
            self.eos = [token for token in usual if token in vocab][0]
            first, plain = self.tokenizer.encode('a').ids[0], self.encode_ordinary('a')[0]
        except BaseException as error:  # panics of the library share no class with its errors
            raise UserError(f'{name} cannot be used ({error!r}). Is it a tokenizer.json? Does it '
                            'lack the eos_token of the tokenizer_config.json beside it? Is the '
                            'package tokenizers missing (pip install ".[hf]")?') from error
        self.eot_token = vocab[self.eos]
        self.n_vocab = max(vocab.values()) + 1  # not len(vocab), because some ids may be unused
        # The token before a text, such as <s>. If the tokenizer has none: end-of-text.
        self.start_token = self.eot_token if first == plain else first

    def encode_ordinary(self, text):
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts):
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in encoded]

    def decode(self, ids):
        return self.tokenizer.decode(list(ids))

    def decode_bytes(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False).encode()


def tokenizer_state(encoding):
    """The whole tokenizer as a dict of str and int, from which get_tokenizer() rebuilds it."""
    if isinstance(encoding, HFTokenizer):
        return {'kind': 'hf', 'name': encoding.name, 'text': encoding.text, 'eos': encoding.eos}
    lines = [f'{base64.b64encode(token).decode()} {rank}\n'
             for token, rank in encoding._mergeable_ranks.items()]
    return {'kind': 'tiktoken', 'name': encoding.name, 'text': ''.join(lines),
            'pattern': encoding._pat_str, 'eot_token': encoding.eot_token}


def parse_ranks(text):
    """{token: rank} of a .tiktoken file: each line has a token in base64 and its rank."""
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, text.splitlines())}


def get_tokenizer(source):
    """
    A tiktoken.Encoding, or an HFTokenizer, which has the same methods as far as we use them.
    source: a state of tokenizer_state(), or a name:
    bytes         256 bytes and end-of-text
    gpt2          downloaded once by tiktoken
    FILE.tiktoken end-of-text is the highest rank + 1
    FILE.json     a tokenizer.json; hf:ORG/NAME or hf:ORG/NAME@REVISION: one from the hub
    data/NAME     that of a prepared dataset
    """
    if source is None:
        raise UserError('The model came without a tokenizer. Put its tokenizer.json into its '
                        'folder.')
    if isinstance(source, dict):
        name, text = source['name'], source['text']
        if source['kind'] == 'hf':
            return HFTokenizer(name, text, source['eos'])
        return byte_pairs(name, parse_ranks(text), source['pattern'], source['eot_token'])
    if source == 'bytes':
        ranks = {bytes([byte]): byte for byte in range(256)}
        return byte_pairs(source, ranks, r'[\s\S]{1,64}', 256)
    if source == 'gpt2':
        return tiktoken.get_encoding(source)
    path = Path(source)
    if source.startswith('hf:'):
        from huggingface_hub import snapshot_download
        repo, _, revision = source[3:].partition('@')
        path = Path(snapshot_download(repo, revision=revision or None,
                                      allow_patterns=['tokenizer*.json']), 'tokenizer.json')
    if (path / 'meta.json').is_file():
        return get_tokenizer(json.loads((path / 'meta.json').read_text())['tokenizer'])
    if not path.is_file():
        raise UserError(f"There is no tokenizer '{source}'. Choose bytes, gpt2, FILE.tiktoken, "
                        'FILE.json, hf:ORG/NAME or a prepared dataset.')
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.json':
        beside = path.with_name('tokenizer_config.json')
        eos = json.loads(beside.read_text()).get('eos_token') if beside.is_file() else None
        return HFTokenizer(source, text, eos['content'] if isinstance(eos, dict) else eos)
    ranks = parse_ranks(text)
    return byte_pairs(path.name, ranks, PATTERN, max(ranks.values()) + 1)


def byte_pairs(name, ranks, pattern, eot_token):
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={EOT: eot_token})


def start_token(encoding):
    """The token before a text: <s> of some Hugging Face tokenizers, else end-of-text."""
    return getattr(encoding, 'start_token', encoding.eot_token)


def train_bpe(documents, vocab_size):
    """A byte-level BPE of vocab_size tokens, with end-of-text, trained on an iterable of str."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    trained = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERN), 'isolated')
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    trained.decoder = decoders.ByteLevel()
    pieces = chain.from_iterable(map(cut, documents))
    trained.train_from_iterator(pieces, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT], show_progress=False,
        initial_alphabet=byte_level.alphabet()))
    return HFTokenizer(f'bpe_{vocab_size}', trained.to_str(), EOT)


def tokenizer_for(name, documents):
    """get_tokenizer(name), or for 'bpe:8192' a BPE of that vocabulary, trained on the documents."""
    kind, _, size = name.partition(':')
    return train_bpe(documents, int(size)) if kind == 'bpe' else get_tokenizer(name)


# ---------------------------------------------------------------------- writing token files

# Where a long document may be cut into pieces: before a space that follows a non-space, and after
# a single line end. No word of PATTERN or of gpt2's crosses such a place, so the tokens stay the
# same. A stretch without one is cut anywhere, because tiktoken fails on 1,000,000 blanks.
CUT = re.compile(r'(?<=\S)(?= )|(?<=\S\n)(?=\S)')


def cut(document, limit=2 ** 17):
    """Consecutive pieces of a document, each of `limit` to 2 * limit characters."""
    start = 0
    while len(document) - start > 2 * limit:
        place = CUT.search(document, start + limit, start + 2 * limit)
        end = place.start() if place else start + 2 * limit
        yield document[start:end]
        start = end
    yield document[start:]


def next_texts(rows, size=2 ** 22):
    """The texts of the next rows, `size` characters or a little more; [] at the end."""
    texts = []
    for row in rows:
        texts.append(row if isinstance(row, str) else row['text'])
        size -= len(texts[-1])
        if size < 0:
            break
    return texts


def encode_documents(encoding, texts):
    """The ids of each text that is not empty, end-of-text included. Pieces share the threads."""
    # Another tokenizer.json may put a space before each text, and so before each piece.
    in_pieces = json.dumps(PATTERN) in getattr(encoding, 'text', json.dumps(PATTERN))
    documents = [list(cut(text)) if in_pieces else [text] for text in texts if text]
    ids = iter(encoding.encode_ordinary_batch(list(chain(*documents))))
    for pieces in documents:
        yield [*chain(*islice(ids, len(pieces))), encoding.eot_token]


def write_split(folder, split, encoding, dtype, documents, max_tokens, made_of):
    """
    Write FILE.part of a split, up to the document that reaches max_tokens. documents: an iterable
    of str, or of {'text': str} as a stream of the package datasets. A stream goes on where a killed
    run was, if that was made of the same. Returns how many tokens and documents there are.
    """
    progress, n_tokens, n_documents = folder / f'{split}_progress.part', 0, 0
    is_stream = hasattr(documents, 'load_state_dict')
    if is_stream and progress.exists():
        saved = json.loads(progress.read_text())
        if saved['made_of'] == made_of:
            documents.load_state_dict(saved['stream'])
            n_tokens, n_documents = saved['tokens'], saved['documents']
            print(f'{split}: goes on after {n_tokens:,} tokens')
    rows = iter(tqdm(documents, split, disable=None, unit=' documents'))
    with (open(folder / f'{split}.bin.part', 'ab') as tokens,
          open(folder / f'{split}_starts.bin.part', 'ab') as starts):
        tokens.truncate(n_tokens * np.dtype(dtype).itemsize)
        starts.truncate(n_documents * 8)
        while n_tokens < max_tokens and (texts := next_texts(rows)):
            for ids in encode_documents(encoding, texts):
                if n_tokens < max_tokens:
                    starts.write(np.int64(n_tokens).tobytes())
                    tokens.write(np.array(ids, dtype).tobytes())
                    n_tokens += len(ids)
                    n_documents += 1
            if is_stream:
                for file in tokens, starts:
                    file.flush()
                    os.fsync(file)
                save_json(progress, {'made_of': made_of, 'tokens': n_tokens,
                                     'documents': n_documents, 'stream': documents.state_dict()})
    return {'tokens': n_tokens, 'documents': n_documents}


def write_dataset(folder, encoding, splits, max_tokens=math.inf, **report):
    """
    Tokenize {split: documents}, as write_split() takes them, into a folder. Its old files stay
    until all new ones are whole. A split without text is left out. report: more of meta.json.
    """
    folder, counts, state = Path(folder), {}, tokenizer_state(encoding)
    dtype = 'uint16' if encoding.n_vocab <= 2 ** 16 else 'uint32'
    folder.mkdir(parents=True, exist_ok=True)
    for split, documents in splits.items():
        count = write_split(folder, split, encoding, dtype, documents, max_tokens,
                            stable_hash(state, max_tokens, report))
        if count['tokens']:
            counts[split] = count
    if not counts:
        raise UserError(f'There is no text for {folder}. Check the names of files and folders.')
    for name in 'meta.json', *(f'{split}_progress.part' for split in splits):
        (folder / name).unlink(missing_ok=True)  # first, so that a kill leaves nothing half new
    for split in splits:
        for name in f'{split}.bin', f'{split}_starts.bin':
            os.replace(folder / f'{name}.part', folder / name)
    save_json(folder / 'meta.json', {'tokenizer': state, 'vocab_size': encoding.n_vocab,
                                     'dtype': dtype, 'splits': counts, **report})
    for split, count in counts.items():
        print(f"{folder}/{split}.bin: {count['tokens']:,} tokens, {count['documents']:,} documents")


# Leave out packages that some distributions do not install, tests, and tables made by programs.
SKIP = {'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'pydoc_data', 'tkinter',
        'turtle', 'turtledemo', '__phello__', 'test', 'tests'}


def library_files():
    """{path: text} of the sources of Python's standard library, in the order of a hash."""
    folder, texts = Path(sysconfig.get_paths()['stdlib']), {}
    for path in folder.rglob('*.py'):
        name = path.relative_to(folder)
        module = name.parts[0].removesuffix('.py')
        if module in sys.stdlib_module_names and not SKIP & {module, *name.parts}:
            texts[name.as_posix()] = path.read_text(encoding='utf-8')
    return {name: texts[name] for name in sorted(texts, key=stable_hash)}


def split_of(identity, val_fraction, test_fraction):
    """
    train, val or test, by a hash of the identity: a document stays in its split when others are
    added or removed.
    """
    u = stable_hash(identity) / 2 ** 64
    if u < val_fraction:
        return 'val'
    return 'test' if u < val_fraction + test_fraction else 'train'


