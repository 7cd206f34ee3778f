"""
Generate text from a model with a KV cache: greedy, sampled (temperature, top-k, top-p), or by beam
search.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from lib.answers import note
from lib.errors import UserError
from lib.scales import vectors_for
from position import Place


class KVCache:
    """
    The keys and values of the tokens read so far, (B, n_kv_head, max_length, D) in each layer.
    max_length: the number of tokens that the pass will hold. After fix(), each further token is
    read by the same operations on tensors of the same shapes. A compiler needs this to make one
    graph of a step.
    """
    PADDING = 2 ** 30  # position of padding tokens: later than each query, so that no query sees it

    def __init__(self, model, batch_size, max_length, dtype=None):
        c, weight = model.config, model.head.weight
        shape = batch_size, c.n_kv_head, max_length, c.head_dim
        kind = {'device': weight.device, 'dtype': dtype or weight.dtype}
        self.k = [torch.empty(shape, **kind) for _ in range(c.n_layer)]
        self.v = [torch.empty(shape, **kind) for _ in range(c.n_layer)]
        self.length, self.max_length = 0, max_length  # slots used, slots
        self.prompt_lengths = self.padded = None
        self.inputs = {}  # each short convolution's inputs at the last tokens, (B, taps - 1, C)

    def fix(self):
        """
        Call this after the prompt. From now on each step reads all slots. Empty slots have later
        positions than the query, so the query does not see them.
        """
        for x in (*self.k, *self.v):
            x[:, :, self.length:] = 0  # uninitialized memory may hold NaN
        for x in (*self.k, *self.v, *self.inputs.values()):
            torch._dynamo.mark_static_address(x, guard=False)  # for CUDA graphs
        self.length = torch.tensor(self.length, device=x.device)
        torch._dynamo.mark_static_address(self.length, guard=False)

    def append(self, layer, k, v):
        """Add the new tokens' keys and values. Returns those of all tokens so far."""
        if torch.is_tensor(self.length):  # after fix()
            slot = self.length[None]
            return (self.k[layer].index_copy_(2, slot, k.to(self.k[layer].dtype)),
                    self.v[layer].index_copy_(2, slot, v.to(self.v[layer].dtype)))
        end = self.length + k.shape[2]
        if end > self.max_length:  # otherwise the slice below would silently drop tokens
            raise ValueError(f'the KV cache holds {self.max_length} tokens but {end} are needed. '
                             'Make it longer.')
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def preceded(self, name, x, n):
        """
        Put the previous n inputs of a short convolution before x, (B, T, C). Returns (B, n + T, C).
        Before the first token, the inputs are zeros. Keeps the last n inputs, without padding, for
        the next pass.
        """
        B, T, C = x.shape
        if name not in self.inputs:
            self.inputs[name] = x.new_zeros(B, n, C)
        joined = torch.cat((self.inputs[name], x), dim=1)
        last = joined[:, T:]
        if self.prompt_lengths is not None and self.is_empty:
            rows = self.prompt_lengths + torch.arange(n, device=x.device)
            last = joined.gather(1, rows[..., None].expand(-1, -1, C))
        self.inputs[name].copy_(last)  # in place, because a compiled step needs the same tensor
        return joined

    @property
    def is_empty(self):
        """True before the first pass."""
        return not torch.is_tensor(self.length) and self.length == 0

    def place(self, T):
        """A Place: the positions of the next T tokens, and of all keys including theirs."""
        all_slots = torch.is_tensor(self.length)
        j = torch.arange(self.max_length if all_slots else self.length + T, device=self.k[0].device)
        # Example: a prompt of 3 tokens in 5 slots, then 2 new tokens. Slots 0 1 2 3 4 5 6 have
        # positions 0 1 2 PADDING PADDING 3 4.
        if self.prompt_lengths is not None and not self.is_empty:
            new = j - self.padded + self.prompt_lengths
            after = torch.where(j < self.padded, self.PADDING, new)
            j = torch.where(j < self.prompt_lengths, j, after)
        if all_slots:
            j = j.expand(len(self.k[0]), -1)
            return Place(j.index_select(1, self.length[None]), j, self.max_length)
        return Place(j[..., self.length:], j, self.max_length)

    def set_prompt_lengths(self, lengths, padded):
        """
        Call this before reading prompts that are padded on the right to `padded` tokens. lengths:
        the number of real tokens of each prompt, (B,).
        """
        self.prompt_lengths, self.padded = lengths[:, None], padded

    def repeat(self, n):
        """Repeat each sequence n times. The copies of a sequence are neighbors."""
        self.k = [x.repeat_interleave(n, dim=0) for x in self.k]
        self.v = [x.repeat_interleave(n, dim=0) for x in self.v]
        self.inputs = {name: x.repeat_interleave(n, dim=0) for name, x in self.inputs.items()}
        if self.prompt_lengths is not None:
            self.prompt_lengths = self.prompt_lengths.repeat_interleave(n, dim=0)

    def reorder(self, source, start):
        """
        Make sequence b a copy of sequence source[b], from slot `start` on. Before `start` both must
        be equal.
        """
        for x in (*self.k, *self.v):
            x[:, :, start:self.length] = x[source, :, start:self.length]
        for x in self.inputs.values():
            x.copy_(x[source])


def require_positions(model, length):
    """Raise UserError if a pass of `length` tokens needs more than the model's random positions."""
    N = getattr(model.config, 'random_positions', 0)
    if 0 < N < length:
        raise UserError(f'the model was trained at random positions below {N}, so it cannot read '
                        f'{length} tokens. Read fewer, or train it with a larger random_positions.')


def new_cache(model, batch_size, max_length, dtype=None):
    """
    A cache for max_length tokens. A model read through transformers makes its own kind of cache.
    Read into it within `with vectors_for(model, max_length)` of lib/scales.py.
    """
    if hasattr(model, 'new_cache'):
        return model.new_cache(max_length)
    require_positions(model, max_length)
    return KVCache(model, batch_size, max_length, dtype)


# ---------------------------------------------------------------------- one sequence

def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Draw the next token. logits: (B, V). Returns (B, 1) ids.
    temperature: 0 takes the likeliest token; top_k: draw only from the k likeliest tokens; top_p:
    draw only from the smallest set of likeliest tokens whose probabilities sum to at least p.
    """
    if temperature < 1e-30:  # float32 logits, divided by less, may become infinite
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # exp() is at most 1
    if top_k is not None:
        # Among equal logits the first is kept, as argmax does.
        kept = logits.argsort(descending=True, stable=True)[:, :top_k]
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept, logits.gather(-1, kept))
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # total probability of the likelier tokens
        before[:, 0] = -1                      # always keep the likeliest token
        dropped = (before >= top_p).gather(-1, order.argsort(-1))
        logits = logits.masked_fill(dropped, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def store_column_major(model):
    """
    Store a model's float32 matrices on a CPU column-major, for decoding. No value changes. Products
    with one token become up to 2.5 times as fast; products with many tokens stay as fast as before.
    Storing takes as long as decoding 1 to 12 tokens, so the caller does it once.
    """
    for module in model.modules():
        weight = getattr(module, 'weight', None)
        if not isinstance(module, torch.nn.Linear) or weight.device.type != 'cpu':
            continue
        if weight.dtype == torch.float32:
            weight.data = weight.data.t().contiguous().t()


def step_of(model, cache, compile):
    """
    The function that reads the next token, called as model(token, tail=1, cache=cache). It is the
    model itself, or a compiled graph for all steps if `compile` is set and the model can be
    compiled. On a GPU this is a CUDA graph. Compiling pays off after thousands of tokens.
    """
    if not compile:
        return model
    if hasattr(model, 'new_cache'):
        note('decoding uncompiled: the model is read through transformers')
        return model
    if model.needs_equal_lengths:
        note('decoding uncompiled: with its scale sets or position method, the model computes '
             'each length differently')
        return model
    cache.fix()
    mode = 'reduce-overhead' if model.head.weight.device.type == 'cuda' else None
    return torch.compile(model, dynamic=False, mode=mode)


@dataclass(frozen=True)
class Decoding:
    """How generate() and complete() continue a prompt."""
    eos: tuple = ()            # ids that end a text; they are not part of it
    cache_dtype: torch.dtype | None = None  # None: that of the model's matrices
    compile: bool = False      # compile the steps, except those of a beam search; see step_of()
    # generate() draws each token: see sample_token()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None
    # complete() searches
    beams: int = 1             # width of the beam search; 1: greedy
    min_new_tokens: int = 0    # ids of eos do not count before this many tokens


GREEDY = Decoding()


def require_finite(logits):
    """Raise UserError if a logit is infinite or NaN, because any token would then be the best."""
    if not logits.isfinite().all():
        raise UserError('the logits of the model are not finite, so its text would mean nothing. '
                        'Are the weights or scales damaged? Try another --init_from=, --scale= or '
                        '--dtype=.')


@torch.no_grad()
def generate(model, prompt, max_new_tokens, how=GREEDY):
    """
    Yield the ids that continue a prompt: max_new_tokens ids, or fewer if the model generates an id
    of how.eos. prompt: a list of ids. One pass reads the prompt and computes logits only for its
    last position.
    """
    total = len(prompt) + max_new_tokens
    cache = new_cache(model, 1, total, how.cache_dtype)
    token, read = torch.tensor([prompt], device=model.head.weight.device), model
    for _ in range(max_new_tokens):
        with vectors_for(model, total):
            logits = read(token, tail=1, cache=cache)[:, -1]  # (1, V)
        if read is model:
            read = step_of(model, cache, how.compile)
        require_finite(logits)
        token = sample_token(logits, how.temperature, how.top_k, how.top_p, how.generator)
        new = token.item()  # the host waits for the device here, as in require_finite()
        if new in how.eos:
            return
        yield new


# ---------------------------------------------------------------------- many sequences

def read_prompts(model, prompts, max_new_tokens, cache_dtype=None):
    """
    Read a batch of prompts in one pass. prompts: lists of ids, each of any length from 1 on.
    Shorter prompts are padded on the right; a causal model does not see this padding. Returns the
    logits after each prompt, (B, V), and the cache, which has room for max_new_tokens more.
    """
    sizes, device = [len(prompt) for prompt in prompts], model.head.weight.device
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    cache = new_cache(model, len(prompts), max(sizes) + max_new_tokens, cache_dtype)
    lengths = torch.tensor(sizes, device=device)
    if min(sizes) < max(sizes):
        cache.set_prompt_lengths(lengths, max(sizes))
    x = model.hidden(padded.to(device), cache)  # (B, T, C)
    return model.head(x[torch.arange(len(prompts), device=device), lengths - 1]), cache


@torch.no_grad()
def complete(model, prompts, max_new_tokens, how=GREEDY):
    """
    Continue each prompt by greedy decoding or beam search. prompts: lists of ids. Returns a list of
    at most max_new_tokens new ids for each prompt, without the end token. The result does not
    depend on the other prompts of the batch.
    """
    if max_new_tokens == 0:
        return [[] for _ in prompts]
    if model.needs_equal_lengths and len({len(prompt) for prompt in prompts}) > 1:
        return [complete(model, [prompt], max_new_tokens, how)[0] for prompt in prompts]
    search = greedy if how.beams == 1 else beam_search
    with vectors_for(model, max(map(len, prompts)) + max_new_tokens):
        return search(model, prompts, max_new_tokens, how)


def greedy(model, prompts, max_new_tokens, how):
    """Continue each prompt with the likeliest token at each step."""
    eos = list(how.eos)
    logits, cache = read_prompts(model, prompts, max_new_tokens, how.cache_dtype)
    read = step_of(model, cache, how.compile)
    new, unfinished = [[] for _ in prompts], set(range(len(prompts)))
    for step in range(max_new_tokens):
        require_finite(logits)
        if step < how.min_new_tokens:
            logits[:, eos] = -math.inf
        token = logits.argmax(-1, keepdim=True)
        for b, t in enumerate(token[:, 0].tolist()):
            if t in eos:
                unfinished.discard(b)
            elif b in unfinished:
                new[b].append(t)
        if not unfinished or step + 1 == max_new_tokens:
            break
        logits = read(token, tail=1, cache=cache)[:, -1]
    return new


def beam_search(model, prompts, max_new_tokens, how):
    """
    The best continuation that beam search finds with how.beams unfinished continuations at a time.
    The rules are the defaults of transformers. The score of a continuation is its log-probability
    divided by its number of tokens, including the end token. Each step considers the
    (1 + number of end tokens) * beams likeliest next tokens. An end token counts only if it is
    among the first `beams` of them. A prompt is done when it has `beams` finished continuations and
    its best unfinished one scores no better than the worst of them.
    """
    beams, eos = how.beams, list(how.eos)
    logits, cache = read_prompts(model, prompts, max_new_tokens, how.cache_dtype)
    cache.repeat(beams)
    start, B, V = cache.length, len(prompts), logits.shape[-1]
    logits = logits.repeat_interleave(beams, dim=0)               # (B * beams, V)
    scores = logits.new_full((B, beams), -1e9, dtype=torch.float32)
    scores[:, 0] = 0                                              # at first all beams are equal
    running = [[[]] * beams for _ in prompts]                     # ids of the unfinished beams
    finished, done = [[] for _ in prompts], [False] * B           # finished: [(score, ids)]
    for step in range(max_new_tokens):
        last_step = step + 1 == max_new_tokens
        require_finite(logits)
        log_p = logits.float().log_softmax(-1)
        if step < how.min_new_tokens:
            log_p[:, eos] = -math.inf
        total = (scores[:, :, None] + log_p.view(B, beams, V)).flatten(1)
        best, index = total.topk(max(2, 1 + len(eos)) * beams)    # (B, candidates)
        best, index = best.tolist(), index.tolist()
        source, tokens, kept_scores = [], [], []
        for b in range(B):
            kept = []                                             # (score, beam, token)
            for rank, (score, i) in enumerate(zip(best[b], index[b])):
                beam, token = divmod(i, V)
                ends = token in eos or last_step
                if ends and rank < beams and not done[b]:
                    ids = running[b][beam] + ([] if token in eos else [token])
                    finished[b].append((score / (step + 1), ids))
                elif not ends and len(kept) < beams:
                    kept.append((score, beam, token))
            finished[b] = sorted(finished[b], key=lambda one: -one[0])[:beams]
            if kept:
                worst = finished[b][-1][0] if len(finished[b]) == beams else -math.inf
                done[b] |= kept[0][0] / (step + 1) <= worst
                running[b] = [running[b][beam] + [token] for _, beam, token in kept]
                kept_scores += [score for score, _, _ in kept]
                source += [b * beams + beam for _, beam, _ in kept]
                tokens += [token for _, _, token in kept]
        if all(done) or last_step:
            break
        scores = torch.tensor(kept_scores, device=logits.device).view(B, beams)
        source, tokens = torch.tensor([source, tokens], device=logits.device)
        cache.reorder(source, start)
        logits = model(tokens[:, None], tail=1, cache=cache)[:, -1]
    return [one[0][1] for one in finished]
