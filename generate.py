"""
Generate text from a model with a KV cache: greedy, sampled, or by beam search; and answer long
lists of questions so that a stopped run goes on.
"""

import contextlib
import json
import math
from pathlib import Path

from configurator import UserError

import filelock
import torch
import torch.distributed as dist
from tqdm import tqdm

from data import stable_hash
from model import small_vectors
from position import Place

# ---------------------------------------------------------------------- cache

class KVCache:
    """
    The keys and values of the tokens read so far, of texts of one length. A text has max_length
    slots, one for each token that it will hold in the end; its next token goes to the slot
    `length`. So slot and position are the same, and causal attention does not see empty slots.

    Shapes are as in position.py: B texts, S slots, K key heads, D = head size.
    """

    def __init__(self, model, max_length):
        self.max_length, self.device = max_length, model.head.weight.device
        self.length = 0  # tokens of each text; in a compiled step a tensor, (1,)
        # Of each layer the keys and values, (B, 2 K, max_length, D), and of each short convolution
        # the last inputs, (B, taps - 1, C)
        self.stored = {}

    def place(self, T):
        """A Place: the positions of the next T tokens, (T,), and of the keys, (S,)."""
        is_compiled = torch.is_tensor(self.length)
        self.end = self.max_length if is_compiled else self.length + T  # append() needs it, too
        i = self.length + torch.arange(T, device=self.device)
        j = torch.arange(self.end, device=self.device)
        return Place(i, j, self.max_length, sees_all=T == 1 and not is_compiled)

    def append(self, layer, k, v):
        """
        Add a layer's keys and values of the new tokens, (B, K, T, D). Returns those of all slots
        that place() named, (B, K, S, D).
        """
        x = torch.cat((k, v), dim=1)
        if layer not in self.stored:
            self.stored[layer] = x.new_zeros(*x.shape[:2], self.max_length, x.shape[3])
        if torch.is_tensor(self.length):
            self.stored[layer].index_copy_(2, self.length, x)
        else:
            self.stored[layer][:, :, self.length:self.end] = x
        return self.stored[layer][:, :, :self.end].chunk(2, dim=1)

    def preceded(self, name, x, n):
        """
        Put the previous n inputs of a short convolution before x, (B, T, C). Returns (B, n + T, C).
        Before the first token, the inputs are zeros. Keeps the last n inputs for the next pass.
        """
        if name not in self.stored:
            self.stored[name] = x.new_zeros(len(x), n, x.shape[2])
        joined = torch.cat((self.stored[name], x), dim=1)
        self.stored[name].copy_(joined[:, x.shape[1]:])  # in place, because of step_of()
        return joined

    def repeat(self, n):
        """Repeat each text n times. The copies of a text are neighbors."""
        for name, x in self.stored.items():
            self.stored[name] = x.repeat_interleave(n, dim=0)

    def reorder(self, source, n):
        """
        Make text b a copy of text source[b]. source: (B,). Only their last n tokens may differ.
        """
        last = slice(self.length - n, self.length)
        for x in self.stored.values():
            if x.dim() == 4:
                x[:, :, last] = x[source, :, last]
            else:
                x.copy_(x[source])


def read_prompts(model, prompts, max_new_tokens):
    """
    Read a batch of prompts, lists of equally many ids, in one pass. Returns the logits after each
    prompt, (B, V), and the cache, which has room for max_new_tokens more. Raises UserError if a
    logit is infinite or NaN, because any token would then be the best.
    """
    idx = torch.tensor(prompts, device=next(model.parameters()).device)      # (B, T)
    max_length = idx.shape[1] + max_new_tokens
    if hasattr(model, 'new_cache'):  # read through transformers
        cache = model.new_cache(max_length)
    else:
        cache = KVCache(model, max_length)
    logits = model(idx, tail=1, cache=cache)[:, -1]
    if not logits.isfinite().all():
        raise UserError('the logits of the model are not finite, so its text would mean nothing. '
                        'Are weights or scales damaged? Try another --scale= or --dtype=.')
    return logits, cache


# ---------------------------------------------------------------------- speed

def store_column_major(model):
    """
    Store a model's float32 matrices on a CPU column-major, for decoding. No value changes. Products
    with one token become up to 2.5 times as fast; products with many tokens stay as fast as before.
    Storing takes as long as decoding 1 to 12 tokens, so a stage does it once.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight
            if weight.device.type == 'cpu' and weight.dtype == torch.float32:
                weight.data = weight.data.t().contiguous().t()


def step_of(model, cache, compile):
    """
    The function that reads the next token, called as model(token, tail=1, cache=cache): the model
    itself, or one compiled graph for all steps. A graph decodes 1.2 times as fast on a CPU and 4
    times on a GPU, where it is a CUDA graph, but compiling pays only after thousands of tokens.
    All steps of a graph do the same with tensors of the same shapes at the same addresses. So the
    length becomes a tensor, and a step reads all slots.
    """
    if not compile or not isinstance(cache, KVCache) or model.depends_on_length:
        return model
    cache.length = torch.tensor([cache.length], device=cache.device)
    for x in cache.length, *cache.stored.values():
        torch._dynamo.mark_static_address(x, guard=False)
    mode = 'reduce-overhead' if cache.device.type == 'cuda' else None
    return torch.compile(model, dynamic=False, mode=mode)


# ---------------------------------------------------------------------- decoding

@torch.no_grad()
def generate(model, prompt, max_new_tokens, temperature=0, top_k=None, generator=None,
             compile=False):
    """
    Yield max_new_tokens ids, one by one, that continue a prompt, a list of ids. temperature: 0
    takes the likeliest token; top_k: draw only from the k likeliest tokens; compile: see step_of().
    """
    logits, cache = read_prompts(model, [prompt], max_new_tokens)            # (1, V)
    read = step_of(model, cache, compile)
    for _ in range(max_new_tokens):
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)                          # (1, 1)
        else:
            logits = logits.float() / temperature
            if top_k:
                least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        yield token.item()
        logits = read(token, tail=1, cache=cache)[:, -1]


@torch.no_grad()
def complete(model, prompts, max_new_tokens, eos=(), beams=1, not_first=()):
    """
    Continue each prompt, a list of ids, by beam search; with one beam, this is greedy decoding.
    Returns a list of at most max_new_tokens new ids for each. eos: ids that end a text and are not
    part of it. not_first: ids that may not come first. The result does not depend on the other
    prompts.
    """
    # each prompt takes the next result of its length: beam_search() keeps their order
    found = {}
    for n in {len(prompt) for prompt in prompts}:  # those of one length share a batch
        batch = [prompt for prompt in prompts if len(prompt) == n]
        found[n] = iter(beam_search(model, batch, max_new_tokens, eos, beams, not_first))
    return [next(found[len(prompt)]) for prompt in prompts]


def beam_search(model, prompts, max_new_tokens, eos, beams, not_first):
    """
    complete() for prompts of one length. The rules are the defaults of transformers.

    Greedy decoding keeps one text and always adds the likeliest token. A beam search keeps several
    unfinished texts, the beams, so that a text with an unlikely token can win if what follows it is
    likely. A step adds every token to every beam, and ranks the new texts of a prompt by ln p, the
    sum over their tokens. The best that do not end are the next beams. One that ends is finished if
    it ranks among the first `beams`, and its score is ln p / its number of tokens. An example with
    two beams, a and b, and the end token "." :

        beam      ln p        new text, by rank    ln p
        a         -1.0        ac                   -1.2    a beam
        b         -1.3        b.                   -1.4    is finished, scores -1.4 / 2 = -0.7
                              ad                   -1.5    a beam
                              a.                   -2.0    ranks below 2, so it is dropped

    A prompt is done when it has `beams` finished texts and its best beam, by ln p / its number of
    tokens, is no better than the worst of them. After max_new_tokens every text counts as ended.
    """
    logits, cache = read_prompts(model, prompts, max_new_tokens)
    B, V = logits.shape
    if beams > 1:  # not every cache of transformers can repeat
        cache.repeat(beams)
    logits = logits.repeat_interleave(beams, dim=0)          # (B * beams, V)
    texts = [[]] * (B * beams)                               # new ids of each beam
    # At first all beams of a prompt are the same text, so only one of them may be continued.
    log_p = torch.tensor([0.0] + [-1e9] * (beams - 1)).repeat(B).to(logits.device)
    finished, done = [[] for _ in prompts], set()            # finished: [(score, ids)], best first
    for n in range(1, max_new_tokens + 1):                   # tokens of a new text
        log_p = log_p[:, None] + logits.float().log_softmax(-1)              # (B * beams, V)
        if n == 1:
            log_p[:, not_first] = -math.inf
        # At most len(eos) * beams new texts end, so of this many at least `beams` go on.
        ranked = log_p.view(B, beams * V).topk((1 + len(eos)) * beams)       # (B, ranks)
        beams_of_all = []
        for b in range(B):
            going_on = []                                    # [(ln p, row of the beam, token)]
            ranks = zip(ranked.values[b].tolist(), ranked.indices[b].tolist())
            for rank, (score, place) in enumerate(ranks):
                row, token = b * beams + place // V, place % V  # place: in (beams, V), flattened
                if token not in eos and n < max_new_tokens:
                    going_on.append((score, row, token))
                elif rank < beams and b not in done:
                    finished[b].append((score / n, texts[row] + [token]))
            finished[b] = sorted(finished[b], reverse=True)[:beams]
            # finished texts are scored by ln p / tokens, so their rival is, too
            if going_on and len(finished[b]) == beams and going_on[0][0] / n <= finished[b][-1][0]:
                done.add(b)
            beams_of_all += going_on[:beams]
        if n == max_new_tokens or len(done) == B:
            break
        texts = [texts[row] + [token] for _, row, token in beams_of_all]
        log_p, rows, tokens = (torch.tensor(x, device=logits.device) for x in zip(*beams_of_all))
        if beams > 1:
            cache.reorder(rows, n - 1)
        logits = model(tokens[:, None], tail=1, cache=cache)[:, -1]
    return [[token for token in own[0][1] if token not in eos] for own in finished]


# ---------------------------------------------------------------------- answers

def identity(model, info):
    """
    A hash of a model, its tokenizer, its softmax scales and its other small vectors. info: of
    open_model().
    """
    tokenizer = info['tokenizer'] | {'name': ''}  # which may be a path
    parts = [info['digest'], info['model_config'], tokenizer]
    sets = {0: small_vectors(model), **getattr(model, 'scale_sets', {})}
    for length, vectors in sets.items():
        for name, vector in vectors.items():
            parts += [length, name, vector.tolist()]
    return stable_hash(*parts)


def read_answers(folder, about):
    """{number of a question: its answer} from the files of a folder, if a line has this `about`."""
    rows = {}
    for file in folder.glob('*.jsonl'):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a stop may have cut the line
                row = json.loads(line)
                if row['about'] == about:
                    rows[row['item']] = row
    return rows


def answer_all(path, about, sizes, batch_tokens, answer, runtime):
    """
    Ask a model many questions, so that a stopped run goes on. Returns the answers to all of them
    in order, on every rank. Each answer is a line of JSON in the file of its rank, PATH/RANK.jsonl.
    about: all that the answers depend on. sizes: tokens of each question, the longest first.
    answer(items) gets the numbers of some questions, of at most batch_tokens tokens, and returns a
    dict for each.
    """
    folder, about = Path(path), stable_hash(about)
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f'{runtime.rank}.jsonl'
    with filelock.FileLock(f'{own}.lock', timeout=1), open(own, 'a') as file:
        there = read_answers(folder, about)
        mine = range(runtime.rank, len(sizes), runtime.world_size)
        todo = [i for i in mine if i not in there]
        progress = tqdm(total=len(todo), desc=path, disable=None)
        while todo:
            n = max(1, batch_tokens // sizes[todo[0]])
            batch, todo = todo[:n], todo[n:]
            for i, row in zip(batch, answer(batch)):  # first a line end, in case one is missing
                file.write('\n' + json.dumps({'about': about, 'item': i} | row))
            file.flush()
            progress.update(len(batch))
    if runtime.world_size > 1:
        dist.barrier()
    rows = read_answers(folder, about)
    return [rows[i] for i in range(len(sizes))]
