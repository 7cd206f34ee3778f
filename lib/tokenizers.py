"""
Tokenizers: by name, from files, from a checkpoint, or a BPE trained on text.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import math
import re
import tempfile
from pathlib import Path

import tiktoken

from lib.answers import note, optional, write_text
from lib.checksums import MIB
from lib.errors import UserError, fault_of, require_kinds

EOT = '<|endoftext|>'
TRAINED = 'tokenizer.tiktoken'  # the name of a BPE that was trained on the text of a dataset
# This pattern cuts text into words before BPE merges bytes. Every .tiktoken file uses it. It is
# GPT-4's pattern, written so that both tiktoken and tokenizers can read it. It matches
# contractions, words, up to 3 digits, punctuation, line ends, and other white space.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r'|\s*[\r\n]+|\s+(?!\S)|\s+')


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
                        'FILE.json or hf:ORG/NAME. data/text/prepare.py also takes bpe:VOCABULARY, '
                        'and trains one.')
    if not path.is_file():
        raise UserError(f'There is no tokenizer file {path}. Check the name, or prepare the data '
                        'set that makes it.')
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
        if not all(0 <= rank < 2 ** 32 - 1 for rank in ranks.values()):
            raise ValueError('a rank is below 0, or at least 2^32 - 1')
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
            self.tokenizer.encode_special_tokens = True  # '</s>' in a document is text, no end
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            plain = self.tokenizer.encode('a', add_special_tokens=False).ids
            first = self.tokenizer.encode('a').ids[0]
        except Exception as error:  # the package raises no narrower class
            raise UserError(f'{name} is not a tokenizer.json: {error}. Check the file.') from error
        vocab = self.tokenizer.get_vocab()
        self.n_vocab = max(vocab.values()) + 1  # not len(vocab), because some ids may be unused
        usual = [eos] if eos else ['</s>', EOT, '<|end_of_text|>', '<eos>']
        self.eos = next((token for token in usual if token in vocab), None)
        if self.eos is None:
            raise UserError(f"{name} has no end-of-text token {eos or 'that we know'}. Set "
                            'eos_token in tokenizer_config.json to one of its tokens.')
        self.eot_token = vocab[self.eos]
        if self.eot_token in self.encode_ordinary(self.eos):
            note(f'{name} reads {self.eos} in a document as the end of the document')
        # The token before a text, such as <s>. If the tokenizer has none: end-of-text.
        self.start_token = self.eot_token if first == plain[0] else first

    def encode_ordinary(self, text):
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts):
        texts = list(map(without_half_pairs, texts))
        batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoded.ids for encoded in batch]

    def decode(self, ids):
        """The text of ids, without special tokens such as <s>. decode_bytes() keeps these."""
        return self.tokenizer.decode(list(ids))

    def decode_bytes(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False).encode()


def known_ids(encoding, ids):
    """The ids that a tokenizer has. A model may have a larger vocabulary than its tokenizer."""
    def is_known(ids):
        with contextlib.suppress(KeyError):
            encoding.decode_bytes(ids)
            return True
        return False

    return ids if is_known(ids) else [token for token in ids if is_known([token])]


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


def version_of(name):
    """
    What tells a tokenizer from another one of the same name: its digest. For 'bpe:8192', which is
    trained on the text, the name.
    """
    if name.startswith('bpe:'):
        return name
    return tokenizer_digest(tokenizer_state(get_tokenizer(name)))


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


def tokenizer_for(name, documents, total_bytes=0):
    """
    get_tokenizer(name), or for 'bpe:8192' a BPE of that vocabulary size, trained on the documents
    (as in write_corpus). write_corpus() saves it as TRAINED beside the tokens. total_bytes: of
    text. If it is more than 200 MB, the BPE is trained on evenly spaced pieces of about 200 MB in
    total.
    """
    kind, _, vocab_size = name.partition(':')
    if kind != 'bpe':
        return get_tokenizer(name)
    if not vocab_size.isdecimal() or not 257 <= int(vocab_size) <= 2 ** 20:
        raise UserError(f"tokenizer is '{name}'. Write bpe: and the size of its vocabulary, as in "
                        'bpe:8192: the 256 bytes, end-of-text, and more; at most 1,048,576.')
    print(f'training a BPE of {vocab_size} tokens')
    pieces = (piece for document in documents for piece, _ in cut(document, MIB))
    pieces = itertools.islice(pieces, 0, None, math.ceil(total_bytes / 2e8) or 1)
    with tempfile.TemporaryDirectory() as folder:
        return train_bpe(pieces, int(vocab_size), Path(folder, TRAINED))
