"""
Text from a model over a KV cache: greedy, sampled with temperature, top-k and top-p, or by beam
search.
"""

import math

import torch
from torch.nn.utils.rnn import pad_sequence

from lib.errors import UserError
from lib.results import note
from position import Place


class KVCache:
    """
    Keys and values of the tokens read so far, in each layer (B, n_kv_head, max_length, D), for a
    pass that will hold max_length tokens. After fix() every further token is read by the same
    operations on tensors of the same shapes: what a compiler needs to make one graph of a step.
    """
    PADDING = 2 ** 30  # the position of padding: later than any query, so that none sees it

    def __init__(self, model, batch_size, max_length, dtype=None):
        c, weight = model.config, model.head.weight
        shape = batch_size, c.n_kv_head, max_length, c.head_dim
        kind = {'device': weight.device, 'dtype': dtype or weight.dtype}
        self.k = [torch.empty(shape, **kind) for _ in range(c.n_layer)]
        self.v = [torch.empty(shape, **kind) for _ in range(c.n_layer)]
        self.length, self.max_length = 0, max_length  # slots used, slots
        self.prompt_lengths = self.padded = None
        self.inputs = {}  # of each short convolution, of the last tokens: (B, taps - 1, C)

    def fix(self):
        """After the prompt: from now on all slots are read, those still empty as later tokens."""
        for x in (*self.k, *self.v):
            x[:, :, self.length:] = 0  # what memory held there may be NaN
        for x in (*self.k, *self.v, *self.inputs.values()):
            torch._dynamo.mark_static_address(x, guard=False)  # for CUDA graphs
        self.length = torch.tensor(self.length, device=x.device)
        torch._dynamo.mark_static_address(self.length, guard=False)

    def append(self, layer, k, v):
        """Add the new tokens' keys and values. Returns those of all tokens so far."""
        if torch.is_tensor(self.length):  # of a step after fix()
            slot = self.length[None]
            return (self.k[layer].index_copy_(2, slot, k.to(self.k[layer].dtype)),
                    self.v[layer].index_copy_(2, slot, v.to(self.v[layer].dtype)))
        end = self.length + k.shape[2]
        if end > self.max_length:  # one token too many would be dropped without a word
            raise ValueError(f'the KV cache holds {self.max_length} tokens but {end} are needed. '
                             'Make it longer.')
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def preceded(self, name, x, n):
        """
        The n inputs of a short convolution before x, (B, T, C), and x: (B, n + T, C), with zeros
        before the first token. Keeps the last n of them for the next pass, padding left out.
        """
        B, T, C = x.shape
        if name not in self.inputs:
            self.inputs[name] = x.new_zeros(B, n, C)
        joined = torch.cat((self.inputs[name], x), dim=1)
        last = joined[:, T:]
        if self.prompt_lengths is not None and self.is_empty:
            rows = self.prompt_lengths + torch.arange(n, device=x.device)
            last = joined.gather(1, rows[..., None].expand(-1, -1, C))
        self.inputs[name].copy_(last)  # in place, as a compiled step needs the same tensor
        return joined

    @property
    def is_empty(self):
        """True until the first pass has been read."""
        return not torch.is_tensor(self.length) and self.length == 0

    def place(self, T):
        """Where the next T tokens and all keys with them stand."""
        all_slots = torch.is_tensor(self.length)
        j = torch.arange(self.max_length if all_slots else self.length + T, device=self.k[0].device)
        # A prompt of 3 tokens in 5 slots, then two new tokens: slots 0 1 2 3 4 5 6 are positions
        # 0 1 2 PADDING PADDING 3 4.
        if self.prompt_lengths is not None and not self.is_empty:
            new = j - self.padded + self.prompt_lengths
            after = torch.where(j < self.padded, self.PADDING, new)
            j = torch.where(j < self.prompt_lengths, j, after)
        if all_slots:
            j = j.expand(len(self.k[0]), -1)
            return Place(j.index_select(1, self.length[None]), j, self.max_length)
        return Place(j[..., self.length:], j, self.max_length)

    def set_prompt_lengths(self, lengths, padded):
        """Before prompts padded on the right to so many tokens: how many are real of each, (B,)."""
        self.prompt_lengths, self.padded = lengths[:, None], padded

    def repeat(self, n):
        """Each sequence n times, one copy after the other."""
        self.k = [x.repeat_interleave(n, dim=0) for x in self.k]
        self.v = [x.repeat_interleave(n, dim=0) for x in self.v]
        self.inputs = {name: x.repeat_interleave(n, dim=0) for name, x in self.inputs.items()}
        if self.prompt_lengths is not None:
            self.prompt_lengths = self.prompt_lengths.repeat_interleave(n, dim=0)

    def reorder(self, source, start):
        """Sequence b becomes a copy of source[b] from slot `start` on, the same before."""
        for x in (*self.k, *self.v):
            x[:, :, start:self.length] = x[source, :, start:self.length]
        for x in self.inputs.values():
            x.copy_(x[source])


def require_positions(model, length):
    """Raise UserError if a pass of `length` tokens has more than the random positions hold."""
    N = getattr(model.config, 'random_positions', 0)
    if 0 < N < length:
        raise UserError(f'the model was trained at random positions below {N}, so it cannot read '
                        f'{length} tokens. Read fewer, or train it with a larger random_positions.')


def new_cache(model, batch_size, max_length, dtype=None):
    """
    A cache for a pass that will hold max_length tokens; of scale sets the one for such a pass is
    put into the model. A model read through transformers brings a cache of its own.
    """
    if model.scale_sets:
        model.scale_sets.use(max_length)
    if hasattr(model, 'new_cache'):
        return model.new_cache(max_length)
    require_positions(model, max_length)
    return KVCache(model, batch_size, max_length, dtype)


# ---------------------------------------------------------------------- one sequence

def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Draw the next token. logits: (B, V). Returns (B, 1) ids.
    temperature: 0 takes the likeliest; top_k: only the k likeliest; top_p: only the fewest whose
    mass reaches p.
    """
    if temperature < 1e-30:  # float32 logits divided by less may be infinite
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # exp() is at most 1
    if top_k is not None:
        # Among equals the first, as argmax does.
        kept = logits.argsort(descending=True, stable=True)[:, :top_k]
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept, logits.gather(-1, kept))
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # the mass of the tokens likelier than this one
        before[:, 0] = -1                      # so the likeliest always stays
        dropped = (before >= top_p).gather(-1, order.argsort(-1))
        logits = logits.masked_fill(dropped, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def store_column_major(model):
    """
    Store float32 matrices on a CPU column-major, for decoding; no value changes. PyTorch's products
    with one token are then up to 2.5 times as fast, and those with many tokens as fast as before.
    Storing them takes as long as decoding 1 to 12 tokens, so the caller does it, once.
    """
    for module in model.modules():
        weight = getattr(module, 'weight', None)
        if not isinstance(module, torch.nn.Linear) or weight.device.type != 'cpu':
            continue
        if weight.dtype == torch.float32:
            weight.data = weight.data.t().contiguous().t()


def step_of(model, cache, compile):
    """
    The function that reads the next token, called as model(token, tail=1, cache=cache): the model
    itself, or where it is to be compiled and can be, one graph for all steps, on a GPU a CUDA
    graph. Compiling pays for thousands of tokens.
    """
    if not compile or hasattr(model, 'new_cache'):
        return model
    if needs_equal_lengths(model):
        note('read uncompiled: scale sets, or a method that reads each length otherwise')
        return model
    cache.fix()
    mode = 'reduce-overhead' if model.head.weight.device.type == 'cuda' else None
    return torch.compile(model, dynamic=False, mode=mode)


@torch.no_grad()
def generate(model, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, eos=None,
             generator=None, cache_dtype=None, compile=False):
    """
    Yield the ids that continue a prompt, a list of ids: max_new_tokens of them, or those before
    `eos`. The prompt is read in one pass that computes logits for its last position only. compile:
    see step_of().
    """
    cache = new_cache(model, 1, len(prompt) + max_new_tokens, cache_dtype)
    token, read = torch.tensor([prompt], device=model.head.weight.device), model
    for _ in range(max_new_tokens):
        logits = read(token, tail=1, cache=cache)[:, -1]  # (1, V)
        if read is model:
            read = step_of(model, cache, compile)
        token = sample_token(logits, temperature, top_k, top_p, generator)
        new = token.item()  # the host waits for the device once a token
        if new == eos:
            return
        yield new


# ---------------------------------------------------------------------- many sequences

def read_prompts(model, prompts, max_new_tokens, cache_dtype=None):
    """
    Read a batch of prompts, lists of ids of any lengths from 1 on, in one pass: padded on the
    right, which a causal model cannot see. Returns the logits after each prompt, (B, V), and the
    cache, with room for max_new_tokens more.
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
def complete(model, prompts, max_new_tokens, beams=1, eos=(), min_new_tokens=0, cache_dtype=None,
             compile=False):
    """
    Continue each prompt, a list of ids. Returns lists of at most max_new_tokens new ids, the end
    token left out. A batch gives what each prompt alone would. beams: 1 for greedy, or the width of
    a beam search; eos: an id that ends a sequence once it has min_new_tokens, or several; compile:
    the steps of greedy, see step_of().
    """
    if beams < 1:
        raise UserError(f'beams is {beams}; it must be at least 1, which is greedy.')
    eos = (eos,) if isinstance(eos, int) else eos
    if max_new_tokens == 0:
        return [[] for _ in prompts]
    how = max_new_tokens, beams, eos, min_new_tokens, cache_dtype, compile
    if needs_equal_lengths(model) and len({len(prompt) for prompt in prompts}) > 1:
        return [complete(model, [prompt], *how)[0] for prompt in prompts]
    search = greedy if beams == 1 else beam_search
    return search(model, prompts, *how)


def needs_equal_lengths(model):
    """True where a token is read otherwise beside a prompt of another length."""
    return bool(model.needs_equal_lengths or model.scale_sets)


def greedy(model, prompts, max_new_tokens, beams, eos, min_new_tokens, cache_dtype, compile):
    """The likeliest token each time; beams is not used."""
    logits, cache = read_prompts(model, prompts, max_new_tokens, cache_dtype)
    read = step_of(model, cache, compile)
    new, unfinished = [[] for _ in prompts], set(range(len(prompts)))
    for step in range(max_new_tokens):
        if step < min_new_tokens:
            logits[:, list(eos)] = -math.inf
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


def beam_search(model, prompts, max_new_tokens, beams, eos, min_new_tokens, cache_dtype, compile):
    """
    The likeliest continuation that a search over `beams` unfinished ones at a time finds, by the
    default rules of transformers: a finished one is judged by its log-probability over its number
    of tokens, end token included; each step looks at the (1 + number of end tokens) * beams
    likeliest next tokens, of which an end token counts only among the first `beams`; and a prompt
    is done when its best unfinished continuation, judged so, is no better than the worst of `beams`
    finished ones. compile is not used.
    """
    logits, cache = read_prompts(model, prompts, max_new_tokens, cache_dtype)
    cache.repeat(beams)
    start, B, V = cache.length, len(prompts), logits.shape[-1]
    logits = logits.repeat_interleave(beams, dim=0)               # (B * beams, V)
    scores = logits.new_full((B, beams), -1e9, dtype=torch.float32)
    scores[:, 0] = 0                                              # at first all beams are the same
    running = [[[]] * beams for _ in prompts]                     # ids of unfinished ones
    finished, done = [[] for _ in prompts], [False] * B           # finished: [(score, ids)]
    for step in range(max_new_tokens):
        last_step = step + 1 == max_new_tokens
        log_p = logits.float().log_softmax(-1)
        if step < min_new_tokens:
            log_p[:, list(eos)] = -math.inf
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
