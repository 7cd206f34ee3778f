"""
Generate text from a model with a KV cache: greedy, sampled (temperature, top-k, top-p), or by beam
search; and answer long lists of questions so that a stopped run goes on.
"""

import contextlib
import glob
import json
import math
from pathlib import Path

from configurator import UserError

import filelock
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data import stable_hash
from model import small_vectors
from position import Place

# ---------------------------------------------------------------------- cache

class KVCache:
    """
    The keys and values of the tokens read so far. A sequence has max_length slots, one for each
    token that the text will hold in the end. lengths: tokens of each prompt, if prompts of
    different lengths are read together, in one pass, padded on the right to the longest.
    """
    PADDING = 2 ** 30  # position of padding tokens: later than each query, so that no query sees it

    def __init__(self, model, max_length, lengths=()):
        random = model.config.random_positions
        if 0 < random < max_length:
            raise UserError(f'the model was trained at {random} random positions, so it cannot '
                            f'read {max_length} tokens. Read fewer.')
        self.length, self.max_length = 0, max_length  # slots used, slots
        self.device = model.head.weight.device
        self.lengths = torch.tensor(lengths, device=self.device)[:, None]    # (B, 1)
        self.padded = max(lengths) if len(set(lengths)) > 1 else 0
        # Of each layer the keys and values, (B, 2 n_kv_head, max_length, D), and of each short
        # convolution the last inputs, (B, taps - 1, C). The first pass makes them.
        self.stored = {}

    def place(self, T):
        """A Place: the positions of the next T tokens, and of all keys including theirs."""
        is_fixed = torch.is_tensor(self.length)
        self.new = self.length if is_fixed else slice(self.length, self.length + T)
        self.end = self.max_length if is_fixed else self.length + T
        if self.end > self.max_length:  # the slice would silently drop tokens
            raise ValueError(f'the cache holds {self.max_length} tokens, but {self.end} are needed')
        j = torch.arange(self.end, device=self.device)
        if 0 < self.padded < self.end:
            # Example: a prompt of 3 tokens in 5 slots, then 2 new tokens. Slots 0 1 2 3 4 5 6 have
            # positions 0 1 2 PADDING PADDING 3 4.
            after = torch.where(j < self.padded, self.PADDING, j - self.padded + self.lengths)
            j = torch.where(j < self.lengths, j, after)                      # (B, S)
        elif is_fixed:
            j = j[None]  # because with an axis B even a single query looks which keys are later
        return Place(j[..., self.new], j, self.max_length)

    def append(self, layer, k, v):
        """Add a layer's keys and values of the new tokens. Returns those of all tokens so far."""
        x = torch.cat((k, v), dim=1)
        if layer not in self.stored:
            self.stored[layer] = x.new_zeros(*x.shape[:2], self.max_length, x.shape[3])
        self.stored[layer][:, :, self.new] = x
        return self.stored[layer][:, :, :self.end].chunk(2, dim=1)

    def preceded(self, name, x, n):
        """
        Put the previous n inputs of a short convolution before x, (B, T, C). Returns (B, n + T, C).
        Before the first token, the inputs are zeros. Keeps the last n inputs for the next pass.
        """
        B, T, C = x.shape
        if name not in self.stored:
            self.stored[name] = x.new_zeros(B, n, C)
        joined = torch.cat((self.stored[name], x), dim=1)
        last = joined[:, T:]
        if self.end == self.padded:  # the last ones of each prompt, before its padding
            rows = self.lengths + torch.arange(n, device=self.device)
            last = joined.take_along_dim(rows[..., None], dim=1)
        self.stored[name].copy_(last)  # in place, because a compiled step needs the same tensor
        return joined

    def fix(self):
        """
        Call this after the prompt. From now on each token is read by the same operations on tensors
        of the same shapes, so that a compiler makes one graph of a step. A step reads all slots;
        empty slots have later positions than the query, so the query does not see them.
        """
        self.length = torch.tensor([self.length], device=self.device)
        for x in self.length, *self.stored.values():
            torch._dynamo.mark_static_address(x, guard=False)  # for CUDA graphs

    def repeat(self, n):
        """Repeat each sequence n times. The copies of a sequence are neighbors."""
        self.lengths = self.lengths.repeat_interleave(n, dim=0)
        for name, x in self.stored.items():
            self.stored[name] = x.repeat_interleave(n, dim=0)

    def reorder(self, source, start):
        """
        Make sequence b a copy of sequence source[b], from slot `start` on. Before `start` both must
        be equal.
        """
        for x in self.stored.values():
            part = x[:, :, start:self.length] if x.dim() == 4 else x
            part.copy_(part[source])


def needs_equal_lengths(model):
    """
    True if prompts of different lengths cannot share a pass: with scale sets, some position
    methods, and in models read through transformers.
    """
    if hasattr(model, 'new_cache') or model.scale_sets:
        return True
    return any(block.attn.position.needs_equal_lengths for block in model.blocks)


def store_column_major(model):
    """
    Store a model's float32 matrices on a CPU column-major, for decoding. No value changes. Products
    with one token become up to 2.5 times as fast; products with many tokens stay as fast as before.
    Storing takes as long as decoding 1 to 12 tokens, so the caller does it once.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight
            if weight.device.type == 'cpu' and weight.dtype == torch.float32:
                weight.data = weight.data.t().contiguous().t()


def step_of(model, cache, compile):
    """
    The function that reads the next token, called as model(token, tail=1, cache=cache): the model
    itself, or a compiled graph for all steps, where every length is computed the same way. On a GPU
    this is a CUDA graph. Compiling pays off after thousands of tokens.
    """
    if not compile or needs_equal_lengths(model):
        return model
    cache.fix()
    mode = 'reduce-overhead' if cache.device.type == 'cuda' else None
    return torch.compile(model, dynamic=False, mode=mode)


def read_prompts(model, prompts, max_new_tokens):
    """
    Read a batch of prompts, lists of ids, in one pass. Shorter ones are padded on the right; a
    causal model does not see this padding. Returns the logits after each prompt, (B, V), and the
    cache, which has room for max_new_tokens more.
    """
    sizes = [len(prompt) for prompt in prompts]
    total, device = max(sizes) + max_new_tokens, next(model.parameters()).device
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    if hasattr(model, 'new_cache'):  # read through transformers: one length, see complete()
        cache = model.new_cache(total)
        return model(padded, tail=1, cache=cache)[:, -1], cache
    cache = KVCache(model, total, sizes)
    x = model.hidden(padded, cache)                                          # (B, T, C)
    return model.head(x[range(len(sizes)), [n - 1 for n in sizes]]), cache


# ---------------------------------------------------------------------- decoding

def require_finite(logits):
    """Raise UserError if a logit is infinite or NaN, because any token would then be the best."""
    if not logits.isfinite().all():
        raise UserError('the logits of the model are not finite, so its text would mean nothing. '
                        'Are weights or scales damaged? Try another --scale= or --dtype=.')


def sample_token(logits, temperature=0, top_k=None, top_p=None, generator=None):
    """
    Draw the next token. logits: (B, V). Returns (B, 1) ids.
    temperature: 0 takes the likeliest token; top_k: draw only from the k likeliest tokens; top_p:
    draw only from the smallest set of likeliest tokens whose probabilities sum to at least p.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # stable: of equal logits the first comes first, as in argmax
    ordered, order = (logits.float() / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -math.inf
    p = ordered.softmax(-1)
    if top_p is not None:
        p[:, 1:][p.cumsum(-1)[:, :-1] >= top_p] = 0  # the likelier tokens already sum to p
    p = torch.zeros_like(p).scatter(-1, order, p)
    return torch.multinomial(p, 1, generator=generator)


@torch.no_grad()
def generate(model, prompts, max_new_tokens, eos=(), min_new_tokens=0, compile=False, **how):
    """
    Yield the next token of each prompt, a list of B ids, max_new_tokens times. eos: ids that may
    not come among the first min_new_tokens. compile: see step_of(); how: see sample_token().
    """
    logits, cache = read_prompts(model, prompts, max_new_tokens)
    read = step_of(model, cache, compile)
    for step in range(max_new_tokens):
        require_finite(logits)
        if step < min_new_tokens:
            logits[:, eos] = -math.inf
        token = sample_token(logits, **how)
        yield token[:, 0].tolist()
        if step + 1 < max_new_tokens:
            logits = read(token, tail=1, cache=cache)[:, -1]


def complete(model, prompts, max_new_tokens, eos=(), beams=1, min_new_tokens=0):
    """
    Continue each prompt, a list of ids, by greedy decoding, or by a beam search with so many beams.
    Returns a list of at most max_new_tokens new ids for each prompt. eos: ids that end a text, from
    min_new_tokens on; they are not part of it. The result does not depend on the other prompts.
    """
    if needs_equal_lengths(model) and len({len(prompt) for prompt in prompts}) > 1:
        return [complete(model, [prompt], max_new_tokens, eos, beams, min_new_tokens)[0]
                for prompt in prompts]
    if beams > 1:
        return beam_search(model, prompts, max_new_tokens, eos, beams, min_new_tokens)
    texts, unfinished = [[] for _ in prompts], set(range(len(prompts)))
    for tokens in generate(model, prompts, max_new_tokens, eos, min_new_tokens):
        unfinished -= {b for b, token in enumerate(tokens) if token in eos}
        for b in unfinished:
            texts[b].append(tokens[b])
        if not unfinished:
            break
    return texts


@torch.no_grad()
def beam_search(model, prompts, max_new_tokens, eos, beams, min_new_tokens):
    """
    The best continuation that beam search finds with `beams` unfinished continuations at a time.
    The rules are the defaults of transformers. The score of a continuation is its log-probability
    divided by its number of tokens, including the end token. Each step considers the
    (1 + number of end tokens) * beams likeliest next tokens. An end token counts only if it is
    among the first `beams` of them. A prompt is done when it has `beams` finished continuations and
    its best unfinished one scores no better than the worst of them.
    """
    logits, cache = read_prompts(model, prompts, max_new_tokens)
    cache.repeat(beams)
    start, B, V = cache.length, len(prompts), logits.shape[-1]
    logits = logits.repeat_interleave(beams, dim=0)          # (B * beams, V)
    scores = logits.new_full((B * beams,), -1e9, dtype=torch.float32)
    scores[::beams] = 0                                      # at first all beams are equal
    texts = [[]] * (B * beams)                               # unfinished continuations
    finished, done = [[] for _ in prompts], set()            # finished: [(score, ids)]
    for n in range(1, max_new_tokens + 1):                   # tokens of a continuation
        require_finite(logits)
        log_p = logits.float().log_softmax(-1)
        if n <= min_new_tokens:
            log_p[:, eos] = -math.inf
        total = (scores[:, None] + log_p).view(B, beams * V)
        best = total.topk(max(2, 1 + len(eos)) * beams)
        kept = []                                            # [(score, row, token)] of all prompts
        for b, candidates in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            own = []
            for rank, (score, i) in enumerate(zip(*candidates)):
                row, token = b * beams + i // V, i % V
                if token not in eos and n < max_new_tokens:
                    own.append((score, row, token))
                elif rank < beams and b not in done:
                    finished[b].append((score / n, texts[row] + [token] * (token not in eos)))
            finished[b] = sorted(finished[b], key=lambda one: -one[0])[:beams]
            kept += own[:beams]
            if own and len(finished[b]) == beams and own[0][0] / n <= finished[b][-1][0]:
                done.add(b)
        if not kept or len(done) == B:
            break
        texts = [texts[row] + [token] for _, row, token in kept]
        scores, source, tokens = (torch.tensor(x, device=logits.device) for x in zip(*kept))
        cache.reorder(source, start)
        logits = model(tokens[:, None], tail=1, cache=cache)[:, -1]
    return [one[0][1] for one in finished]


# ---------------------------------------------------------------------- answers

def identity(model, info, scale):
    """A hash of all that a model's answers depend on. Call it before the first pass."""
    vectors = [p.tolist() for p in small_vectors(model).values()]
    file = Path(scale).read_text() if isinstance(scale, str) else ''
    return stable_hash(info['digest'], info['model_config'], vectors, file)


def answer_all(path, about, sizes, batch_tokens, answer, runtime):
    """
    Ask a model many questions, so that a stopped run goes on. PATH.jsonl has a first line `about`,
    a dict of what the answers depend on, and then a line of JSON for each answer. Each other rank
    has a file PATH.rankN.jsonl. sizes: tokens of each question, the longest first. answer(items)
    gets the numbers of some questions, of at most batch_tokens tokens, and returns a dict for each.
    Returns the answers to all questions in order, on every rank.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    own = f'{path}.rank{runtime.rank}.jsonl' if runtime.rank else f'{path}.jsonl'
    lock = filelock.FileLock(f'{own}.lock')
    try:
        lock.acquire(timeout=0.5)
    except filelock.Timeout:
        raise UserError(f'Another process writes to {own}. Give this one a --label=.') from None

    def read():
        """{number of a question: its answer}"""
        rows = {}
        name = glob.escape(path)  # a folder may have [ in its name
        for file in glob.glob(f'{name}.jsonl') + glob.glob(f'{name}.rank*.jsonl'):
            text = Path(file).read_text(encoding='utf-8', errors='replace')
            first, *lines = text.split('\n')
            if first and json.loads(first) != about:
                raise UserError(f'{file} holds answers of other settings, {first}. Remove it, or '
                                'give this run another --label=.')
            for line in lines:
                with contextlib.suppress(ValueError):  # a killed run may have cut a line
                    row = json.loads(line)
                    rows[row['item']] = row
        return rows

    there, batches = read(), []
    todo = [i for i in range(runtime.rank, len(sizes), runtime.world_size) if i not in there]
    while todo:
        n = max(1, batch_tokens // sizes[todo[0]])
        batches.append(todo[:n])
        todo = todo[n:]
    with open(own, 'a', encoding='utf-8') as file:
        if not file.tell():
            file.write(json.dumps(about))
        for batch in tqdm(batches, path, disable=None if runtime.is_main else True):
            for i, row in zip(batch, answer(batch)):  # after a line end, in case one is missing
                file.write('\n' + json.dumps({'item': i} | row, ensure_ascii=False))
            file.flush()
    if runtime.world_size > 1:
        dist.barrier()
    rows = read()
    return [rows[i] for i in range(len(sizes))]
