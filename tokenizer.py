"""
Tokenizers, and the writer of token files that data/NAME/prepare.py calls. data.py reads what it
writes.
"""

import base64
import json
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
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

def get_tokenizer(source, texts=None):
    """
    A tiktoken.Encoding, or an HFTokenizer, which has the same methods as far as we use them.
    source: a state of tokenizer_state(), or a name:
    bytes         256 bytes and end-of-text
    gpt2          downloaded once by tiktoken
    bpe:8192      a BPE of that vocabulary, trained on the argument texts
    hf:ORG/NAME   the tokenizer.json of a model on the hub
    data/NAME     that of a prepared dataset
    FILE.gguf     that of a model
    FILE.json     a tokenizer.json; in its folder tokenizer_config.json says what ends a text
    FILE.tiktoken end-of-text is the highest rank + 1
    """
    if isinstance(source, dict):
        return from_state(source)
    if source == 'bytes':
        ranks = {bytes([byte]): byte for byte in range(256)}
        # No bytes merge, so any pattern that drops nothing would do. This one cuts few words.
        return byte_pairs(source, ranks, r'[\s\S]{1,64}', 256)
    if source == 'gpt2':
        return tiktoken.get_encoding(source)
    if source.startswith('bpe:'):
        return train_bpe(texts, int(source[4:]))
    path = Path(source)
    if source.startswith('hf:'):
        from huggingface_hub import snapshot_download
        name, _, revision = source[3:].partition('@')
        folder = snapshot_download(name, revision=revision or None,
                                   allow_patterns='tokenizer*.json')
        path = Path(folder, 'tokenizer.json')
    if path.is_dir():
        return from_state(json.loads((path / 'meta.json').read_text())['tokenizer'])
    if path.suffix == '.gguf':
        from extras import convert
        return get_tokenizer(convert.read(source)['tokenizer'])
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.json':
        beside = path.with_name('tokenizer_config.json')
        config = json.loads(beside.read_text(encoding='utf-8')) if beside.is_file() else {}
        bos, eos = (token['content'] if isinstance(token, dict) else token
                    for token in (config.get('bos_token'), config.get('eos_token', EOT)))
        return HFTokenizer(source, text, eos, bos if config.get('add_bos_token') else None)
    ranks = parse_ranks(text)
    return byte_pairs(path.name, ranks, PATTERN, max(ranks.values()) + 1)


def from_state(state):
    """The tokenizer of a tokenizer_state()."""
    if state['kind'] == 'hf':
        return HFTokenizer(state['name'], state['text'], state['eos'])
    return byte_pairs(state['name'], parse_ranks(state['text']), state['pattern'],
                      state['eot_token'])


def tokenizer_state(encoding):
    """The whole tokenizer as a dict of str and int, from which from_state() rebuilds it."""
    if isinstance(encoding, HFTokenizer):
        return {'kind': 'hf', 'name': encoding.name, 'text': encoding.text, 'eos': encoding.eos}
    lines = [f'{base64.b64encode(token).decode()} {rank}\n'
             for token, rank in encoding._mergeable_ranks.items()]
    return {'kind': 'tiktoken', 'name': encoding.name, 'text': ''.join(lines),
            'pattern': encoding._pat_str, 'eot_token': encoding.eot_token}


def parse_ranks(text):
    """{token: rank} of a .tiktoken file: each line has a token in base64 and its rank."""
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, text.splitlines())}


def start_token(encoding):
    """The token before a text: <s> of some Hugging Face tokenizers, else end-of-text."""
    return getattr(encoding, 'start_token', encoding.eot_token)


def byte_pairs(name, ranks, pattern, eot_token):
    """The tiktoken.Encoding of {token: rank}. pattern: cuts text into words."""
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={EOT: eot_token})


class HFTokenizer:
    """A tokenizer.json of Hugging Face under the names that tiktoken.Encoding uses."""

    def __init__(self, name, text, eos, bos=None):
        """
        text: of tokenizer.json. eos: the token that ends a text. bos: the token before a text,
        where tokenizer.json does not say it, as in those of DeepSeek.
        """
        from tokenizers import Tokenizer, processors
        self.name, self.text, self.tokenizer = name, text, Tokenizer.from_str(text)
        vocab = self.tokenizer.get_vocab()
        if bos:
            self.tokenizer.post_processor = processors.TemplateProcessing(
                [bos, '$A'], special_tokens=[(bos, vocab[bos])])
            self.text = self.tokenizer.to_str()
        self.tokenizer.encode_special_tokens = True  # '</s>' in a document is text, no end
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.eos, self.eot_token = eos, vocab[eos]
        self.n_vocab = max(vocab.values()) + 1  # not len(vocab): some ids may be unused
        # the first token that is put before a text, such as <s>; if there is none, end-of-text
        self.start_token = [*self.tokenizer.encode('').ids, self.eot_token][0]

    def encode_ordinary(self, text):
        # a batch of one, because encode() blocks other threads
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids):
        return self.tokenizer.decode(list(ids))


def train_bpe(texts, vocab_size):
    """A byte-level BPE of vocab_size tokens, with end-of-text, trained on an iterable of str."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    trained = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERN), 'isolated')
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOT], show_progress=False,
                                  initial_alphabet=byte_level.alphabet())
    trained.train_from_iterator(texts, trainer)
    return HFTokenizer(f'bpe_{vocab_size}', trained.to_str(), EOT)


# ---------------------------------------------------------------------- token files

def encoded(encoding, texts):
    """Yield the ids of each text, end-of-text included. Threads share the work."""
    texts = iter(texts)
    with ThreadPoolExecutor() as pool:
        while some := list(islice(texts, 256)):
            for ids in pool.map(encoding.encode_ordinary, some):
                ids.append(encoding.eot_token)
                yield ids


def write_split(path, encoding, dtype, texts, max_tokens):
    """
    Write PATH.bin and PATH_starts.bin, up to the document that reaches max_tokens; None: all. If a
    stopped run has written a part, this goes on behind it. Returns how many tokens and documents
    there are.

    A stopped run may have written less of one file than of the other. Example: starts 0 5 9 14, and
    12 tokens. The start 14 is dropped, because its tokens are missing. The document that starts at
    9 may be cut, so it is dropped, too. Documents 0 and 1 stay, 9 tokens, and number 2 is next.
    """
    with open(f'{path}.bin', 'ab') as tokens, open(f'{path}_starts.bin', 'ab') as starts:
        size = np.dtype(dtype).itemsize
        written = np.fromfile(starts.name, np.int64)
        written = written[written <= tokens.tell() // size]
        n_documents = max(0, len(written) - 1)  # the last one may be cut: write it again
        n_tokens = int(written[-1]) if len(written) else 0
        starts.truncate(n_documents * 8)
        tokens.truncate(n_tokens * size)
        for ids in encoded(encoding, islice(filter(None, texts), n_documents, None)):
            if max_tokens and n_tokens >= max_tokens:
                break
            starts.write(np.int64(n_tokens).tobytes())
            tokens.write(np.array(ids, dtype).tobytes())
            n_tokens += len(ids)
            n_documents += 1
    return {'tokens': n_tokens, 'documents': n_documents}


def write_dataset(folder, encoding, splits, max_tokens=None, go_on=False, **about):
    """
    Tokenize {split: texts} into a folder. Its old files stay until all new ones are whole. A split
    without text is left out. go_on: behind what a stopped run has written with the same arguments,
    because the texts are still the same. about: more of meta.json.
    """
    folder, state, counts = Path(folder), tokenizer_state(encoding), {}
    dtype = 'uint16' if encoding.n_vocab <= 2 ** 16 else 'uint32'
    part = folder / f'{stable_hash(state, max_tokens, about)}.part'
    if not go_on:
        shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, exist_ok=True)
    for split, texts in splits.items():
        texts = tqdm(texts, split, disable=None, unit=' documents')
        count = write_split(part / split, encoding, dtype, texts, max_tokens)
        if count['tokens']:
            counts[split] = count
            print(f"{folder / split}.bin: {count['tokens']:,} tokens, "
                  f"{count['documents']:,} documents")
    if not counts:
        raise UserError(f'There is no text for {folder}. Check the names of files and folders.')
    meta = folder / 'meta.json'
    meta.unlink(missing_ok=True)  # first, so that a kill leaves no dataset that is half new
    for path in part.iterdir():
        path.replace(folder / path.name)
    part.rmdir()
    save_json(meta, {'tokenizer': state, 'vocab_size': encoding.n_vocab, 'dtype': dtype,
                     'splits': counts, **about})


# ---------------------------------------------------------------------- texts

# Leave out packages that some distributions do not install, tests, and tables made by programs.
SKIP = {'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'pydoc_data', 'tkinter',
        'turtle.py', 'turtledemo', '__phello__', 'test', 'tests'}


def library_files():
    """{path: text} of the sources of Python's standard library, in the order of a hash."""
    folder, texts = Path(sysconfig.get_paths()['stdlib']), {}
    for path in folder.rglob('*.py'):
        inside = path.relative_to(folder)
        is_library = inside.parts[0].removesuffix('.py') in sys.stdlib_module_names
        if is_library and not SKIP.intersection(inside.parts):
            texts[inside.as_posix()] = path.read_text(encoding='utf-8')
    return {name: texts[name] for name in sorted(texts, key=stable_hash)}


def split_of(identity, val_fraction, test_fraction):
    """
    train, val or test, by a hash of the identity: a document stays in its split when others are
    added or removed.
    """
    if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction > 1:
        raise UserError('val_fraction and test_fraction are shares of the text: from 0 to 1, also '
                        'their sum.')
    u = stable_hash(identity) / 2 ** 64
    if u < val_fraction:
        return 'val'
    return 'test' if u < val_fraction + test_fraction else 'train'
